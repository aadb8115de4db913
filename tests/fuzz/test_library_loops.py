"""The fuzzer of loops of accelerate and Lightning in a short form. The long form: tools/fuzz libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="the fuzzer of loops of libraries needs accelerate")
pytest.importorskip("lightning", reason="the fuzzer of loops of libraries needs lightning")
from fuzz import cases, programs
from fuzz.libraries import DEFAULTS, LIBRARIES
from fuzz.program_actions import ACTIONS

pytestmark = pytest.mark.usefixtures("prepared")
OPTIONS = {**programs.PLAIN_OPTIONS, "commit_every": 1}
PLAIN = {
    "seed": 1,
    "size": 1,
    "layers": ["linear"],
    "tied": False,
    "rule": "adamw",
    "actions": [],
    "end": None,
    "after": [],
}


def program_of(library: str, arguments: dict[str, Any], **others: Any) -> cases.Program:
    return {
        **PLAIN,
        "options": OPTIONS,
        **others,
        "library": library,
        "arguments": {**DEFAULTS[library], **arguments},
    }


def test_some_loops_train_as_without_swapper(run_some: Callable[[cases.Kind, int], None]) -> None:
    run_some(LIBRARIES, 4)


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_loop_of_accelerate_goes_on_in_the_middle_of_an_epoch(how: str) -> None:
    arguments = {"shuffled": True, "accumulation": 2, "epochs": 2, "evaluation": "epoch"}
    program = program_of("accelerate", arguments, layers=["dropped+linear"], end=[how, "before step", 4])
    assert cases.watched(LIBRARIES, program) is None


AWAY: dict[str, dict[str, Any]] = {
    "on NVMe": {"gradients": "nvme"},
    "off the device": {"device": "late", "update_on": "cpu"},
}


@pytest.mark.parametrize("where", AWAY)
def test_lightning_moves_the_module_to_the_cpu_when_gradients_are_away(where: str) -> None:
    program = program_of("lightning", {"limit_val_batches": 0}, options={**OPTIONS, **AWAY[where]})
    assert cases.watched(LIBRARIES, program) is None


def change_ours(side: Any) -> None:
    with torch.no_grad():
        side.model.scale.mul_(2.0 if side.manager is not None else 1.0)


BAD: dict[str, tuple[str, Callable[..., object]]] = {
    "other weights": ("differs", change_ours),
    "an error of Python's": ("KeyError", lambda side: side.manager is not None and {}["key"]),
}


@pytest.mark.parametrize("library", ["accelerate", "lightning"])
@pytest.mark.parametrize("kind", BAD)
def test_the_fuzzer_notices(kind: str, library: str, check_noticed: Callable[..., None]) -> None:
    event = {"accelerate": "after step", "lightning": "train_batch_end"}[library]
    program = program_of(library, {}, actions=[[event, 2, "read", 1]], layers=["linear", "linear"])
    check_noticed(LIBRARIES, program, ACTIONS, "read", *BAD[kind])


@pytest.mark.parametrize("end", [None, "interrupted", "killed"])
@pytest.mark.parametrize("order", ["offload first", "prepare first"])
def test_a_loop_of_accelerate_on_two_ranks_is_plain_torchs(order: str, end: str | None) -> None:
    arguments = {"order": order, "accumulation": 2, "clip": "norm"}
    actions = [["after step", 1, "save state", 1]]
    program = program_of("accelerate", arguments, size=2, actions=actions, end=end and [end, "before step", 2])
    assert cases.watched(LIBRARIES, program) is None

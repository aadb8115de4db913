"""The fuzzer of several managers in a short form. The long form: tools/fuzz managers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuzz import cases, programs
from fuzz.managers import ACTIONS, MANAGERS, Sides

pytestmark = pytest.mark.usefixtures("prepared")
MODEL = {"layers": ["linear"], "tied": False, "rule": "adamw", "options": {**programs.PLAIN_OPTIONS, "commit_every": 1}}
PROGRAM = {"seed": 1, "models": [{"seed": 2, **MODEL}, {"seed": 3, **MODEL}]}


def test_some_models_train_beside_each_other_as_without_swapper(run_some: Callable[[cases.Kind, int], None]) -> None:
    run_some(MANAGERS, 4)


@pytest.mark.parametrize("name", ACTIONS)
def test_each_action_is_possible(name: str) -> None:
    loop = [["train", 1], [name, 2], ["joint", 3], [name, 4], ["train interleaved", 5]]
    assert cases.watched(MANAGERS, {**PROGRAM, "loop": loop}) is None


def change_ours(sides: Sides) -> None:
    with torch.no_grad():
        for side in sides:
            side.model.scale.mul_(2.0 if side.manager is not None else 1.0)


BAD: dict[str, tuple[str, Callable[[Sides], Any]]] = {
    "other weights": ("differs", change_ours),
    "an error of Python's": ("KeyError", lambda sides: sides[0].manager is not None and {}["key"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_the_fuzzer_notices(kind: str, check_noticed: Callable[..., None]) -> None:
    check_noticed(MANAGERS, {**PROGRAM, "loop": [["joint", 1], ["distil", 2]]}, ACTIONS, "distil", *BAD[kind])

"""The fuzzer of training programs on several ranks in a short form. The long form: tools/fuzz ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import swapper
from fuzz import cases, programs, ranks
from fuzz.program_passes import Side

pytestmark = pytest.mark.usefixtures("prepared")
PROGRAM = {
    **ranks.draw("1 0"),
    **ranks.PLAIN,
    "spread": "fsdp2",
    "layers": ["feed forward"],
    "alone": [True],
    "options": dict(programs.PLAIN_OPTIONS),
    "loop": [["ordinary", 1], ["step", 2], ["read whole", 3]],
}


def test_some_programs_train_as_plain_torch(run_some: Callable[[cases.Kind, int], None]) -> None:
    run_some(ranks.RANKS, 3)


def is_the_last_one_of_ours(side: Side) -> bool:
    return side.manager is not None and dist.get_rank() == 1


BAD: dict[str, tuple[str, Callable[[Side], Any]]] = {
    "other results of one": ("read whole] result", is_the_last_one_of_ours),
    "an error of one": ("KeyError", lambda side: is_the_last_one_of_ours(side) and {}["key"]),
    "a rank that ends": ("rank-1 ended early", lambda side: is_the_last_one_of_ours(side) and os._exit(3)),
}


@pytest.mark.parametrize("kind", BAD)
def test_the_fuzzer_notices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, act = BAD[kind]
    monkeypatch.setitem(ranks.RankTraining.actions, "read whole", act)
    problem = cases.watched(ranks.RANKS, PROGRAM)
    assert problem is not None and said in problem, problem


@pytest.mark.parametrize("spread", ["fsdp2", "replicas"])
def test_what_is_written_to_the_state_of_shards_is_there(spread: str) -> None:
    """By operations of DTensors, which pass by torch's functions."""
    loop = [["ordinary", 1], ["step", 2], ["optimizer state", 3], ["ordinary", 4], ["step", 5]]
    assert cases.watched(ranks.RANKS, {**PROGRAM, "spread": spread, "loop": loop}) is None


@pytest.mark.parametrize(
    "options", [{"gradients": "nvme"}, {"device": "late", "update_on": "device"}], ids=["nvme", "device"]
)
def test_gradients_of_shards_that_have_left_are_scaled(options: dict[str, Any]) -> None:
    """By torch.amp.GradScaler."""
    loop = [["scaled", 1], ["zero", 0], ["scaled", 2], ["zero", 0], ["ordinary", 3], ["step", 4]]
    program = {**PROGRAM, "options": {**programs.PLAIN_OPTIONS, **options}, "loop": loop}
    assert cases.watched(ranks.RANKS, program) is None


def test_what_ranks_send_each_other_arrives() -> None:
    """Parameters that are away, and their state, in collectives that write to them."""
    sends = [["send", seed] for seed in range(16)]
    loop = [["ordinary", 1], ["average gradients", 2], ["step", 3], *sends, ["ordinary", 4], ["step", 5]]
    assert cases.watched(ranks.RANKS, {**PROGRAM, "spread": "by hand", "loop": loop}) is None


def test_what_an_evaluation_changes_after_shards_were_read_is_in_a_snapshot() -> None:
    """While the updates of a deferred step are open: to read shards is no use of the next step, which would end that one."""
    loop = [["ordinary", 1], ["step", 2], ["swap average", 3], ["snapshot", 4]]
    program = {**PROGRAM, "layers": [], "alone": [], "options": {**programs.PLAIN_OPTIONS, "update": "deferred"}}
    assert cases.watched(ranks.RANKS, {**program, "groups": "last ones later", "loop": loop}) is None


@pytest.mark.parametrize("spread", ["fsdp2", "replicas"])
def test_a_shard_that_was_frozen_and_is_not_any_more_has_its_gradient_on_a_device_too(spread: str) -> None:
    layers, loop = ["frozen"] * 3, [["freeze", seed] for seed in (2, 3, 5, 7, 11)]
    options = {**programs.PLAIN_OPTIONS, "device": "late", "update_on": "device"}
    program = {**PROGRAM, "spread": spread, "layers": layers, "alone": [True] * 3, "options": options}
    assert cases.watched(ranks.RANKS, {**program, "loop": [*loop, ["ordinary", 1]]}) is None


CHANGES = [["other rate", 1], ["other decay", 2], ["schedule", 3], ["write", 601]]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[0])
@pytest.mark.parametrize("early", ["snapshot", "add group", "resume"])
@pytest.mark.parametrize("spread", ["fsdp2", "ddp"])
def test_what_changes_after_an_early_commit_is_committed_by_closing(spread: str, early: str, change: list[Any]) -> None:
    program = {
        **PROGRAM,
        "spread": spread,
        "groups": "last ones later",
        "options": {**PROGRAM["options"], "commit_every": 1},
    }
    step = [["ordinary", 1], ["step", 2], ["zero", 3]]
    assert cases.watched(ranks.RANKS, {**program, "loop": [*step, [early, 4], change, ["resume", 5], *step]}) is None


def test_faults_are_served_where_this_process_has_served_some(tmp_path: Path) -> None:
    """swapper's handler lies over faulthandler's, as a test before may have left it. Shards are written to by their addresses."""
    model = nn.Linear(8, 8)
    with swapper.SwapManager(tmp_path, host_memory="16MiB") as manager:
        manager.offload(model, params="nvme")
        assert model.weight.detach().sum().isfinite()
    loop = [["ordinary", 1], ["step", 2], ["zero", 3], ["resume", 4], ["write", 601]]
    assert cases.watched(ranks.RANKS, {**PROGRAM, "loop": loop}) is None

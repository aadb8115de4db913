"""The plan says what will happen, and does nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import swapper
from e2e.models import Net, layers, layers_step
from e2e.twins import Twins, adamw

MakeTwins = Callable[..., Twins]


@pytest.mark.large_table
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"params": "host"},
        {"optimizer_state": "host"},
        {"room_bytes": 1 << 20},
        {"commit_every": None, "room_bytes": 1 << 20},
        {"commit_every": 3},
        {"commit_every": 3, "room_bytes": 2 << 20},
        {"commit_every": 2, "params": "host", "room_bytes": 2 << 20},
        {"gradients": "nvme"},
    ],
    ids=str,
)
def test_a_step_moves_what_was_planned(twins: MakeTwins, options: dict[str, object], master: bool) -> None:
    pair = twins(layers(), master=master, wait=True, **options)
    plan = pair.plan()
    pair.offload()
    manager = pair.manager
    assert manager is not None
    assert plan.budget.pool_bytes == manager.counters.pool_bytes
    assert plan.places == {
        "param": options.get("params", "nvme"),
        "state": options.get("optimizer_state", "nvme"),
        "grad": options.get("gradients", "host"),
    }
    pair.train(layers_step, steps=6)
    before = manager.counters.snapshot()
    pair.train(layers_step, steps=6)
    after = manager.counters.snapshot()
    read, written = ((after[name] - before[name]) / 6 for name in ("bytes_read", "bytes_written"))
    on_the_way = manager.counters.pool_bytes / 6  # when the counting began, or ended
    planned_read = plan.traffic.total_read_bytes
    planned = plan.traffic.total_written_bytes + (plan.commit_bytes / plan.commit_every if plan.commit_every else 0)
    assert read - planned_read <= 0.02 * read + on_the_way
    assert written - planned <= 0.02 * written + on_the_way
    # Where the drive is late, pages stay until they are used again: not read, nor written unless a commit is due each step.
    stayed = manager.counters.pool_bytes
    assert planned_read - read <= 0.02 * read + on_the_way + stayed
    assert planned - written <= 0.02 * written + on_the_way + (0 if plan.commit_every == 1 else stayed)
    assert sum(path.stat().st_blocks * 512 for path in pair.run_files()) == pytest.approx(
        plan.space_bytes - plan.scratch_bytes, rel=0.02
    )


def test_planning_changes_nothing(tmp_path: Path) -> None:
    model = Net()
    optimizer = adamw(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        text = str(manager.plan(model, optimizer))
        assert [path.name for path in tmp_path.rglob("*") if path.suffix == ".swap"] == []
    for word in ("parameters", "host memory", "drive space", "a step reads", "commits", "wear"):
        assert word in text
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    assert not optimizer.state


def test_a_budget_that_is_too_small_is_refused_by_the_plan_too(tmp_path: Path) -> None:
    model = Net()
    with (
        swapper.SwapManager(tmp_path, host_memory=4096) as manager,
        pytest.raises(swapper.BudgetError, match="at least"),
    ):
        manager.plan(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")

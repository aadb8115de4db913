"""`manager.stats()` says of a step what happened in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import devices
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import swapper
from e2e.models import LAYER_WIDTH, layers, layers_step
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]


class Checkpointed(nn.Module):
    """Layers whose forwards run again in backward, reentrant or not."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(LAYER_WIDTH, LAYER_WIDTH) for _ in range(12))
        self.reentrant = reentrant

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value.requires_grad_()
        for layer in self.layers:
            value = checkpoint(layer, value, use_reentrant=self.reentrant)
        return value


def manager_of(pair: Twins) -> swapper.SwapManager:
    assert pair.manager is not None
    return pair.manager


@pytest.mark.parametrize(
    "options",
    [{}, {"params": "host"}, {"commit_every": 2}, {"gradients": "nvme"}, {"commit_every": None, "room_bytes": 1 << 20}],
    ids=str,
)
def test_bytes_by_kind_and_phase_are_those_that_the_engine_moved(twins: MakeTwins, options: dict[str, Any]) -> None:
    pair = twins(layers(), wait=True, **options)
    plan = pair.plan()
    pair.offload()
    manager = manager_of(pair)
    steps = []
    for _ in range(8):
        pair.both(layers_step)
        steps.append(manager.stats())
    manager.current.run.engine.drain()  # what was submitted is done
    counters = manager.counters
    assert sum(counters.read_bytes.values()) == counters.bytes_read
    assert sum(counters.written_bytes.values()) == counters.bytes_written
    assert [stats.step for stats in steps] == list(range(1, 9))
    for family in ("param", "state", "grad"):
        read = sum(stats.total.read_bytes[family] for stats in steps[4:]) / 4
        planned = plan.traffic.read_bytes.get(family, 0)
        assert abs(read - planned) <= 0.02 * planned + counters.pool_bytes / (1 if devices.NAME else 4), family


def test_where_nothing_is_away_backward_has_its_phase_too(twins: MakeTwins) -> None:
    pair = twins(layers(), params="host", optimizer_state="host")
    pair.train(layers_step, steps=2)
    assert all(
        manager_of(pair).stats().phases[phase].wall_s > 0 for phase in ("forward", "backward", "step", "between")
    )
    pair.finish(paged=False)


@pytest.mark.parametrize(
    "model", [layers(), Checkpointed(False), Checkpointed(True)], ids=["plain", "non-reentrant", "reentrant"]
)
def test_phases_are_where_things_happen(twins: MakeTwins, model: nn.Module) -> None:
    pair = twins(model)
    manager = manager_of(pair)
    pair.train(layers_step, steps=2)
    before = manager.counters.snapshot()
    pair.both(layers_step)
    after, stats = manager.counters.snapshot(), manager.stats()
    assert all(stats.phases[phase].wall_s > 0 for phase in ("forward", "backward", "step", "between"))
    assert (
        stats.phases["step"].update_s == pytest.approx(stats.total.update_s) == after["update_s"] - before["update_s"]
    )
    for name in ("read_wait_s", "write_wait_s", "frame_wait_s"):
        assert getattr(stats.total, name) == pytest.approx(after[name] - before[name], abs=1e-9)
    assert stats.total.wait_s <= stats.wall_s
    # The state is read in the step or ahead of it; parameters are written nowhere else.
    assert sum(stats.phases["step"].written_bytes.values()) == stats.written_bytes > 0
    assert stats.pages_used == after["pages_used"] - before["pages_used"] > 0
    assert 0 <= stats.in_time_rate <= 1 and 0 <= stats.prefetch_hit_rate <= 1
    pair.finish()


def test_all_that_comes_is_asked_for_ahead_where_the_order_is_known(twins: MakeTwins) -> None:
    pair = twins(layers(), room_bytes=1 << 20)
    manager = manager_of(pair)
    pair.train(layers_step, steps=4)
    stats = manager.stats()
    assert stats.prefetch_hit_rate > 0.9, str(stats)
    pair.finish(paged=False)


def test_an_evaluation_between_steps_is_forward(twins: MakeTwins) -> None:
    pair = twins(layers())
    manager = manager_of(pair)
    pair.train(layers_step, steps=2)
    pair.both(layers_step)

    def evaluate(model: nn.Module, _: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.ones(4, LAYER_WIDTH))

    before = manager.counters.read_bytes["param"]
    for _ in range(3):
        pair.both(evaluate)
    evaluated = manager.counters.read_bytes["param"] - before
    assert manager.stats().step == 3  # the last step is still the last step
    pair.both(layers_step)
    assert 0 < evaluated <= manager.stats().phases["forward"].read_bytes["param"]
    pair.finish()


def test_the_manager_shows_a_table_and_a_line(twins: MakeTwins) -> None:
    pair = twins(layers())
    manager = manager_of(pair)
    assert manager.stats().step == 0
    pair.both(layers_step)
    assert "backward" in str(manager.stats()) and "s waiting" in manager.stats().brief
    pair.finish(paged=False)

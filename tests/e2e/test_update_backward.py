"""Updates during backward: the same losses, parameters, gradients and state as plain torch; what cannot be proved exact waits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import devices
import pytest
import torch
from torch.optim import AdamW

from e2e.early import train
from e2e.models import Net, finish_step, loss_of, tokens, train_step
from e2e.optimizers import Counting
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]
Run = Callable[[Any, Any], Any]


def test_the_plan_says_what_a_step_moves(backward: MakeTwins) -> None:
    pair = backward(Net(depth=10).bfloat16(), partial(AdamW, lr=1e-3), master=True, wait=True)
    pair.budget = (8 if devices.NAME else 6) << 20  # a device has slices of its own in the pool
    plan = pair.plan()
    pair.offload()
    pair.train(train_step, steps=3)
    before = pair.manager.counters.bytes_read, pair.manager.counters.bytes_written
    pair.train(train_step, steps=4)
    read = (pair.manager.counters.bytes_read - before[0]) / 4
    written = (pair.manager.counters.bytes_written - before[1]) / 4
    assert read == pytest.approx(plan.traffic.total_read_bytes, rel=0.1)
    assert written == pytest.approx(plan.traffic.total_written_bytes, rel=0.1)
    stats = pair.manager.stats()
    assert stats.phases["backward"].update_s > 0
    assert sum(stats.phases["backward"].written_bytes.values()) > sum(stats.phases["step"].written_bytes.values())
    pair.finish()


# --- what loops do --------------------------------------------------------------------------------------------------


def test_hooks_that_clip_one_gradient_run_before_its_update(backward: MakeTwins) -> None:
    pair = backward(Net())

    def clip(parameter: torch.Tensor) -> None:
        parameter.grad.clamp_(-1e-3, 1e-3)

    for model in (pair.plain, pair.swapped):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(clip)
    assert all(len(groups) >= 4 for groups in train(pair, train_step, steps=3))
    pair.finish()


def test_an_optimizer_that_counts_in_its_groups_counts_once_a_step(backward: MakeTwins) -> None:
    pair = backward(Net(), Counting)
    pair.train(train_step, steps=3)
    assert pair.optimizer.param_groups[0]["k"] == 3
    pair.finish()


# --- models that change ---------------------------------------------------------------------------------------------


def test_parameters_that_are_unfrozen_later_are_trained_from_then_on(backward: MakeTwins) -> None:
    model = Net()
    model.blocks[1].requires_grad_(False)
    pair = backward(model, select=lambda model: list(model.parameters()), room_bytes=4 << 20)
    pair.train(train_step, steps=2)
    pair.both(lambda model, _: model.blocks[1].requires_grad_(True) and None)
    first, *others = train(pair, train_step, steps=3)
    assert not first  # the layout changes in its step
    assert all(len(groups) >= 4 for groups in others)
    pair.finish(paged=False)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_group_that_is_used_twice_in_a_retained_graph_is_updated_in_the_last_backward_over_it(
    backward: MakeTwins, use_reentrant: bool
) -> None:
    """Reentrant checkpointing runs each use again in each of them."""
    pair = backward(Net(passes=2, checkpointing=use_reentrant))

    def run(model: Any, optimizer: Any) -> torch.Tensor:
        loss = loss_of(model, tokens())
        with pair.manager.accumulate() if model is pair.swapped else nullcontext():
            loss.backward(retain_graph=True)
        return finish_step(loss, optimizer)

    assert all(len(groups) >= 4 for groups in train(pair, run, steps=3))
    pair.finish()

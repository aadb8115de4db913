"""Updates during backward: the same losses, parameters, gradients and state as plain torch; what cannot be proved exact waits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from e2e.early import train, updated_early
from e2e.loops import autocast, evaluate_between, never_zero, zero_in_place
from e2e.models import Net, finish_step, loss_of, tokens, train_step
from e2e.optimizers import OPTIMIZERS, Counting
from e2e.twins import Twins, scheduled

pytestmark = pytest.mark.large_table

MakeTwins = Callable[..., Twins]
Run = Callable[[Any, Any], Any]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_kind_of_optimizer_is_bit_equal(backward: MakeTwins, name: str) -> None:
    pair = backward(Net(depth=10 if name == "adafactor" else 4), OPTIMIZERS[name])
    early = train(pair, train_step, steps=4)
    assert all(len(groups) >= 4 for groups in early)
    pair.finish()


@pytest.mark.parametrize("fused", [False, True], ids=["default", "fused"])
def test_bf16_with_fp32_masters_is_bit_equal(backward: MakeTwins, fused: bool) -> None:
    pair = backward(Net(depth=8).bfloat16(), partial(AdamW, lr=1e-3, fused=fused), master=True)
    assert all(len(groups) >= 8 for groups in train(pair, train_step, steps=6))
    pair.finish()


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "tied": (lambda: Net(tied=True), 4),
    "used twice": (lambda: Net(passes=2), 4),
    "checkpointing": (lambda: Net(checkpointing=False), 4),
    "reentrant checkpointing": (lambda: Net(checkpointing=True), 4),
    "reentrant checkpointing, used twice": (lambda: Net(checkpointing=True, passes=2), 4),
    "checkpointing, used twice": (lambda: Net(checkpointing=False, passes=2), 4),
    "dropout": (lambda: Net(dropout=0.1), 4),
}
"""Each with how many groups are updated in backward at least."""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("params", ["nvme", "host"])
def test_every_kind_of_model_is_bit_equal(backward: MakeTwins, name: str, params: str) -> None:
    make, least = MODELS[name]
    pair = backward(make(), params=params)
    early = train(pair, train_step, steps=4)
    assert all(len(groups) >= least for groups in early)
    pair.finish(paged=False)


@pytest.mark.parametrize(("params", "state"), [("host", "nvme"), ("nvme", "host"), ("auto", "auto"), ("host", "host")])
@pytest.mark.parametrize("gradients", ["host", "nvme"])
def test_every_placement_is_bit_equal(backward: MakeTwins, params: str, state: str, gradients: str) -> None:
    pair = backward(Net(), params=params, optimizer_state=state, gradients=gradients)
    assert all(len(groups) >= 4 for groups in train(pair, train_step, steps=4))
    pair.finish(paged=False)


@pytest.mark.parametrize("policy", [None, 2])
def test_with_other_commits_it_is_bit_equal(backward: MakeTwins, policy: Any) -> None:
    pair = backward(Net(), commit_every=policy)
    pair.train(train_step, steps=5)
    pair.finish()


def test_the_plan_says_what_a_step_moves(backward: MakeTwins) -> None:
    pair = backward(Net(depth=10).bfloat16(), partial(AdamW, lr=1e-3), master=True, wait=True)
    pair.budget = 6 << 20
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


@contextmanager
def accumulating(pair: Twins, model: Any, wanted: bool = True) -> Iterator[None]:
    if model is pair.swapped and wanted:
        with pair.manager.accumulate():
            yield
    else:
        yield


def accumulate(pair: Twins, model: Any, optimizer: Any) -> torch.Tensor:
    losses = []
    for last in (False, False, True):
        with accumulating(pair, model, wanted=not last):
            loss = loss_of(model, tokens()) / 3
            loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses)


def two_losses(model: Any, optimizer: Any) -> torch.Tensor:
    """Two forwards, then two backwards: the first does not complete any group."""
    one, other = loss_of(model, tokens()), loss_of(model, tokens())
    one.backward()
    other.backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack([one.detach(), other.detach()])


def retained(model: Any, optimizer: Any) -> torch.Tensor:
    loss = loss_of(model, tokens())
    loss.backward(retain_graph=True)
    return finish_step(loss, optimizer)


def gradient_penalty(model: Any, optimizer: Any) -> torch.Tensor:
    loss = loss_of(model, tokens())
    bias = model.blocks[1].up.bias
    (gradient,) = torch.autograd.grad(loss, bias, create_graph=True)
    loss = loss + gradient.square().sum()
    return finish_step(loss, optimizer)


def discard_a_forward(model: Any, optimizer: Any) -> torch.Tensor:
    loss_of(model, tokens())
    return train_step(model, optimizer)


def look_at_gradients(model: Any, optimizer: Any) -> torch.Tensor:
    """To look is allowed between backward and step, in all the ways that loops do."""
    loss = loss_of(model, tokens())
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [g.data.norm(2) for g in gradients] + list(torch._foreach_norm(gradients))
    kept = copy.deepcopy(gradients[0])
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack([loss.detach(), *norms, kept.sum()])


def closure(pair: Twins, model: Any, optimizer: Any) -> torch.Tensor:
    batch = tokens()

    def run() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    if model is pair.swapped or not hasattr(optimizer, "inner"):
        return optimizer.step(run).detach()
    loss = run()
    optimizer.step()
    return loss.detach()


LOOPS: dict[str, tuple[Callable[[Twins], Run], int]] = {
    "accumulation": (lambda pair: partial(accumulate, pair), 3),
    "closure": (lambda pair: partial(closure, pair), 0),
    "two losses": (lambda _: two_losses, 3),
    "retained": (lambda _: retained, 0),
    "gradient penalty": (lambda _: gradient_penalty, 0),
    "never zeroed": (lambda _: never_zero, 3),
    "zeroed in place": (lambda _: zero_in_place, 3),
    "evaluation": (lambda _: evaluate_between, 0),
    "a forward that is discarded": (lambda _: discard_a_forward, 0),
    "autocast": (lambda _: autocast, 3),
    "looking at gradients": (lambda _: look_at_gradients, 3),
}
"""Each with how many groups are updated in backward at least."""


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("params", ["nvme", "host"])
def test_every_loop_is_bit_equal(backward: MakeTwins, name: str, params: str) -> None:
    make_run, least = LOOPS[name]
    pair = backward(Net(depth=3), params=params)
    early = train(pair, make_run(pair), steps=4)
    assert all(len(groups) >= least for groups in early), early
    pair.finish(paged=False)


@pytest.mark.parametrize("gradients", ["host", "nvme"])
def test_accumulation_with_gradients_anywhere_is_bit_equal(backward: MakeTwins, gradients: str) -> None:
    pair = backward(Net().bfloat16(), partial(AdamW, lr=1e-3), master=True, gradients=gradients)
    early = train(pair, partial(accumulate, pair), steps=3)
    assert all(len(groups) >= 4 for groups in early)
    pair.finish(paged=False)


def test_accumulate_does_nothing_where_updates_wait_for_the_step(twins: MakeTwins) -> None:
    for update in ("step", "deferred"):
        pair = twins(Net(), update=update)
        pair.train(partial(accumulate, pair), steps=2)
        pair.finish(paged=False)


def test_a_scheduler_that_steps_after_the_optimizer_is_bit_equal(backward: MakeTwins) -> None:
    pair = backward(Net(), partial(SGD, lr=0.1, momentum=0.9))
    pair.train(scheduled(pair), steps=4)
    pair.finish()


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


def test_a_compiled_model_is_bit_equal(backward: MakeTwins) -> None:
    pair = backward(Net())
    model = torch.compile(pair.swapped, backend="aot_eager")
    state = torch.get_rng_state()
    for step in range(3):
        torch.manual_seed(step)
        expected = train_step(pair.plain, pair.plain_optimizer)
        torch.manual_seed(step)
        loss = loss_of(model, tokens())
        loss.backward()
        assert len(updated_early(pair)) >= 4
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        assert torch.equal(loss, expected)
    torch.set_rng_state(state)
    pair.finish()


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

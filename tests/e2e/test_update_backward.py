"""Updates during backward: the same losses, parameters, gradients and state as plain torch; what cannot be proved exact waits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from e2e.early import train, updated_early
from e2e.models import WIDTH, Net, finish_step, loss_of, tokens, train_step
from e2e.optimizers import OPTIMIZERS
from e2e.twins import Twins, scheduled

pytestmark = pytest.mark.large_table

MakeTwins = Callable[..., Twins]


@pytest.fixture
def backward(twins: MakeTwins) -> MakeTwins:
    def make(model: nn.Module | None = None, *arguments: Any, **options: Any) -> Twins:
        return twins(model or Net(), *arguments, update="backward", **options)

    return make


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
    assert stats.phases["backward"].update_s > stats.phases["step"].update_s
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


def two_losses(pair: Twins, model: Any, optimizer: Any) -> torch.Tensor:
    """Two forwards, then two backwards: the first does not complete any group."""
    one, other = loss_of(model, tokens()), loss_of(model, tokens())
    one.backward()
    other.backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack([one.detach(), other.detach()])


def retained(pair: Twins, model: Any, optimizer: Any) -> torch.Tensor:
    loss = loss_of(model, tokens())
    loss.backward(retain_graph=True)
    return finish_step(loss, optimizer)


def gradient_penalty(pair: Twins, model: Any, optimizer: Any) -> torch.Tensor:
    loss = loss_of(model, tokens())
    bias = model.blocks[1].up.bias
    (gradient,) = torch.autograd.grad(loss, bias, create_graph=True)
    loss = loss + gradient.square().sum()
    return finish_step(loss, optimizer)


def never_zero(pair: Twins, model: Any, optimizer: Any) -> torch.Tensor:
    loss = loss_of(model, tokens())
    loss.backward()
    optimizer.step()
    return loss.detach()


def zero_in_place(pair: Twins, model: Any, optimizer: Any) -> torch.Tensor:
    loss = never_zero(pair, model, optimizer)
    model.zero_grad(set_to_none=False)
    return loss


def evaluate_between(pair: Twins, model: Any, optimizer: Any) -> torch.Tensor:
    loss = train_step(model, optimizer)
    with torch.no_grad():
        return torch.stack([loss, loss_of(model, tokens()), loss_of(model, tokens())])


def discard_a_forward(pair: Twins, model: Any, optimizer: Any) -> torch.Tensor:
    loss_of(model, tokens())
    return train_step(model, optimizer)


def autocast(pair: Twins, model: Any, optimizer: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, tokens())
    return finish_step(loss, optimizer)


def look_at_gradients(pair: Twins, model: Any, optimizer: Any) -> torch.Tensor:
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


LOOPS: dict[str, tuple[Callable[..., Any], int]] = {
    "accumulation": (accumulate, 3),
    "two losses": (two_losses, 3),
    "retained": (retained, 0),
    "gradient penalty": (gradient_penalty, 0),
    "never zeroed": (never_zero, 3),
    "zeroed in place": (zero_in_place, 3),
    "evaluation": (evaluate_between, 0),
    "a forward that is discarded": (discard_a_forward, 0),
    "autocast": (autocast, 3),
    "looking at gradients": (look_at_gradients, 3),
    "closure": (closure, 0),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("params", ["nvme", "host"])
def test_every_loop_is_bit_equal(backward: MakeTwins, name: str, params: str) -> None:
    run, least = LOOPS[name]
    pair = backward(Net(depth=3), params=params)
    early = train(pair, partial(run, pair), steps=4)
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


class Counting(AdamW):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_counts_in_its_groups_counts_once_a_step(backward: MakeTwins) -> None:
    pair = backward(Net(), Counting)
    pair.train(train_step, steps=3)
    assert pair.optimizer.param_groups[0]["k"] == 3
    pair.finish()


# --- how modules use parameters ---------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Layers that are used in an order that each call chooses.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, hidden: torch.Tensor, *order: int) -> torch.Tensor:
        for number in order:
            hidden = torch.tanh(self.layers[number](hidden))
        return hidden


def layered(order: Callable[[int], tuple[int, ...]]) -> Callable[[Any, Any], torch.Tensor]:
    turns: dict[int, int] = {}

    def run(model: Any, optimizer: Any) -> torch.Tensor:
        turn = turns[id(model)] = turns.get(id(model), -1) + 1
        loss = model(torch.randn(4, WIDTH), *order(turn)).square().mean()
        return finish_step(loss, optimizer)

    return run


ORDERS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "halves in turns": lambda turn: (0, 1, 2) if turn % 2 else (3, 4, 5),
    "another order each time": lambda turn: (0, 1, 2, 3, 4, 5)[turn % 6 :] + (0, 1, 2, 3, 4, 5)[: turn % 6],
    "the first one again at the end": lambda turn: (0, 1, 2, 3, 4, 5, 0),
    "one three times": lambda turn: (1, 2, 1, 3, 4, 1, 5),
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("params", ["nvme", "host"])
def test_every_order_of_modules_is_bit_equal(backward: MakeTwins, name: str, params: str) -> None:
    pair = backward(Layers(), partial(SGD, lr=1e-2, momentum=0.9), params=params, room_bytes=1 << 20)
    pair.train(layered(ORDERS[name]), steps=5)
    pair.finish(paged=False)


class Detached(Layers):
    """Uses each layer's weight once more, detached, two layers before: no gradient of it tells when it is needed last."""

    def forward(self, hidden: torch.Tensor, *order: int) -> torch.Tensor:
        for number in order:
            hidden = torch.tanh(self.layers[number](hidden))
            hidden = hidden + hidden @ self.layers[min(number + 2, 5)].weight.detach()
        return hidden


def test_parameters_that_other_modules_use_detached_wait_for_the_step_or_are_refused(backward: MakeTwins) -> None:
    """Where parameters are on NVMe each use is seen. In memory torch finds the ones that come too late."""
    run = layered(lambda turn: (0, 1, 2, 3, 4, 5))
    pair = backward(Detached(), partial(SGD, lr=1e-2), room_bytes=2 << 20)
    pair.train(run, steps=3)
    pair.finish(paged=False)
    pair = backward(Detached(), partial(SGD, lr=1e-2), params="host")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(pair.swapped, pair.optimizer)
    pair.close()


class Direct(Net):
    """The head multiplies with the embedding's weight directly, in no module's forward but the whole one's."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: Any = self.embedding(tokens) + self.position(tokens.shape[1])
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.embedding.weight)


class Segments(Net):
    """Several blocks in one segment of reentrant checkpointing."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: Any = self.embedding(tokens) + self.position(tokens.shape[1])
        for first in range(0, len(self.blocks), 2):
            segment = nn.Sequential(*self.blocks[first : first + 2])
            hidden = checkpoint(lambda h, run=segment: run(h), hidden, use_reentrant=True)
        return self.head(self.norm(hidden))


class Nested(Net):
    """Checkpoints within a checkpoint."""

    def __init__(self, reentrant: bool, **options: Any) -> None:
        super().__init__(**options)
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        def segment(hidden: torch.Tensor, first: int) -> torch.Tensor:
            for block in self.blocks[first : first + 2]:
                hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
            return hidden

        hidden: Any = self.embedding(tokens) + self.position(tokens.shape[1])
        for first in range(0, len(self.blocks), 2):
            hidden = checkpoint(segment, hidden, first, use_reentrant=self.reentrant)
        return self.head(self.norm(hidden))


WAYS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a weight used directly": (Direct, 3),
    "segments of several modules": (lambda: Segments(depth=6), 4),
    "nested, reentrant": (lambda: Nested(True), 2),
    "nested": (lambda: Nested(False), 4),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("params", ["nvme", "host"])
def test_every_way_of_using_parameters_is_bit_equal(backward: MakeTwins, name: str, params: str) -> None:
    make, least = WAYS[name]
    pair = backward(make(), params=params)
    early = train(pair, train_step, steps=3)
    assert all(len(groups) >= least for groups in early), early
    pair.finish(paged=False)


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

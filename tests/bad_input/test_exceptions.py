"""An exception in the middle of a step comes through as it is, leaves no lease behind, and training goes on bit-equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e.models import WIDTH, Block, Net, loss_of, tokens, train_step
from e2e.twins import Twins, before_each_update
from torch import nn

import swapper

MakeTwins = Callable[..., Twins]


class Trouble(Exception):
    """What the tests raise."""


class Raise(torch.autograd.Function):
    """Passes its input on; raises in the backward if told to."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, armed: bool) -> torch.Tensor:
        context.armed = armed
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if context.armed:
            raise Trouble
        return gradient, None


class Fragile(Block):
    """A block that can be told where to fail."""

    armed: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.armed == "hook":
            raise Trouble

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.armed == "start":
            raise Trouble
        result = super().forward(Raise.apply(value, self.armed == "backward, at the start"))
        if self.armed == "end":
            raise Trouble
        return Raise.apply(result, self.armed == "backward, at the end")


PLACES = ["start", "hook", "end", "backward, at the start", "backward, at the end"]


def fail(pair: Twins, block: int, place: str) -> None:
    def run(model: Any, optimizer: Any) -> str:
        model.blocks[block].armed = place
        with pytest.raises(Trouble):
            loss_of(model, tokens()).backward()
        model.blocks[block].armed = None
        return place

    pair.both(run)


VARIANTS: list[dict[str, Any]] = [{"passes": 2}, {"checkpointing": False}, {"checkpointing": True}]


@pytest.mark.parametrize(
    ("place", "options"),
    [*((place, {}) for place in PLACES), *((place, options) for place in PLACES[1::3] for options in VARIANTS)],
    ids=str,
)
def test_an_exception_in_forward_or_backward(twins: MakeTwins, place: str, options: dict[str, Any]) -> None:
    pair = twins(Net(make_block=Fragile, **options))
    pair.train(train_step, steps=2)
    for block in (0, 2):
        fail(pair, block, place)
        if "backward" not in place:
            pair.check_pager()  # a forward gives its leases back at once, a backward when the next pass begins
        pair.both(lambda model, _: model.zero_grad())
        pair.train(train_step, steps=1)
    fail(pair, 1, place)
    fail(pair, 3, place)  # twice in a row
    pair.both(lambda model, _: model.zero_grad())
    pair.train(train_step, steps=2)
    pair.finish()


@pytest.mark.parametrize("after", ["evaluation", "step", "gather", "snapshot", "zero_grad and step"])
def test_whatever_comes_after_a_failed_backward_works(twins: MakeTwins, after: str) -> None:
    pair = twins(Net(make_block=Fragile))
    pair.train(train_step, steps=2)
    fail(pair, 1, "backward, at the end")
    if after == "evaluation":
        with torch.no_grad():
            pair.both(lambda model, _: model(tokens()))
    elif after == "step":
        pair.both(lambda _, optimizer: optimizer.step())  # with the gradients that there are, as plain torch does
    elif after == "gather":
        with pair.manager.gather(pair.swapped.head):
            assert torch.equal(pair.swapped.head.weight, pair.plain.head.weight)
        pair.manager.current.run.model.passes.abandon()
    elif after == "snapshot":
        state = torch.load(pair.manager.snapshot(pair.directory / "a.pt").result())["model"]
        assert torch.equal(state["head.weight"], pair.plain.head.weight)
    else:
        pair.both(lambda model, _: model.zero_grad())
        pair.both(lambda _, optimizer: optimizer.step())
    pair.check_pager()
    pair.both(lambda model, _: model.zero_grad())
    pair.train(train_step, steps=2)
    pair.finish()


def test_a_failed_backward_keeps_the_gradients_that_plain_torch_keeps(twins: MakeTwins) -> None:
    pair = twins(Net(make_block=Fragile))
    pair.train(train_step, steps=1)
    fail(pair, 1, "backward, at the end")
    pair.assert_same_parameters()
    pair.manager.current.run.model.passes.abandon()
    pair.both(lambda model, _: loss_of(model, tokens()).backward())  # accumulates on top of them
    pair.both(lambda _, optimizer: (optimizer.step(), optimizer.zero_grad())[1])
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


def test_an_exception_in_a_closure_or_a_step_hook_leaves_the_step_untaken(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=1)

    def closure() -> None:
        raise Trouble

    def run(model: Any, optimizer: Any) -> None:
        with pytest.raises(Trouble):
            optimizer.step(closure)
        loss_of(model, tokens()).backward()
        handle = optimizer.register_step_pre_hook(lambda *_: closure())
        with pytest.raises(Trouble):
            optimizer.step()
        handle.remove()

    pair.both(run)
    assert pair.manager.step == 1
    pair.both(lambda _, optimizer: (optimizer.step(), optimizer.zero_grad())[1])
    pair.train(train_step, steps=1)
    pair.finish()


def test_an_error_of_torchs_own_in_the_middle_of_a_step(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=1)

    def wrong_shape(model: Any, _: Any) -> str:
        with pytest.raises(RuntimeError) as caught:
            model.blocks[0](torch.ones(3, WIDTH + 1))
        return str(caught.value)

    def second_backward(model: Any, _: Any) -> str:
        loss = loss_of(model, tokens())
        loss.backward()
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        model.zero_grad()
        return str(caught.value)

    def index_out_of_range(model: Any, _: Any) -> str:
        with pytest.raises(IndexError) as caught:
            model(torch.full((1, 4), 100_000))
        return str(caught.value)

    for run in (wrong_shape, second_backward, index_out_of_range):
        pair.both(run)
        pair.train(train_step, steps=1)
    pair.finish()


@pytest.mark.parametrize("options", [{}, {"master": True}], ids=["plain", "masters"])
def test_a_step_that_fails_can_be_taken_again(twins: MakeTwins, options: dict[str, Any]) -> None:
    """Everything is as it was before it: what the last commit names was not touched."""
    pair = twins(Net().bfloat16() if options else Net(), **options)
    pair.train(train_step, steps=2)
    pair.both(lambda model, _: loss_of(model, tokens()).backward())
    calls = iter(range(1000))

    def fail_in_the_middle() -> None:
        if next(calls) == 7:
            raise Trouble

    end = before_each_update(pair.manager.current.run.model._sweep, fail_in_the_middle)
    with pytest.raises(Trouble):
        pair.optimizer.step()
    end()
    pair.check_pager()
    pair.both(lambda _, optimizer: optimizer.step())
    pair.both(lambda model, _: model.zero_grad())
    pair.train(train_step, steps=2)
    pair.finish()


def test_a_step_whose_writes_fail_can_be_taken_again(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=2)
    pair.both(lambda model, _: loss_of(model, tokens()).backward())
    pair.manager.current.run.pager.flush()
    frames = pair.manager.current.run.pager._frames
    write, calls = frames.write, iter(range(1000))

    def fail_once(page: Any) -> None:
        if next(calls) == 3:
            raise swapper.IoError("write", "turn-0.swap", 0, 4096, 5)
        write(page)

    frames.write = fail_once
    with pytest.raises(swapper.IoError):
        pair.optimizer.step()
    frames.write = write
    pair.check_pager()
    pair.both(lambda _, optimizer: optimizer.step())
    pair.both(lambda model, _: model.zero_grad())
    pair.train(train_step, steps=1)
    pair.finish()


@pytest.mark.parametrize(
    "options", [{"params": "host"}, {"gradients": "nvme"}], ids=["no commits", "no gradients left"]
)
def test_a_step_that_fails_and_cannot_be_taken_again_ends_the_run_and_says_so(
    twins: MakeTwins, options: dict[str, Any]
) -> None:
    """Half-way through a sweep there is no way back but a snapshot."""
    pair = twins(Net(), **options)
    pair.train(train_step, steps=1)
    loss_of(pair.swapped, tokens()).backward()

    def fail(*_: Any) -> None:
        raise Trouble

    before_each_update(pair.manager.current.run.model._sweep, fail)
    with pytest.raises(Trouble):
        pair.optimizer.step()
    for use in (
        lambda: pair.optimizer.step(),
        lambda: loss_of(pair.swapped, tokens()),
        lambda: pair.manager.snapshot(pair.directory / "a.pt"),
    ):
        with pytest.raises(RuntimeError, match=r"failed half-way .* resume from the last .*snapshot"):
            use()
    pair.manager.current.run.pager.check()

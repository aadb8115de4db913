"""Changes by hand of parameters in memory, after a commit: nothing announces them, and nothing that follows loses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import Twins, fail_in_the_middle

MakeTwins = Callable[..., Twins]
Write = Callable[[nn.Parameter], Any]


def in_place(weight: nn.Parameter) -> None:
    weight.mul_(0.5)


def past_the_version(weight: nn.Parameter) -> None:
    weight.data.mul_(0.5)


def change_late(write: Write) -> Callable[[Any, Any], None]:
    """Take a step, run a forward, in which that is committed, and change a parameter then; a gradient is left."""

    def run(model: Any, optimizer: Any) -> None:
        train_step(model, optimizer)
        loss_of(model, tokens()).backward()
        with torch.no_grad():
            write(model.blocks[1].up.weight)

    return run


PLACES = pytest.mark.parametrize("params", ["host", "nvme"])
WRITES = pytest.mark.parametrize("write", [in_place, past_the_version])


@PLACES
@WRITES
def test_parking_keeps_them(twins: MakeTwins, write: Write, params: str) -> None:
    pair = twins(Net(), params=params, commit_every=1)
    pair.both(change_late(write))
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    with pair.manager.parked():
        pass
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@PLACES
@WRITES
def test_a_closed_run_goes_on_with_them(twins: MakeTwins, write: Write, params: str) -> None:
    pair = twins(Net(), params=params, commit_every=1)
    pair.both(change_late(write))
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    pair.resume(Net())
    assert pair.manager.step == 1
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@PLACES
@WRITES
def test_a_step_that_fails_is_not_undone_without_them(twins: MakeTwins, write: Write, params: str) -> None:
    pair = twins(Net(), params=params, commit_every=1)
    pair.both(change_late(write))
    fail_in_the_middle(pair)
    with pytest.raises(RuntimeError, match="a fault in the middle"):
        pair.optimizer.step()
    with pytest.raises(RuntimeError, match="memory and files hold a mix of two steps"):
        train_step(pair.swapped, pair.optimizer)


@PLACES
def test_a_step_that_fails_is_undone_where_nothing_was_changed(twins: MakeTwins, params: str) -> None:
    pair = twins(Net(), params=params, commit_every=1)
    pair.both(change_late(lambda weight: None))
    fail_in_the_middle(pair)
    with pytest.raises(RuntimeError, match="a fault in the middle"):
        pair.optimizer.step()
    pair.both(lambda _, optimizer: optimizer.step())
    pair.train(train_step, steps=2)
    pair.finish(paged=False)

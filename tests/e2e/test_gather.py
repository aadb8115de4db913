"""manager.gather: parameters that are away are there, to look at or to change, for as long as the context lasts."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import devices
import pytest
import torch
from torch import nn

import swapper
from e2e.models import WIDTH, Net, loss_of, tokens, train_step
from e2e.twins import Twins, assert_same

MakeTwins = Callable[..., Twins]
ROOM = 3 << 20  # more than the smallest budget: holds all parameters at once, but not their state as well


def update(_: Any, optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def test_a_parameter_a_module_and_a_list_can_be_read(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=2)
    manager, plain, swapped = pair.manager, pair.plain, pair.swapped
    with manager.gather(swapped.head.weight) as parameter:
        assert parameter is swapped.head.weight
        assert torch.equal(parameter, plain.head.weight)
    with manager.gather(swapped.blocks[2]) as module:
        assert module is swapped.blocks[2]
        assert_same(dict(module.state_dict()), dict(plain.blocks[2].state_dict()))
        assert torch.equal(module(torch.ones(1, WIDTH)), plain.blocks[2](torch.ones(1, WIDTH)))
    wanted = [swapped.blocks[0].up.weight, swapped.norm.bias]
    with manager.gather(wanted):
        assert torch.equal(wanted[0], plain.blocks[0].up.weight)
        assert wanted[1].tolist() == plain.norm.bias.tolist()
    with manager.gather(p for p in swapped.blocks[1].parameters()):
        assert swapped.blocks[1].up.weight.sum() == plain.blocks[1].up.weight.sum()
    with manager.gather([]):
        pass
    pair.train(train_step, steps=2)
    pair.finish()


def test_a_gathered_parameter_is_an_ordinary_one(twins: MakeTwins) -> None:
    pair = twins(Net())
    weight, expected = pair.swapped.head.weight, pair.plain.head.weight
    with pair.manager.gather(weight):
        assert type(weight) is nn.Parameter
        assert repr(weight) == repr(expected)
        shown = weight.clone() if devices.NAME else weight  # memory of a device has no arrays
        assert shown.numpy(force=True).tobytes() == expected.numpy(force=True).tobytes()
        assert torch.equal(pickle.loads(pickle.dumps(weight)), expected)
        assert torch.equal(copy.deepcopy(weight), expected)
        file = io.BytesIO()
        torch.save(weight, file)
        assert torch.equal(torch.load(io.BytesIO(file.getvalue())), expected)
    assert type(weight) is not nn.Parameter
    assert isinstance(weight, nn.Parameter)


def change(parameters: Any) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)
            parameter[0] += 1.0


@pytest.mark.parametrize("master", [False, True], ids=["plain", "masters"])
def test_a_change_inside_gather_write_lasts_and_masters_follow(twins: MakeTwins, master: bool) -> None:
    pair = twins(Net(depth=6).bfloat16() if master else Net(), master=master)
    pair.train(train_step, steps=2)

    change(pair.plain.blocks[1].parameters())
    change([pair.plain.head.weight])
    if master:
        # A master follows only where its parameter is another number now: elsewhere it keeps its precision.
        with torch.no_grad():
            for parameter, value in zip(pair.plain_optimizer.parameters, pair.plain_optimizer.masters, strict=True):
                value.copy_(torch.where(value.to(parameter.dtype) == parameter, value, parameter.float()))
    with pair.manager.gather(pair.swapped.blocks[1], write=True) as block:
        change(block.parameters())
    with pair.manager.gather(pair.swapped.head.weight, write=True) as weight:
        change([weight])

    pair.assert_same_parameters()
    pair.train(train_step, steps=3)
    pair.finish()


def test_a_change_lasts_through_an_exception_in_the_context(twins: MakeTwins) -> None:
    pair = twins(Net(depth=6).bfloat16(), master=True)
    pair.train(train_step, steps=1)
    with torch.no_grad():
        pair.plain.head.weight.fill_(0.25)
        index = [p is pair.plain.head.weight for p in pair.plain_optimizer.parameters].index(True)
        pair.plain_optimizer.masters[index].fill_(0.25)
    with pytest.raises(ZeroDivisionError), pair.manager.gather(pair.swapped.head, write=True) as head:
        with torch.no_grad():
            head.weight.fill_(0.25)
        raise ZeroDivisionError
    pair.train(train_step, steps=2)
    pair.finish()


def test_a_change_without_write_raises_and_names_the_way(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=1)
    with (
        pytest.raises(swapper.StateError, match=r"head\.weight was changed .*write=True"),
        pair.manager.gather(pair.swapped.head),
        torch.no_grad(),
    ):
        pair.swapped.head.weight.zero_()
    pair.check_pager()


def test_an_exception_inside_gather_comes_through_and_gives_the_lease_back(twins: MakeTwins) -> None:
    pair = twins(Net())
    for write in (False, True):
        with pytest.raises(ZeroDivisionError), pair.manager.gather(pair.swapped.blocks[0], write=write):
            raise ZeroDivisionError
        pair.check_pager()
    pair.train(train_step, steps=2)
    pair.finish()


def test_gathers_inside_each_other_are_counted(twins: MakeTwins) -> None:
    pair = twins(Net(), room_bytes=ROOM)
    manager, block = pair.manager, pair.swapped.blocks[0]
    with manager.gather(block):
        with manager.gather(block.up.weight), manager.gather(pair.swapped.head):
            pass
        assert torch.equal(block.up.weight, pair.plain.blocks[0].up.weight)
        pair.both(lambda model, _: loss_of(model, tokens()).backward())
        assert torch.equal(block.up.weight, pair.plain.blocks[0].up.weight)
    pair.check_pager()
    pair.both(update)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_gathering_more_than_the_pool_says_so_and_leaves_everything_usable(twins: MakeTwins) -> None:
    pair = twins(Net(depth=8))
    pair.train(train_step, steps=1)
    with pytest.raises(swapper.BudgetError, match="gather fewer"), pair.manager.gather(pair.swapped):
        raise AssertionError("the whole model does not fit")
    pair.check_pager()
    pair.train(train_step, steps=2)
    pair.finish()


def test_a_step_inside_gather_is_refused_and_works_after(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.both(lambda model, _: loss_of(model, tokens()).backward())
    with pair.manager.gather(pair.swapped.head), pytest.raises(swapper.StateError, match="leave the gather"):
        pair.optimizer.step()
    pair.both(update)
    pair.train(train_step, steps=2)
    pair.finish()


@pytest.mark.parametrize("write", [False, True])
def test_a_snapshot_inside_gather_is_refused(twins: MakeTwins, write: bool) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=1)
    path = pair.directory / "inside.pt"
    with pair.manager.gather(pair.swapped.head, write=write) as head:
        if write:
            with torch.no_grad():
                head.weight.fill_(0.5)
                pair.plain.head.weight.fill_(0.5)
        with pytest.raises(swapper.StateError, match="leave the gather"):
            pair.manager.snapshot(path)
    pair.manager.snapshot(path).wait()
    assert_same(torch.load(path)["model"], pair.plain.state_dict())
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


def test_what_is_not_of_the_model_is_refused(twins: MakeTwins) -> None:
    pair = twins(Net())
    for strange in (nn.Parameter(torch.zeros(3)), nn.Linear(2, 2), [torch.zeros(2)], pair.plain):
        with pytest.raises(swapper.StateError, match="not of the offloaded model"), pair.manager.gather(strange):
            raise AssertionError("gathered")
    pair.check_pager()


def test_a_copy_made_inside_gather_is_a_plain_model(twins: MakeTwins) -> None:
    pair = twins(Net(), room_bytes=ROOM)
    pair.train(train_step, steps=1)
    with pair.manager.gather(pair.swapped):
        copied = copy.deepcopy(pair.swapped)
    pair.train(train_step, steps=1)
    batch = tokens()
    loss_of(copied, batch).backward()
    pair.finish(paged=False)
    torch.optim.SGD(copied.parameters(), lr=0.1).step()
    assert loss_of(copied, batch).isfinite()


def test_a_state_dict_taken_inside_gather_stays_valid(twins: MakeTwins) -> None:
    pair = twins(Net(), room_bytes=ROOM)
    pair.train(train_step, steps=1)
    expected = copy.deepcopy(pair.plain.state_dict())
    with pair.manager.gather(pair.swapped):
        taken = pair.swapped.state_dict()
    pair.train(train_step, steps=3)
    assert_same(dict(taken), dict(expected))
    pair.finish(paged=False)


def test_pages_gathered_from_go_back_to_work_after_a_failed_backward(twins: MakeTwins) -> None:
    """The next forward forgets the pass that failed, but not what someone else still holds."""
    pair = twins(Net(), room_bytes=ROOM)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    hidden = torch.randn(2, WIDTH)
    head = pair.swapped.head
    with pair.manager.gather(head):
        result = pair.swapped.blocks[1](Broken.apply(pair.swapped.blocks[0](hidden)))
        with pytest.raises(ZeroDivisionError):
            result.sum().backward()
        pair.swapped.zero_grad()
        assert torch.equal(pair.swapped.blocks[0](hidden), pair.plain.blocks[0](hidden))
        assert torch.equal(head.weight, pair.plain.head.weight)
    pair.check_pager()
    pair.train(train_step, steps=2)
    pair.finish(paged=False)

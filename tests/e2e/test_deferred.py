"""Deferred updates: the same losses, parameters, gradients and state as plain torch, whoever looks at them and whenever."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, NAdam

import swapper
from e2e.loops import never_zero
from e2e.models import WIDTH, Halves, Net, finish_step, loss_of, tokens, train_step
from e2e.optimizers import Counting
from e2e.twins import Twins, alternating_halves, assert_closed_runs_go_on, assert_same, fail_in_the_middle

MakeTwins = Callable[..., Twins]
Run = Callable[[Any, Any], Any]


@pytest.fixture
def deferred(twins: MakeTwins) -> MakeTwins:
    def make(model: nn.Module | None = None, *arguments: Any, **options: Any) -> Twins:
        return twins(model or Net(), *arguments, update="deferred", **options)

    return make


@devices.without_device("it trains in a budget that is enough without a device")
def test_a_step_reads_the_parameters_once_less(twins: MakeTwins) -> None:
    def bytes_of(update: str) -> tuple[float, swapper.Plan]:
        torch.manual_seed(0)
        pair = twins(Net(depth=10).bfloat16(), partial(AdamW, lr=1e-3), master=True, update=update, wait=True)
        pair.budget = 6 << 20
        plan = pair.plan()
        pair.offload()
        pair.train(train_step, steps=3)
        before = pair.manager.counters.bytes_read
        pair.train(train_step, steps=4)
        read = (pair.manager.counters.bytes_read - before) / 4
        pair.finish()
        return read, plan

    read, plan = bytes_of("step")
    read_deferred, plan_deferred = bytes_of("deferred")
    params = plan.inventory.family_bytes("param")
    assert read_deferred < read - 0.3 * params
    assert read_deferred == pytest.approx(plan_deferred.traffic.total_read_bytes, rel=0.1)


# --- what loops do --------------------------------------------------------------------------------------------------


def test_what_a_forward_does_not_reach_is_updated_before_the_next_gradients_come(deferred: MakeTwins) -> None:
    """Steps that use one half of the layers each, in turns; what has no gradient is not updated, what has one always is."""
    pair = deferred(Halves(), partial(SGD, lr=1e-2, momentum=0.9))
    pair.train(alternating_halves(pair), steps=6)
    pair.finish(paged=False)


# --- whoever looks --------------------------------------------------------------------------------------------------


def open_step(pair: Twins) -> None:
    """Train so that a step is open whose updates are all still to be done."""
    pair.train(train_step, steps=3)
    assert pair.manager.current.run.model.update_is_open


def test_gather_finishes_the_step(deferred: MakeTwins) -> None:
    pair = deferred(Net())
    open_step(pair)
    pair.assert_same_parameters()
    open_step(pair)
    with pair.manager.gather(pair.swapped.head, write=True), torch.no_grad():
        pair.swapped.head.weight.mul_(0.5)
    with torch.no_grad():
        pair.plain.head.weight.mul_(0.5)
    pair.train(train_step, steps=2)
    pair.finish()


def test_state_that_is_looked_at_is_of_the_last_step(deferred: MakeTwins) -> None:
    pair = deferred(Net())
    pair.train(train_step, steps=1)
    assert len(pair.optimizer.state) == len(pair.plain_optimizer.state)
    open_step(pair)
    for ours, theirs in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
        assert_same(dict(pair.optimizer.state[ours]), dict(pair.plain_optimizer.state[theirs]))
    open_step(pair)
    state = copy.deepcopy(pair.optimizer.state_dict())
    assert_same(state, pair.plain_optimizer.state_dict())
    open_step(pair)
    pair.both(lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(state)))
    pair.train(train_step, steps=2)
    pair.finish()


LOOKS: dict[str, Callable[[Any], Any]] = {
    "a sum": lambda model: model.head.weight.sum(),
    "a copy": lambda model: copy.deepcopy(model.head.weight).detach(),
    "data": lambda model: model.head.weight.data.clone(),
    "printed": lambda model: repr(model.head.weight),
    "pickled": lambda model: pickle.loads(pickle.dumps(model.head.weight)).detach(),
    "a list of all": lambda model: torch.stack(torch._foreach_norm([p.detach() for p in model.parameters()])),
    "state_dict": lambda model: {name: tensor.clone() for name, tensor in model.state_dict().items()},
    "its gradient": lambda model: model.head.weight.grad.sum(),
    "a gradient that is printed": lambda model: repr(model.head.weight.grad),
    "a gradient that is copied": lambda model: copy.deepcopy(model.head.weight.grad),
}


@pytest.mark.parametrize("name", LOOKS)
def test_parameters_in_memory_are_never_seen_before_their_update(deferred: MakeTwins, name: str) -> None:
    if name == "printed" or "gradient" in name:
        devices.skip_on_device("there a parameter is printed as away, and its gradient has left")
    pair = deferred(Net(depth=2), params="host")
    pair.train(never_zero, steps=2)
    assert pair.manager.current.run.model.update_is_open
    pair.both(lambda model, _: LOOKS[name](model))
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_a_snapshot_is_of_the_last_step(deferred: MakeTwins, tmp_path: Path) -> None:
    pair = deferred(Net())
    open_step(pair)
    path = tmp_path / "three.pt"
    pair.manager.snapshot(path).wait()
    content = torch.load(path)
    assert_same(dict(content["model"]), dict(pair.plain.state_dict()))
    assert_same(content["optimizer"]["state"], pair.plain_optimizer.state_dict()["state"])
    pair.train(train_step, steps=2)
    pair.finish()


def test_a_run_that_is_closed_goes_on_from_its_last_step(tmp_path: Path) -> None:
    assert_closed_runs_go_on(tmp_path, "deferred", (2, 5))


# --- what fails -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3])
def test_an_update_that_fails_in_a_forward_can_be_done_again(deferred: MakeTwins, steps: int) -> None:
    pair = deferred(Net(), NAdam)
    pair.train(train_step, steps=steps)
    assert pair.manager.current.run.model.update_is_open
    fail_in_the_middle(pair)
    with pytest.raises(RuntimeError, match="in the middle"):
        pair.swapped(tokens())
    pair.check_pager()
    assert pair.manager.current.run.model.update_is_open
    pair.train(train_step, steps=2)
    pair.finish()


def test_an_update_that_fails_and_cannot_be_undone_ends_the_run_and_says_so(deferred: MakeTwins) -> None:
    pair = deferred(Net(), commit_every=None)
    pair.train(train_step, steps=2)
    fail_in_the_middle(pair)
    with pytest.raises(RuntimeError, match="in the middle"):
        pair.swapped(tokens())
    with pytest.raises(swapper.StateError, match=r"step 2 failed half-way .* resume from the last"):
        pair.swapped(tokens())
    pair.close()


def test_a_step_that_fails_once_it_is_open_is_not_taken(deferred: MakeTwins) -> None:
    """As where it fails on another rank: it is taken once, when it is repeated."""
    pair = deferred(Net())
    pair.train(train_step, steps=2)

    def backward(model: Any, optimizer: Any) -> torch.Tensor:
        loss = loss_of(model, tokens())
        loss.backward()
        return loss

    pair.train(backward, steps=1)
    pager = pair.manager.current.run.pager
    end_step, pager.end_step = pager.end_step, lambda learn: 1 / 0
    with pytest.raises(ZeroDivisionError):
        pair.optimizer.step()
    pager.end_step = end_step
    assert not pair.manager.current.run.model.update_is_open
    pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad())[1])
    pair.train(train_step, steps=2)
    pair.finish()


@devices.without_device("a gradient that has left a device has no data to be changed")
def test_a_gradient_that_was_changed_past_its_class_is_refused(deferred: MakeTwins) -> None:
    pair = deferred(Net(), commit_every=None)

    def run(model: Any, optimizer: Any) -> Any:
        loss_of(model, tokens()).backward()
        gradient = model.head.weight.grad
        optimizer.step()
        return gradient

    gradient = run(pair.swapped, pair.optimizer)
    with torch._C.DisableTorchFunctionSubclass():
        gradient.zero_()
    with pytest.raises(swapper.StateError, match=r"gradient of head.weight was changed .* update='step'"):
        pair.swapped(tokens())
    pair.close()


def test_an_optimizer_that_changes_its_settings_is_refused(tmp_path: Path) -> None:
    model = Net()
    with swapper.SwapManager(tmp_path, host_memory="10MiB") as manager:
        with pytest.raises(swapper.UnsupportedError, match=r"Counting changes its own settings \(k\) .*update='step'"):
            manager.offload(model, Counting(model.parameters()), update="deferred")
        with pytest.raises(swapper.ConfigError, match="update='late'"):
            manager.offload(model, AdamW(model.parameters()), update="late")


def test_a_step_is_seen_by_an_old_graph(deferred: MakeTwins) -> None:
    pair = deferred(Net())

    def run(model: Any, optimizer: Any) -> str:
        loss = loss_of(model, tokens())
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        return ""

    pair.both(run)
    pair.close()


def test_losses_of_layers_whose_inputs_need_no_gradient(deferred: MakeTwins) -> None:
    """Nothing of the first layer's backward reaches its input: its gradients come all the same, after its update."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    pair = deferred(model)

    def run(model: Any, optimizer: Any) -> torch.Tensor:
        inputs = torch.randn(4, WIDTH)
        loss = F.mse_loss(model(inputs), inputs)
        return finish_step(loss, optimizer)

    pair.train(run, steps=4)
    pair.finish(paged=False)

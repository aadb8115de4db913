"""`model.state_dict()` shows parameters that are away without memory for them, can be saved by whoever saves models, and never
shows what they are not any more."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e.processes import is_refused_in_a_fork
from e2e.test_state_dict import anonymous_bytes, layers, step
from e2e.twins import Twins, assert_same, send_away
from swapper.train.gradients.cold_grad import ColdGradient

MakeTwins = Callable[..., Twins]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"commit_every": None, "room_bytes": 1 << 20},
        {"update": "deferred"},
        {"update": "backward"},
        {"gradients": "nvme"},
    ],
    ids=str,
)
def test_plain_torch_loads_what_torch_save_made_of_it(
    twins: MakeTwins, tmp_path: Path, options: dict[str, Any]
) -> None:
    pair = twins(layers(), **options)
    for number in range(3):
        pair.train(step, steps=1)
        torch.save(pair.swapped.state_dict(), tmp_path / f"{number}.pt")
        loaded = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        assert all(type(value) is torch.Tensor for value in loaded.values())
        assert_same(loaded, pair.plain.state_dict())
    nbytes = sum(value.nbytes for value in loaded.values())
    assert (tmp_path / "0.pt").stat().st_size < 1.1 * nbytes


def test_it_takes_no_memory_and_neither_does_saving_it(twins: MakeTwins, tmp_path: Path) -> None:
    pair = twins(layers(1024, 10))  # 42 MB
    pair.train(step, steps=1)
    send_away(pair.manager)
    before = anonymous_bytes()
    shown = pair.swapped.state_dict()
    torch.save(shown, tmp_path / "model.pt")
    nbytes = sum(value.nbytes for value in shown.values())
    assert anonymous_bytes() - before < 0.2 * nbytes
    assert_same(torch.load(tmp_path / "model.pt"), pair.plain.state_dict())


CHANGES: dict[str, Callable[[Twins], Any]] = {
    "a step": lambda pair: pair.train(step, steps=1),
    "load_state_dict": lambda pair: pair.swapped.load_state_dict(layers().state_dict()),
    "load_state_dict of a part": lambda pair: pair.swapped[0].load_state_dict(layers()[0].state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_of_it_is_refused_when_its_parameter_has_changed(twins: MakeTwins, change: str) -> None:
    pair = twins(layers())
    pair.train(step, steps=1)
    shown = pair.swapped.state_dict()["0.weight"]
    view, copied = shown[1:], shown.clone()
    CHANGES[change](pair)
    for stale in (shown, view):
        with pytest.raises(swapper.StateError, match=r"a tensor of state_dict\(\) is used after"):
            stale.sum()
    assert not torch.equal(copied, pair.swapped.state_dict()["0.weight"])


def test_gather_expires_what_it_may_change_and_nothing_else(twins: MakeTwins) -> None:
    pair = twins(layers())
    pair.train(step, steps=1)
    shown = pair.swapped.state_dict()
    expected = copy.deepcopy(dict(pair.plain.state_dict()))
    with pair.manager.gather(pair.swapped[2]):
        pass
    with pair.manager.gather(pair.swapped[1].weight, write=True), torch.no_grad():
        pair.swapped[1].weight.zero_()
        assert torch.equal(shown["1.weight"], expected["1.weight"])  # until it is written back
    with pytest.raises(swapper.StateError, match="gather"):
        shown["1.weight"].sum()
    assert not pair.swapped.state_dict()["1.weight"].any()
    assert_same(
        {k: v for k, v in shown.items() if k[0] not in "1"}, {k: v for k, v in expected.items() if k[0] not in "1"}
    )


def test_it_only_shows(twins: MakeTwins) -> None:
    pair = twins(layers())
    shown = pair.swapped.state_dict()["0.weight"]
    for write in (lambda: shown.zero_(), lambda: shown.add_(1), lambda: shown.__setitem__(0, 1.0)):
        with pytest.raises(swapper.StateError, match="only shows the state"):
            write()
    assert torch.equal(shown, pair.plain.state_dict()["0.weight"])


def test_it_can_be_loaded_again_changed_in_parts_and_into_another_model(twins: MakeTwins) -> None:
    pair = twins(layers())
    pair.train(step, steps=1)

    def double_one(model: nn.Module, _: Any) -> None:
        state = dict(model.state_dict())
        state["3.weight"] = state["3.weight"] * 2
        model.load_state_dict(state)

    pair.both(double_one)
    pair.train(step, steps=2)
    fresh = layers()
    fresh.load_state_dict(pair.swapped.state_dict())
    assert_same(fresh.state_dict(), pair.plain.state_dict())
    pair.finish()


def test_one_of_two_offloaded_models_takes_the_others(tmp_path: Path) -> None:
    policy, reference = layers(), layers()
    with swapper.SwapManager(tmp_path, "8MiB") as manager:
        both, optimizer = manager.offload(
            [policy, reference], torch.optim.AdamW(policy.parameters()), params="nvme", optimizer_state="nvme"
        )
        step(both[0], optimizer)
        both[1].load_state_dict(both[0].state_dict())
        state, other = both[0].state_dict(), both[1].state_dict()
        assert type(state["0.weight"]) is not torch.Tensor  # it is shown, not copied
        assert_same(dict(state), dict(other))


def test_swapped_names_are_refused_or_right_never_mixed(twins: MakeTwins) -> None:
    """A module that was loaded already is not a source any more."""
    pair = twins(layers())
    pair.train(step, steps=1)
    state = dict(pair.swapped.state_dict())
    state["0.weight"], state["5.weight"] = state["5.weight"], state["0.weight"]
    with pytest.raises((swapper.StateError, RuntimeError), match="load_state_dict"):
        pair.swapped.load_state_dict(state)


def test_a_tied_parameter_is_saved_once(twins: MakeTwins, tmp_path: Path) -> None:
    model = layers()
    model[3].weight = model[0].weight
    pair = twins(model)
    pair.train(step, steps=1)
    shown = pair.swapped.state_dict()
    assert shown["3.weight"].data_ptr() == shown["0.weight"].data_ptr()
    torch.save(shown, tmp_path / "model.pt")
    assert_same(torch.load(tmp_path / "model.pt"), pair.plain.state_dict())
    plain = io.BytesIO()
    torch.save(pair.plain.state_dict(), plain)
    assert (tmp_path / "model.pt").stat().st_size < 1.1 * len(plain.getvalue())


def test_it_is_taken_between_forward_and_backward_too(twins: MakeTwins) -> None:
    pair = twins(layers())
    pair.train(step, steps=1)
    before = copy.deepcopy(pair.plain.state_dict())

    def around(model: nn.Module, optimizer: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 256)).square().mean()
        assert_same(dict(model.state_dict()), dict(before))
        loss.backward()
        assert_same(dict(model.state_dict()), dict(before))
        optimizer.step()
        return loss.detach()

    pair.train(around, steps=1)
    pair.finish()


AWAY: dict[str, dict[str, Any]] = {
    "none": {},
    "gradients on NVMe": {"gradients": "nvme"},
    "gradients off the device": {"device": "late", "device_memory": "8MiB", "update_on": "cpu"},
}


@pytest.mark.parametrize("away", AWAY)
def test_conversions_that_change_nothing_are_done(twins: MakeTwins, away: str) -> None:
    """Also of gradients that are away, as Lightning's trainer does with them when its training ends."""
    given = AWAY[away]
    pair = twins(layers(), **given | ({"device": HostDevice(given["device"])} if "device" in given else {}))

    def backward(model: nn.Module, optimizer: Any) -> torch.Tensor:
        loss = model(torch.randn(4, 256)).square().mean()
        loss.backward()
        return loss.detach()

    pair.train(backward, steps=1)
    send_away(pair.manager)
    gradients = [parameter.grad for parameter in pair.swapped.parameters()]
    assert any(isinstance(gradient, ColdGradient) for gradient in gradients) >= bool(given)
    for convert in (
        lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.float(), lambda m: m.to(torch.float32),
        lambda m: m.to("cpu", torch.float32), lambda m: m[0].to(torch.device("cpu")), lambda m: m.to(torch.zeros(1)),
        lambda m: m.type(torch.float32),
    ):  # fmt: skip
        assert isinstance(convert(pair.swapped), nn.Module)
    for convert in (
        lambda m: m.half(),
        lambda m: m.to("meta"),
        lambda m: m.to(torch.float64),
        lambda m: m.share_memory(),
    ):
        with pytest.raises(swapper.ColdParameterError, match="cannot be applied after offload"):
            convert(pair.swapped)
    assert all(parameter.grad is its for parameter, its in zip(pair.swapped.parameters(), gradients, strict=True))
    pair.both(lambda _, optimizer: optimizer.step())
    pair.train(step, steps=2)
    pair.finish()


def test_a_forked_child_cannot_look(twins: MakeTwins) -> None:
    pair = twins(layers())
    shown = pair.swapped.state_dict()["0.weight"]
    assert is_refused_in_a_fork(shown.sum)

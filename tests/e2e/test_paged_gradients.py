"""Gradients on NVMe: the same losses, parameters and state, bit for bit, and a `grad` that never lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from torch import nn

import swapper
from e2e.twins import Twins, adamw, scalers_of
from swapper.train.gradients.cold_grad import ColdGradient

MakeTwins = Callable[..., Twins]
WIDTH = 256


class Layers(nn.Module):
    """Layers whose gradients are larger than a frame, with small ones between, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(self.norm(x)))
        return self.layers[0](x)


def backward(model: nn.Module, scale: float = 1.0) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    loss = scale * model(torch.randn(4, WIDTH, dtype=dtype)).float().square().mean()
    loss.backward()
    return loss.detach()


def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
    loss = backward(model)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.fixture
def paged(twins: MakeTwins) -> Callable[..., Twins]:
    def make(model: nn.Module | None = None, **options: Any) -> Twins:
        return twins(model or Layers(), gradients="nvme", **options)

    return make


def test_a_gradient_on_nvme_tells_its_shape_and_refuses_the_rest(paged: MakeTwins) -> None:
    pair = paged()
    backward(pair.swapped)
    weight = pair.swapped.layers[1].weight
    assert type(weight.grad) is ColdGradient
    assert (weight.grad.shape, weight.grad.dtype, weight.grad.numel()) == (weight.shape, weight.dtype, weight.numel())
    assert ("off the device" if devices.NAME else "on NVMe") in repr(weight.grad)
    for use in (torch.norm, torch.clone, lambda g: g * 2, lambda g: g.add_(1), lambda g: g.tolist()):
        with pytest.raises(swapper.ColdParameterError, match=r"layers\.1\.weight.*clip_grad_norm_"):
            use(weight.grad)
    kept = weight.grad
    pair.swapped.zero_grad()
    assert weight.grad is None
    backward(pair.swapped)
    with pytest.raises(swapper.ColdParameterError, match=r"was the gradient of layers\.1\.weight"):
        kept.mul_(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [1.0, 3.0, 0.5, float("inf"), float("-inf")])
def test_torch_s_own_clipping_by_any_norm_is_bit_equal(paged: MakeTwins, order: float, dtype: torch.dtype) -> None:
    """The first norm of an order is taken of what is read back, later ones as gradients leave."""
    pair = paged(Layers().to(dtype), master=dtype is torch.bfloat16)

    def clipped(model: nn.Module, optimizer: Any) -> torch.Tensor:
        backward(model, 0.5)
        loss = backward(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-2, norm_type=order)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([loss, norm.float()])

    pair.train(clipped, steps=3)
    read = pair.manager.counters.read_bytes["grad"]
    pair.assert_same_parameters()
    pair.assert_same_state()
    pair.both(lambda model, _: backward(model))
    before = pair.manager.counters.read_bytes["grad"]
    pair.manager.clip_grad_norm_(1.0, order)
    assert read and pair.manager.counters.read_bytes["grad"] == before, "a known norm was read back for"


@pytest.mark.parametrize("order", [1.0, 2.0, torch.inf])
def test_torch_s_own_clipping_of_lists_is_bit_equal(paged: MakeTwins, order: float) -> None:
    pair = paged()

    def clipped(model: nn.Module, optimizer: Any) -> torch.Tensor:
        backward(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-2, norm_type=order, foreach=True)
        nn.utils.clip_grad_value_(model.parameters(), 1e-3, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    pair.train(clipped, steps=3)
    pair.finish(paged=False)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("update", ["step", "deferred"])
def test_gradients_that_are_zeroed_and_kept_are_bit_equal(paged: MakeTwins, update: str, foreach: bool) -> None:
    """They are gradients still: the optimizer's step updates with them, and -0 is added to 0."""
    pair = paged(
        make_optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=foreach), update=update, room_bytes=4 << 20
    )

    def zeroed(model: nn.Module, optimizer: Any) -> torch.Tensor:
        loss = backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if loss > 0.5:
            optimizer.step()  # by what is zero
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return torch.stack([loss, norm])

    pair.train(zeroed, steps=4)
    pair.both(lambda model, optimizer: optimizer.zero_grad())
    pair.train(step, steps=2)
    pair.assert_same_parameters()
    pair.assert_same_state()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_is_bit_equal(paged: MakeTwins, unscale: bool, dtype: torch.dtype) -> None:
    pair = paged(Layers().to(dtype), make_optimizer=adamw, master=False, room_bytes=8 << 20)
    scalers = scalers_of(pair, 2.0**20)
    skipped = []

    def scaled(model: nn.Module, optimizer: Any) -> tuple[torch.Tensor, float]:
        scaler = scalers[id(model)]
        data = torch.randn(4, WIDTH, dtype=dtype)
        loss = model(data).float().square().mean()
        if scaler._growth_tracker is not None and len(skipped) in (4, 5):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(scaler.get_scale())
        return loss.detach(), scaler.get_scale()

    pair.train(scaled, steps=5)
    assert skipped[4] == skipped[0] < skipped[2], "the scale was to grow, and to shrink where the loss was infinite"
    pair.assert_same_parameters()
    pair.assert_same_state()


def test_a_backward_that_computes_gradients_apart_leaves_those_that_are_there(paged: MakeTwins) -> None:
    pair = paged()

    def apart(model: nn.Module, optimizer: Any) -> torch.Tensor:
        loss = backward(model)
        parameters = list(model.layers.parameters())
        found = torch.autograd.grad(model(torch.randn(4, WIDTH)).sum(), parameters)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([loss, *(g.detach().sum() for g in found)])

    pair.train(apart, steps=3)
    pair.assert_same_parameters()


def test_gradients_take_no_memory_and_no_name_on_the_drive(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    nbytes = sum(p.nbytes for p in model.parameters())
    options = {"params": "nvme", "optimizer_state": "nvme"}
    with swapper.SwapManager(tmp_path, host_memory=nbytes * 2) as manager:
        on_host = manager.plan(model, optimizer, **options).budget.resident_bytes
        manager.offload(model, optimizer, gradients="nvme", **options)
        assert manager.counters.resident_bytes < on_host - 0.9 * nbytes
        assert {path.name for path in tmp_path.rglob("*.swap")} == {"turn-0.swap", "turn-1.swap"}


def test_a_gradient_that_did_not_reach_its_pages_is_not_used(paged: MakeTwins) -> None:
    """The drive fails in the middle of a backward that accumulates: nothing may be made of what is half added."""
    pair = paged()
    pair.train(step, steps=2)
    backward(pair.swapped)
    acquire = pair.manager.current.run.pager.acquire

    def fail(access: Any) -> None:
        if access.key == ("grad", "layers.3.weight", 1):
            raise swapper.IoError("read", "scratch", 0, 4096, 5)
        acquire(access)

    pair.manager.current.run.pager.acquire = fail
    with pytest.raises(swapper.IoError):
        backward(pair.swapped)
    pair.manager.current.run.pager.acquire = acquire
    for use in (lambda: pair.manager.clip_grad_norm_(1.0), lambda: backward(pair.swapped)):
        with pytest.raises(swapper.StateError, match=r"layers\.3\.weight did not reach its pages whole .* zero_grad"):
            use()
    pair.optimizer.zero_grad()
    pair.train(step, steps=2)
    pair.assert_same_parameters()
    pair.assert_same_state()


def test_a_gradient_that_was_used_in_backward_cannot_be_changed(paged: MakeTwins) -> None:
    pair = paged(update="backward", room_bytes=4 << 20)
    pair.train(step, steps=2)
    backward(pair.swapped)
    parameters = list(pair.swapped.parameters())
    for change in (
        lambda: nn.utils.clip_grad_norm_(parameters, 1e-3),
        lambda: nn.utils.clip_grad_value_(parameters, 1e-3),
        lambda: pair.optimizer.zero_grad(set_to_none=False),
    ):
        with pytest.raises(swapper.StateError, match="update='backward'"):
            change()
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.close()

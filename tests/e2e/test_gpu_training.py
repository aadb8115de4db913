"""Training on a CUDA device: losses and parameters of the same arithmetic in memory, within the budget; nothing is left there."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapper
from e2e.waits import Waits
from swapper.train.passes.train_hooks import TrainingHooks

pytestmark = pytest.mark.gpu
MIB = 1 << 20
WIDTH, LAYERS = 1024, 8
"""4 MiB a layer in fp32."""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.scale * torch.tanh(layer(x))
        return self.layers[0](x).square().mean()


def inputs(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(64, WIDTH, generator=generator).cuda()


def train(model: nn.Module, step: Any) -> list[float]:
    losses = []
    for number in range(4):
        for half in range(2):
            loss = model(inputs(2 * number + half)) / 2
            loss.backward()
            losses.append(loss.item())
        step()
    return losses


def plain() -> tuple[list[float], nn.Module]:
    """Forward and backward there, gradients added and parameters updated on the CPU."""
    model = Layers()
    held = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(held, lr=1e-3)
    model.cuda()
    for parameter, ours in zip(model.parameters(), held, strict=True):

        def take(p: torch.Tensor, ours: nn.Parameter = ours) -> None:
            ours.grad = p.grad.cpu() if ours.grad is None else ours.grad + p.grad.cpu()
            p.grad = None

        parameter.register_post_accumulate_grad_hook(take)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, ours in zip(model.parameters(), held, strict=True):
                parameter.copy_(ours)

    return train(model, step), model


def swapped(directory: Path, params: str, gradients: str, budget: int) -> list[float]:
    with swapper.SwapManager(directory, host_memory=512 * MIB) as manager:
        model = Layers().cuda() if params == "host" else Layers()
        original = torch.optim.AdamW(model.parameters(), lr=1e-3)
        places = {"params": params, "gradients": gradients}
        model, optimizer = manager.offload(model, original, **places, device="cuda", device_memory=budget)
        assert model.layers[0].weight.device == torch.device("cuda", torch.cuda.current_device())

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        losses = train(model, step)
        counters = manager.counters
        assert counters.device_peak_bytes <= budget
        assert counters.upload_s > 0 and counters.download_s > 0
        manager.snapshot(directory / "snapshot.pt").wait()
        return losses


@pytest.mark.parametrize("gradients", ["host", "nvme"])
@pytest.mark.parametrize("params", ["host", "nvme"])
@pytest.mark.parametrize("budget", [24 * MIB, 256 * MIB])
def test_training_is_that_of_the_same_arithmetic(tmp_path: Path, params: str, gradients: str, budget: int) -> None:
    expected, reference = plain()
    gc.collect()
    before = torch.cuda.memory_allocated()
    assert swapped(tmp_path, params, gradients, budget) == expected
    saved = torch.load(tmp_path / "snapshot.pt")["model"]
    for name, parameter in reference.named_parameters():
        assert torch.equal(saved[name], parameter.cpu()), name
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


def test_clipping_and_scaling_work(tmp_path: Path) -> None:
    with swapper.SwapManager(tmp_path, host_memory=512 * MIB) as manager:
        model = Layers()
        original = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = manager.offload(model, original, device="cuda", device_memory=64 * MIB)
        scaler = torch.amp.GradScaler("cuda")
        losses = []
        for number in range(6):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(inputs(number % 2))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert norm.isfinite() or scaler.get_scale() > 1
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]


def test_clipping_is_that_of_plain_torch_and_waits_once(tmp_path: Path) -> None:
    def clipped(model: nn.Module, optimizer: Any) -> tuple[list[float], int]:
        with Waits() as waits:

            def step() -> None:
                before = waits.count
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                found.append(waits.count - before)
                optimizer.zero_grad()

            found: list[int] = []
            return train(model, step), max(found)

    plain = Layers().cuda()
    expected, _ = clipped(plain, torch.optim.SGD(plain.parameters(), lr=1e-1))
    with swapper.SwapManager(tmp_path, host_memory=512 * MIB) as manager:
        model = Layers()
        original = torch.optim.SGD(model.parameters(), lr=1e-1)
        model, optimizer = manager.offload(model, original, device="cuda", device_memory=64 * MIB)
        losses, waits = clipped(model, optimizer)
    assert losses == pytest.approx(expected)
    assert waits < LAYERS  # of twice as many gradients


def test_out_of_memory_fails_the_step_and_it_can_be_taken_again(tmp_path: Path) -> None:
    with swapper.SwapManager(tmp_path, host_memory=512 * MIB) as manager:
        model = Layers()
        original = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = manager.offload(model, original, device="cuda", device_memory=24 * MIB)

        def too_much(*_: Any) -> None:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

        handle = model.layers[3].register_forward_pre_hook(too_much)
        with pytest.raises(torch.OutOfMemoryError):
            model(inputs(0))
        handle.remove()
        model(inputs(0)).backward()
        optimizer.step()


@pytest.mark.parametrize("params", ["device", "host", "nvme"])
def test_moving_the_model_to_host_memory_moves_its_buffers_only(tmp_path: Path, params: str) -> None:
    """As Lightning does when it has trained. It can be trained on when they are back."""
    with swapper.SwapManager(tmp_path, host_memory=512 * MIB) as manager:
        model = Layers().cuda()
        original = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = manager.offload(model, original, device="cuda", params=params)
        losses = []
        for number in range(4):
            loss = model(inputs(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            assert model.cpu() is model and {b.device.type for b in model.buffers()} == {"cpu"}
            assert {p.device.type for p in model.parameters()} == {"cuda"}
            with pytest.raises(swapper.DeviceError, match="given tensors on cpu only"):
                model(inputs(number).cpu())
            model.cuda()
    plain_model = Layers().cuda()
    plain_optimizer = torch.optim.AdamW(plain_model.parameters(), lr=1e-3)
    for number in range(4):
        loss = plain_model(inputs(number))
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        assert loss.item() == losses[number]


class Narrow(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16()).float()


@pytest.mark.parametrize("update_with", ["optimizer", "kernel"])
def test_what_stays_on_the_device_until_or_for_the_update_changes_nothing(tmp_path: Path, update_with: str) -> None:
    """Without clipping by norm: those of accumulated gradients are taken where they are, in that processor's order."""
    found: list[list[float]] = []
    for number, where in enumerate(("host", "device")):
        directory = tmp_path / str(number)
        directory.mkdir()
        gc.collect()
        before = torch.cuda.memory_allocated()
        with swapper.SwapManager(directory, host_memory=512 * MIB, commits=swapper.CommitPolicy(every=2)) as manager:
            model = Narrow()
            original = torch.optim.AdamW(model.parameters(), lr=1e-3)
            there = swapper.Accelerator(update_on="device", update_with=update_with)
            model, optimizer = manager.offload(
                model, original, optimizer_state=where, gradients=where, master_weights=torch.float32,
                device="cuda", device_memory=512 * MIB, accelerator=there,
            )  # fmt: skip

            def step(optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            found.append(train(model, step))
            manager.snapshot(directory / "snapshot.pt").wait()
        del model, original, optimizer, step
        gc.collect()
        assert torch.cuda.memory_allocated() <= before
    assert found[0] == found[1]
    one, other = (torch.load(tmp_path / str(number) / "snapshot.pt") for number in range(2))
    for name, master in one["master"].items():
        assert torch.equal(master, other["master"][name]), name


class Branches(nn.Module):
    """Layers side by side, each on a stream of its own, behind one on the caller's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.streams = [torch.cuda.Stream() for _ in self.layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, main, results = self.first(x), torch.cuda.current_stream(), []
        for layer, stream in zip(self.layers, self.streams, strict=True):
            stream.wait_stream(main)
            x.record_stream(stream)
            with torch.cuda.stream(stream):
                results.append(torch.tanh(layer(x)))
        for result, stream in zip(results, self.streams, strict=True):
            main.wait_stream(stream)
            result.record_stream(main)
        return torch.stack(results).sum(0).square().mean()


def late(parameter: torch.Tensor) -> None:
    """Has a gradient be written long after its kernel was queued, on the stream that it is written on."""
    gradient = parameter.grad.data
    content = gradient.clone()
    gradient.fill_(float("nan"))
    torch.cuda._sleep(20_000_000)
    gradient.copy_(content)


@pytest.mark.parametrize("gradients", ["host", "device"])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_a_forward_on_several_streams_is_waited_for(tmp_path: Path, update: str, gradients: str) -> None:
    def losses(model: nn.Module, optimizer: Any) -> list[float]:
        found = []
        for number in range(4):
            loss = model(inputs(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    reference = Branches().cuda()
    expected = losses(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9))
    with swapper.SwapManager(tmp_path, host_memory=512 * MIB) as manager:
        model = Branches()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(late)
        original = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        there = swapper.Accelerator(update_on="device")
        options = {"update": update, "accelerator": there, "gradients": gradients, "params": "nvme"}
        model, optimizer = manager.offload(model, original, device="cuda", device_memory=128 * MIB, **options)
        torch.testing.assert_close(torch.tensor(losses(model, optimizer)), torch.tensor(expected))


class TwoThreads(Layers):
    """Every other layer returns a tensor of the CPU: hooks of its backward run in the caller's thread, others in autograd's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Branch(on_cpu) for on_cpu in (False, True) * (LAYERS // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).cuda() for layer in self.layers]).square().mean()


class Branch(nn.Module):
    def __init__(self, on_cpu: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.on_cpu = on_cpu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x.cpu() if self.on_cpu else x


def test_hooks_of_both_threads_of_a_backward_are_not_interleaved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TwoThreads().cuda()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    expected = train(plain, lambda: (plain_optimizer.step(), plain_optimizer.zero_grad()))
    inside: list[threading.Thread] = []
    order: list[threading.Thread] = []
    reach = TrainingHooks.backward_reaches

    def watched(hooks: TrainingHooks, call: Any) -> None:
        inside.append(threading.current_thread())
        order.append(inside[-1])
        reach(hooks, call)
        assert inside.pop() is threading.current_thread() and not inside

    monkeypatch.setattr(TrainingHooks, "backward_reaches", watched)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with swapper.SwapManager(tmp_path, host_memory=512 * MIB) as manager:
            model = TwoThreads()
            original = torch.optim.SGD(model.parameters(), lr=1e-3)
            model, optimizer = manager.offload(model, original, params="nvme", device="cuda", device_memory=24 * MIB)
            losses = train(model, lambda: (optimizer.step(), optimizer.zero_grad()))
    finally:
        sys.setswitchinterval(before)
    assert len(set(order)) == 2
    assert losses == pytest.approx(expected)

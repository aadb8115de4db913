"""A device of host memory whose streams, kernels and link take virtual time; and a model whose sizes are those of a real one.

The product runs on it as on an accelerator. Nothing waits: each call adds to clocks. `now` is the time of the host's thread. A
kernel begins when the host has queued it and its stream is free, and a copy when the link's direction is free too. A wait for an
event sets the host's clock to the event's time. So a hook that waits leaves a gap on the compute stream, as on a real device, and
the length of a step is that of the product's own order of calls.

Bytes are a SCALE-th of the real ones, and so are the link's and the kernels' rates: a step takes the real one's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import Event, HostDevice, Module, Stream
from torch import nn

import swapper
from swapper.paging import layout
from swapper.train.updates.device_sweep import DeviceSweep

SCALE = 256
MEASURED = 2
"""Steps: what goes up in one may be for the next."""
TOKENS = torch.tensor([1, 2])


@dataclass(frozen=True)
class Machine:
    """Rates of an accelerator and its host, in bytes, elements and seconds of the real sizes.

    The defaults were measured on an H200 behind PCIe 5 x16, and on its host.

    Attributes:
        link: bytes/s of a direction that copies alone.
        link_both: bytes/s of each direction while both copy.
        update: elements/s of the optimizer's kernels.
        copied_s: the host's time for a copied piece.
        updated_s: the host's time for the optimizer's call for a slice.
        launched_s: the host's time for the kernels of a linear layer.
    """

    link: float = 53.6e9
    link_both: float = 50e9
    update: float = 1.236e9 / 16.6e-3
    copied_s: float = 17.6e-6
    updated_s: float = 60e-6
    launched_s: float = 150e-6


class TimedStream(Stream):
    def __init__(self, device: TimedDevice, is_compute: bool = False) -> None:
        super().__init__(is_compute=is_compute)
        self.device = device
        self.time = 0.0

    def wait_event(self, event: Any) -> None:
        for stream, tick in event.clock.items():
            self.clock[stream] = max(self.clock[stream], tick)
        self.time = max(self.time, event.time)


class TimedEvent(Event):
    def __init__(self, module: TimedModule, is_timed: bool) -> None:
        super().__init__(module, is_timed)
        self.device = module.device

    def record(self, stream: Any) -> None:
        super().record(stream)
        self.time = max(stream.time, self.device.now)

    def query(self) -> bool:
        return bool(self.time <= self.device.now)

    def synchronize(self) -> None:
        self.device.wait_until(self.time)

    def elapsed_time(self, later: Any) -> float:
        return float(later.time - self.time) * 1000


class TimedModule(Module):
    def __init__(self, device: TimedDevice, capacity_bytes: int) -> None:
        super().__init__("at once", capacity_bytes)
        self.device = device
        self.compute = self.current = TimedStream(device, is_compute=True)

    def Stream(self, device: Any = None) -> TimedStream:
        return TimedStream(self.device)

    def Event(self, blocking: bool = False, enable_timing: bool = False) -> TimedEvent:
        return TimedEvent(self, enable_timing)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class TimedDevice(HostDevice):
    """See the module.

    Attributes:
        now: seconds on the host's clock.
        waits: how often the host waited for an event that was still to come.
        moved: bytes that the link carried, by "up" and "down", at the real size.
    """

    def __init__(self, machine: Machine, capacity_bytes: int) -> None:
        super().__init__("at once", capacity_bytes)
        self.machine = machine
        self.now = 0.0
        self.waits = 0
        self.moved = {"up": 0.0, "down": 0.0}
        self._free_at = {"up": 0.0, "down": 0.0}
        self._module = TimedModule(self, capacity_bytes)

    def wait_until(self, time: float) -> None:
        if time > self.now:
            self.waits += 1
            self.now = time

    def synchronize(self) -> None:
        """Wait for the kernels of the compute stream, as a program does that reads a loss."""
        self.wait_until(self._module.compute.time)

    def kernel(self, seconds: float, launched_s: float = 0.0) -> None:
        """Queue a kernel on the current stream."""
        self.now += launched_s
        stream = self._module.current
        stream.time = max(stream.time, self.now) + seconds

    def updated(self, numel: int) -> None:
        """Queue the optimizer's kernels; those of a pass that run meanwhile take as much longer."""
        seconds = numel * SCALE / self.machine.update
        self.kernel(seconds, self.machine.updated_s)
        self._module.compute.time += seconds

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        super()._copy(target, source, stream)
        way = "up" if target.untyped_storage()._cdata in self.taken else "down"
        other = "down" if way == "up" else "up"
        self.now += self.machine.copied_s
        begin = max(stream.time, self.now, self._free_at[way])
        rate = self.machine.link_both if self._free_at[other] > begin else self.machine.link
        self.moved[way] += source.numel() * SCALE
        self._free_at[way] = stream.time = begin + source.numel() * SCALE / rate


class _Kernels(torch.autograd.Function):
    """Takes a device's time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, device: TimedDevice, seconds: tuple[float, float]) -> torch.Tensor:
        ctx.device, ctx.seconds = device, seconds
        device.kernel(seconds[0], device.machine.launched_s)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.device.kernel(ctx.seconds[1], 2 * ctx.device.machine.launched_s)
        return gradients[0], None, None


@dataclass(frozen=True)
class Sizes:
    """Of a decoder-only model, as in its configuration, and the seconds of a layer's and the head's kernels for a micro-batch.

    The defaults are a Llama of 1.24 G parameters, 16,384 tokens, checkpointed layers, on an H200.
    """

    layers: int = 16
    width: int = 2048
    keys: int = 512
    inner: int = 8192
    vocabulary: int = 128256
    layer_s: tuple[float, float] = (5e-3, 15e-3)
    head_s: tuple[float, float] = (20e-3, 40e-3)


class _Timed(nn.Module):
    """A linear map whose kernels take their part of `seconds`."""

    def __init__(self, device: TimedDevice, inputs: int, outputs: int, seconds: tuple[float, float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.bfloat16).normal_(std=0.02))
        self._device, self._seconds = device, seconds

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Kernels.apply(nn.functional.linear(value, self.weight), self._device, self._seconds)
        return out


class Layer(nn.Module):
    """A decoder's layer: its linear maps have the sizes of attention and of a gated feed-forward block."""

    def __init__(self, device: TimedDevice, sizes: Sizes, part: int) -> None:
        super().__init__()
        width, keys, inner = (size // part for size in (sizes.width, sizes.keys, sizes.inner))
        shapes = {
            "q": (width, width), "k": (width, keys), "v": (width, keys), "o": (width, width),
            "gate": (width, inner), "up": (width, inner), "down": (inner, width),
        }  # fmt: skip
        whole = sum(a * b for a, b in shapes.values())
        self.norm = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))
        for name, (a, b) in shapes.items():
            share = a * b / whole
            setattr(self, name, _Timed(device, a, b, (sizes.layer_s[0] * share, sizes.layer_s[1] * share)))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = value * self.norm
        keys = torch.cat([self.k(hidden), self.v(hidden)], -1)
        value = value + self.o(self.q(hidden) + keys.repeat(1, hidden.shape[-1] // keys.shape[-1]))
        return value + self.down(self.gate(value) * self.up(value))


class Decoder(nn.Module):
    """A model of a SCALE-th of `sizes`, whose head is the embedding's weight."""

    def __init__(self, device: TimedDevice, sizes: Sizes) -> None:
        super().__init__()
        part = round(SCALE**0.5)
        self.embedding = nn.Embedding(sizes.vocabulary // part, sizes.width // part, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Layer(device, sizes, part) for _ in range(sizes.layers))
        self.head = nn.Linear(sizes.width // part, sizes.vocabulary // part, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self._device, self._sizes = device, sizes

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.embedding(tokens)
        for layer in self.layers:
            value = layer(value)
        out: torch.Tensor = _Kernels.apply(self.head(value), self._device, self._sizes.head_s)
        return out.float().square().mean()


@contextmanager
def _scaled(device: TimedDevice) -> Iterator[None]:
    """A context in which the plan's sizes are a SCALE-th, and updates of slices take the device's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "RESIDENT_SLICE_BYTES", layout.RESIDENT_SLICE_BYTES // SCALE)
        update = DeviceSweep._update_by_kernels

        def timed(self: Any, run: Any) -> Any:
            device.updated(sum(one.end - one.begin for one in run))
            return update(self, run)

        patch.setattr(DeviceSweep, "_update_by_kernels", timed)
        yield


@dataclass(frozen=True)
class Step:
    """A step of several in a row, each of which ends when its loss was read.

    Attributes:
        seconds: from the end of the step before.
        waits: how often the host waited, but for the loss.
        up_bytes, down_bytes: that the link carried, at the real size.
    """

    seconds: float
    waits: int
    up_bytes: float
    down_bytes: float


def run_steps(
    directory: Path,
    batches: int,
    steps: int = 4,
    sizes: Sizes = Sizes(),
    bytes_an_element: float = 24,
    clips: bool = False,
    **options: Any,
) -> Step:
    """Return the mean of the last two of `steps` steps of `batches` micro-batches on an H200, bf16 with fp32 masters and AdamW.

    Args:
        bytes_an_element: device memory; parameters and gradients take 2 each.
        clips: gradients are clipped by the norm of all; the kernels for it take no time.
        options: of `offload`, in addition to a device with that memory and `optimizer_state="host"`. `plain=True`: no
            swapper.
    """
    torch.manual_seed(0)
    device = TimedDevice(machine := Machine(), capacity_bytes=1 << 30)
    model: Any = Decoder(device, sizes)
    numel = sum(parameter.numel() for parameter in model.parameters())
    if options.pop("plain", False):
        return Step(batches * _pass_s(sizes) + numel * SCALE / machine.update, 0, 0.0, 0.0)
    given = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    defaults: dict[str, Any] = {
        "device": device, "device_memory": int(numel * bytes_an_element),
        "params": "device", "gradients": "device", "optimizer_state": "host",
        "master_weights": torch.float32, "accelerator": swapper.Accelerator(update_on="device"),
    }  # fmt: skip
    with (
        _scaled(device),
        swapper.SwapManager(
            directory, numel * 20, resume="discard", commits=swapper.CommitPolicy(every=None)
        ) as manager,
    ):
        model, optimizer = manager.offload(model, given, **defaults | options)
        waits = 0
        for number in range(steps):
            if number == steps - MEASURED:
                begin, waits, device.moved = device.now, 0, {"up": 0.0, "down": 0.0}
            device.waits = 0
            with manager.accumulate():
                for _ in range(batches - 1):
                    model(TOKENS).backward()
            model(TOKENS).backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            waits += device.waits
            device.synchronize()
        up, down = device.moved["up"] / MEASURED, device.moved["down"] / MEASURED
        return Step((device.now - begin) / MEASURED, waits // MEASURED, up, down)


def _pass_s(sizes: Sizes) -> float:
    """Return the seconds of the kernels of a forward and a backward."""
    return sum(sizes.head_s) + sizes.layers * sum(sizes.layer_s)

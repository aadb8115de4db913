"""Measures training on the device: state in host memory and on NVMe against plain torch, and a model of four times the
device's budget.

The losses of that model must equal the same arithmetic without swapper. A step has enough microbatches to be long
relative to the update, as a compute-bound batch is.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW

import swapper
from gpu.bench import Bench, Row, each, ratio
from gpu.checkpoints import drive_rates
from gpu.copies import link_rates
from gpu.install import ROOT
from gpu.transformer import loss_of, transformer
from swapper import Accelerator, CommitPolicy

HOST_BAR, NVME_BAR = 0.95, 0.90
ON_DEVICE, ON_CPU = Accelerator(update_on="device"), Accelerator(update_on="cpu")
THERE: dict[str, Any] = {"gradients": "device", "accelerator": ON_DEVICE}
TRAINING: dict[str, dict[str, Any]] = {
    "training, state in host memory, updated on the device": {"optimizer_state": "host", **THERE},
    "training, state in host memory, updated on the CPU": {
        "optimizer_state": "host",
        "gradients": "host",
        "accelerator": ON_CPU,
    },
    "training, state in host memory, update_on='auto'": {
        "optimizer_state": "host",
        "gradients": "host",
        "accelerator": Accelerator(update_on="auto"),
    },
    "training, state in host memory, in backward": {"optimizer_state": "host", "update": "backward", **THERE},
    "training, state on NVMe": {"optimizer_state": "nvme", **THERE},
    "training, state on NVMe, updates deferred": {"optimizer_state": "nvme", "update": "deferred", **THERE},
    "training, state on NVMe, updates in backward": {"optimizer_state": "nvme", "update": "backward", **THERE},
}
"""Options of `offload` for each figure. All but those updated on the CPU have a bar."""
LARGE = "a model of 4 x device_memory trains, losses equal"
STREAMED = "update of streamed state on the device, of the link"
TOKENS = 65536
"""Of a step: at most MICROBATCHES of 16 thousand."""
MICROBATCHES = 8
STATE_BYTES = 12  # of a parameter: fp32 masters and moments
STEPS = 3
MIB = 1 << 20


def device_of(bench: Bench) -> Any:
    """Return the GPU; in a rehearsal on the CPU the test device of host memory, with late copies."""
    if not bench.on_cpu:
        return bench.device
    sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module("infer.host_device").HostDevice("late")


def roomy(bench: Bench) -> int:
    """Return host memory beyond the resident part."""
    return (64 if bench.is_rehearsal else 512) * MIB


def training(state: str, bench: Bench) -> Iterator[Row]:
    """Measure the figures whose state is there."""
    layers, width = bench.size(8, 2), bench.size(1536, 32)
    value = torch.randn(bench.size(8, 1), bench.size(2048, 16), width, dtype=torch.bfloat16, device=bench.device)
    microbatches = 2 if bench.is_rehearsal else min(TOKENS // (value.shape[0] * value.shape[1]), MICROBATCHES)
    with tempfile.TemporaryDirectory(dir=bench.directory) as place:

        def row(figure: str) -> Iterator[Row]:
            options = TRAINING[figure]
            beside = train_beside_plain(bench, layers, width, value, microbatches, place, options)
            limit, told, bar, least = 1.0, "", f"{HOST_BAR} of plain torch's throughput", HOST_BAR
            if options["optimizer_state"] == "nvme":
                writes, reads = drive_rates(bench, Path(place) / "rate", bench.size(1 << 30, 1 << 20))
                drive_s = beside.state_bytes / min(writes, reads)
                limit, told = min(1.0, beside.plain_s / drive_s), f"; the drive needs {drive_s:.2f} s"
                bar, least = f"{NVME_BAR} x min(1, limit)", NVME_BAR
            if options["accelerator"] is not ON_DEVICE:
                yield Row(figure, "", f"{beside}{told}")
            else:
                yield Row(figure, bar, f"{beside}{told}", beside.ratio >= least * limit)

        yield from each(*(((figure,), partial(row, figure)) for figure in figures_of(state)))


def figures_of(state: str) -> tuple[str, ...]:
    return tuple(figure for figure, options in TRAINING.items() if options["optimizer_state"] == state)


def streamed(bench: Bench) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(dir=bench.directory) as place:
        yield streamed_update(bench, bench.size(8, 2), bench.size(1536, 32), place)


def step(
    model: nn.Module,
    optimizer: Any,
    value: torch.Tensor,
    microbatches: int,
    accumulate: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """`accumulate` wraps all backwards but the last."""
    with accumulate():
        for _ in range(microbatches - 1):
            (loss_of(model, value) / microbatches).backward()
    (loss_of(model, value) / microbatches).backward()
    optimizer.step()
    optimizer.zero_grad()


def seconds(bench: Bench, act: Callable[[], None], rounds: int) -> float:
    """Return the shortest of `rounds`, after one that does not count."""
    times = []
    for _ in range(2 if bench.is_rehearsal else rounds + 1):
        bench.synchronize()
        begin = time.perf_counter()
        act()
        bench.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


@dataclass(frozen=True)
class Beside:
    """Steps of plain torch and of swapper, alternating: seconds of the shortest of each."""

    plain_s: float
    taken_s: float
    state_bytes: int  # of the optimizer's state, read and written in a step
    tokens: int
    told: str

    @property
    def ratio(self) -> float:
        return self.plain_s / self.taken_s

    def __str__(self) -> str:
        times = f"a step of {self.taken_s:.3f} s, plain {self.plain_s:.3f} s, {self.tokens} tokens"
        return f"{self.ratio:.3f} ({times}; {self.told})"


def train_beside_plain(
    bench: Bench,
    layers: int,
    width: int,
    value: torch.Tensor,
    microbatches: int,
    place: str,
    options: dict[str, Any],
) -> Beside:
    """Train the same model in plain torch, all in device memory, and swapped, alternating.

    Args:
        options: of `offload`, in addition to the common ones.
    """
    plain = transformer(layers, width, torch.bfloat16, bench.device)
    plain_act = partial(step, plain, AdamW(plain.parameters(), fused=True), value, microbatches)
    model = transformer(layers, width, torch.bfloat16, "cpu")
    count = sum(parameter.numel() for parameter in model.parameters())
    host = count * (4 + (2 if options["optimizer_state"] == "nvme" else STATE_BYTES)) * 5 // 4 + roomy(bench)
    options = {"device": device_of(bench), "params": "device", "master_weights": torch.float32, **options}
    with swapper.SwapManager(place, host, resume="discard", commits=CommitPolicy(every=None)) as manager:
        given = AdamW(model.parameters(), fused=options["accelerator"].update_with != "kernel")
        model, optimizer = manager.offload(model, given, **options)
        swapped_act = partial(step, model, optimizer, value, microbatches, manager.accumulate)
        run: Any = manager.current.run
        swapped_act()  # the first step's copies register what there is
        run.placed.processor.host.wait()
        before = manager.counters.snapshot()
        plain_s, taken_s = bench.seconds_by_turns([plain_act, swapped_act], STEPS, 1)
        told = f"{run.placed.processor.host.describe()}, updates on the {'device' if run.placed.processor.updates else 'CPU'}"
        told += f", {copy_rates(before, manager.counters.snapshot())}"
    tokens = microbatches * value.shape[0] * value.shape[1]
    return Beside(plain_s, taken_s, count * STATE_BYTES, tokens, told)


def copy_rates(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Describe how fast copies were, by the device's clock, between two snapshots of the counters."""
    spent = {
        name: after[name] - before[name] for name in ("uploaded_bytes", "upload_s", "downloaded_bytes", "download_s")
    }
    up, down = (
        spent[moved] / spent[taken] / 1e9 if spent[taken] else 0.0
        for moved, taken in (("uploaded_bytes", "upload_s"), ("downloaded_bytes", "download_s"))
    )
    return f"copies at {up:.1f} GB/s up, {down:.1f} down"


def streamed_update(
    bench: Bench, layers: int, width: int, place: str, figure: str = STREAMED, update_with: str = "optimizer"
) -> Row:
    """Time `optimizer.step()` alone, with state in host memory: masters, moments and gradients are copied both ways."""
    model = transformer(layers, width, torch.bfloat16, "cpu")
    count = sum(parameter.numel() for parameter in model.parameters())
    there = Accelerator(update_on="device", update_with=update_with)
    options = {"device": device_of(bench), "accelerator": there, "gradients": "host"}
    never = CommitPolicy(every=None)
    with swapper.SwapManager(place, count * 20 + roomy(bench), resume="discard", commits=never) as manager:
        given = AdamW(model.parameters())
        model, optimizer = manager.offload(
            model, given, params="host", optimizer_state="host", master_weights=torch.float32, **options
        )
        value = torch.randn(1, bench.size(256, 16), width, dtype=torch.bfloat16, device=bench.device)
        loss_of(model, value).backward()
        host: Any = manager.current.run.placed.processor.host
        host.wait()
        taken_s = seconds(bench, optimizer.step, STEPS)  # with the same gradients each time
        told = host.describe()
    return ratio(figure, count * (STATE_BYTES + 2), taken_s, link_rates(bench)[0], "the link", None, told)


def four_times_the_budget(bench: Bench) -> Iterator[Row]:
    layers, width = bench.size(16, 4), bench.size(1024, 64)
    value = torch.randn(2, bench.size(256, 16), width, device=bench.device)
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        torch.use_deterministic_algorithms(True)
        stack.callback(torch.use_deterministic_algorithms, False)
        wanted, nbytes = reference_losses(bench, layers, width, value), 0
        place = stack.enter_context(tempfile.TemporaryDirectory(dir=bench.directory))
        model = transformer(layers, width, torch.float32, "cpu")
        nbytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
        budget = nbytes // 4
        host_memory, device_memory = (64 * MIB, MIB) if bench.is_rehearsal else (nbytes, budget)
        manager = stack.enter_context(swapper.SwapManager(place, host_memory))
        options = {"device": device_of(bench), "device_memory": device_memory}
        model, optimizer = manager.offload(model, AdamW(model.parameters(), lr=1e-3), params="nvme", **options)
        found = []
        for _ in wanted:
            loss = loss_of(model, value)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    same = found == wanted
    number = (
        f"{'equal' if same else 'DIFFERENT'} in {len(wanted)} steps ({nbytes / 1e9:.2f} GB against {budget / 1e9:.2f})"
    )
    yield Row(LARGE, "equal", number, same, is_equal=same)


def reference_losses(bench: Bench, layers: int, width: int, value: torch.Tensor) -> list[float]:
    """Run forward and backward on the device, the update on the CPU: the same arithmetic, everything in memory."""
    model = transformer(layers, width, torch.float32, "cpu").to(bench.device)
    masters = [nn.Parameter(parameter.detach().cpu().clone()) for parameter in model.parameters()]
    optimizer, losses = AdamW(masters, lr=1e-3), []
    for _ in range(4):
        loss = loss_of(model, value)
        loss.backward()
        losses.append(loss.item())
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.cpu(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return losses

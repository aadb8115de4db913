"""Measures full fine-tuning of a language model against plain torch on the same device: what users do, at their sizes.

A Llama of 1.24 billion parameters (16 layers, width 2048, tied vocabulary of 128,256) in bf16 with fp32 masters, checkpointed
layers, sequences of 2,048 tokens, AdamW. A step has A micro-batches of 16,384 tokens. Losses of the first steps, and parameters
after the last, must equal plain torch's, which is measured once in a run of gpu_check. Then one of 6.7 billion parameters in 8 GB
of device memory, against the time of its kernels alone.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import swapper
from gpu.bench import Bench, Row, each
from gpu.checkpoints import drive_rates
from gpu.training import device_of, roomy
from swapper import CommitPolicy

HEAD_WIDTH = 128
STATE_BYTES = 12
"""Of a parameter: fp32 master and two moments."""
CHECKED_STEPS, TIMED_STEPS = 3, 3
COUNTS = 4, 1
"""Micro-batches of a step."""


@dataclass(frozen=True)
class Sizes:
    layers: int
    width: int
    hidden: int
    vocabulary: int
    tokens: int
    batch: int
    shared: int = 1
    """Heads of queries for each head of keys."""


def sizes_of(bench: Bench) -> Sizes:
    return Sizes(2, 32, 32, 64, 16, 2, 2) if bench.is_rehearsal else Sizes(16, 2048, 8192, 128256, 2048, 8, 4)


def large_sizes_of(bench: Bench) -> Sizes:
    return Sizes(3, 32, 32, 64, 16, 1) if bench.is_rehearsal else Sizes(32, 4096, 11008, 32000, 2048, 4)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, hidden = sizes.width, sizes.hidden
        self.heads = max(width // HEAD_WIDTH, 2)
        self.widths = width, width // sizes.shared, width // sizes.shared
        self.is_shared = sizes.shared > 1
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.all, self.out = nn.Linear(width, sum(self.widths), bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        parts = self.all(self.before(value)).split(self.widths, -1)
        head = self.widths[0] // self.heads
        query, key, content = (part.unflatten(-1, (-1, head)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, content, is_causal=True, enable_gqa=self.is_shared)
        value = value + self.out(mixed.transpose(1, 2).flatten(-2))
        normed = self.between(value)
        changed: torch.Tensor = value + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return changed


class Llama(nn.Module):
    """Returns the mean loss of predicting each next token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.embedding(tokens)
        for block in self.blocks:
            value = checkpoint(block, value, use_reentrant=False)
        logits = self.head(self.norm(value))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_model(bench: Bench, sizes: Sizes, where: torch.device | str) -> Llama:
    """Return a model in bf16 with the same values at each call, which the measured device makes."""
    with torch.device("meta"):
        model = Llama(sizes).to(torch.bfloat16)
    model.to_empty(device=where)
    model.head.weight = model.embedding.weight
    numbers = torch.Generator(bench.device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            made = torch.empty(parameter.shape, dtype=parameter.dtype, device=bench.device)
            parameter.copy_(made.normal_(std=0.02, generator=numbers) if made.dim() > 1 else made.fill_(1.0))
    return model


class Masters:
    """An optimizer over fp32 copies of a model's parameters, as `master_weights=torch.float32` has it."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._masters = [nn.Parameter(parameter.detach().float()) for parameter in self._parameters]
        self._optimizer = torch.optim.AdamW(self._masters, lr=1e-4, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self._optimizer.step()
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            parameter.copy_(master)
            master.grad = None

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def take_step(
    model: nn.Module,
    optimizer: Any,
    tokens: torch.Tensor,
    micro_batches: int,
    clip: Callable[[], object] = lambda: None,
    accumulate: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> float:
    """Take a step, and return the last micro-batch's loss."""
    with accumulate():
        for _ in range(micro_batches - 1):
            (model(tokens) / micro_batches).backward()
    loss = model(tokens) / micro_batches
    loss.backward()
    clip()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


class Measured(NamedTuple):
    losses: list[float]
    seconds: float
    bits: str = ""
    """Of the parameters after the last step."""

    def equals(self, plain: Measured) -> bool:
        return self.losses == plain.losses and self.bits == plain.bits

    def against(self, plain: Measured) -> str:
        if self.losses != plain.losses:
            return f"losses {self.losses}, plain {plain.losses}"
        return "losses equal" + (
            "" if not self.bits else f", parameters {'equal' if self.equals(plain) else 'DIFFERENT'}"
        )


def bits_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of the sums of the bits of all rows."""
    found = hashlib.sha256()
    for tensor in tensors:
        bits = tensor.detach().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        found.update(bits.sum(-1, dtype=torch.int64).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def measured(bench: Bench, act: Callable[[], float], steps: int | None = None) -> tuple[list[float], float]:
    """Return the losses of the first steps, and the seconds of the fastest of some more; `steps` of each, if that is given."""
    checked, timed = (steps, steps) if steps else (1, 1) if bench.is_rehearsal else (CHECKED_STEPS, TIMED_STEPS)
    losses, times = [act() for _ in range(checked)], []
    for _ in range(timed):
        bench.synchronize()
        begin = time.perf_counter()
        act()
        bench.synchronize()
        times.append(time.perf_counter() - begin)
    return losses, min(times)


@dataclass(frozen=True)
class Way:
    """A way to offload.

    Attributes:
        title: in the table.
        options: of `offload`.
        bars: of plain torch's throughput, by the number of micro-batches.
        clips: by the norm of all gradients, as the Trainer does by default.
        exact: losses must equal plain torch's.
        needs_drive: the bar is of min(1, the drive's limit).
        steps: to check, and as many to measure; None: as many as else.
    """

    title: str
    options: dict[str, Any]
    bars: dict[int, float]
    clips: bool = False
    exact: bool = True
    needs_drive: bool = False
    steps: int | None = None


HOST: dict[str, Any] = {"params": "device", "optimizer_state": "host", "gradients": "device"}
EIGHT_BITS: dict[str, Any] = {**HOST, "state_codec": "8bit"}
WAYS: dict[str, Way] = {
    "step": Way("state in host memory", HOST, {4: 0.97, 1: 0.90}),
    "backward": Way("state in host memory, in backward", {**HOST, "update": "backward"}, {4: 0.97, 1: 0.90}),
    "deferred": Way("state in host memory, deferred", {**HOST, "update": "deferred"}, {4: 0.97, 1: 0.90}),
    "8bit": Way("state in 8 bits", {**EIGHT_BITS, "update": "backward"}, {4: 0.98, 1: 0.96}, exact=False),
    "clipped": Way("state in host memory, clipped", HOST, {4: 0.93, 1: 0.75}, clips=True),
    "clipped-8bit": Way("state in 8 bits, clipped", EIGHT_BITS, {4: 0.97, 1: 0.90}, clips=True, exact=False),
    "device": Way("state on the device", {"params": "device", "optimizer_state": "device"}, {4: 0.98}),
    "defaults": Way("no option", {}, {4: 0.95}),
    "host": Way(
        "all in host memory, device_memory='4GB'",
        {
            "params": "host",
            "optimizer_state": "host",
            "gradients": "host",
            "device_memory": 4_000_000_000,
            "update": "backward",
        },
        {4: 0.95},
    ),
    "nvme": Way(
        "state on NVMe", {**HOST, "optimizer_state": "nvme", "update": "backward"}, {4: 0.97}, needs_drive=True, steps=2
    ),
}
SEVEN = "Llama of 6.7 G parameters in 8 GB"
SEVEN_BAR, SEVEN_STEPS = 0.92, 2


def figures_of(name: str) -> tuple[str, ...]:
    return tuple(f"Llama of 1.24 G, {WAYS[name].title}, A = {count}" for count in WAYS[name].bars)


def fine_tuning(name: str, bench: Bench) -> Iterator[Row]:
    """Measure one way, after plain torch."""
    way, sizes = WAYS[name], sizes_of(bench)
    tokens = tokens_of(bench, sizes)
    yield from run_swapped(bench, way, figures_of(name), sizes, tokens, run_plain(bench, way, sizes, tokens))


def tokens_of(bench: Bench, sizes: Sizes) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(1)
    return torch.randint(sizes.vocabulary, (sizes.batch, sizes.tokens), generator=numbers, device="cpu").to(
        bench.device
    )


def clip_of(way: Way, model: nn.Module) -> Callable[[], object]:
    return partial(nn.utils.clip_grad_norm_, list(model.parameters()), 1.0) if way.clips else lambda: None


def run_plain(bench: Bench, way: Way, sizes: Sizes, tokens: torch.Tensor) -> dict[int, Measured]:
    """Return what was measured for each number of micro-batches, one after the other; once for all processes of gpu_check."""
    place = os.environ.get("GPU_CHECK_KNOWN")
    path = Path(place or "") / f"plain-{way.clips}-{way.steps}.json"
    if place is not None and path.exists():
        return {int(count): Measured(*known) for count, known in json.loads(path.read_text()).items()}
    model = make_model(bench, sizes, bench.device)
    optimizer, clip, found = Masters(model), clip_of(way, model), dict[int, Measured]()
    for count in COUNTS:
        losses, taken_s = measured(bench, partial(take_step, model, optimizer, tokens, count, clip), way.steps)
        found[count] = Measured(losses, taken_s, bits_of(model.state_dict().values()))
    del model, optimizer, clip
    gc.collect()
    if place is not None:
        path.write_text(json.dumps(found))
    return found


@contextmanager
def swapped(
    bench: Bench, way: Way, sizes: Sizes, tokens: torch.Tensor
) -> Iterator[Callable[[int], tuple[Measured, swapper.StepStats]]]:
    """Offload a model. Yields what measures steps of that many micro-batches, and returns the last one's statistics too."""
    model = make_model(bench, sizes, "cpu")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    host_bytes = parameters * (4 if way.needs_drive else 4 + 2 + STATE_BYTES) * 5 // 4 + roomy(bench)
    options: dict[str, Any] = {"device": device_of(bench), "master_weights": torch.float32, **way.options}
    if bench.is_rehearsal and "device_memory" in options:
        options["device_memory"] = 8 << 20
    never = CommitPolicy(every=None)
    with (
        tempfile.TemporaryDirectory(dir=bench.directory) as place,
        swapper.SwapManager(place, host_bytes, commits=never) as manager,
    ):
        given = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        model, optimizer = manager.offload(model, given, **options)
        clip = clip_of(way, model)

        def measure(count: int) -> tuple[Measured, swapper.StepStats]:
            act = partial(take_step, model, optimizer, tokens, count, clip, manager.accumulate)
            losses, taken_s = measured(bench, act, way.steps)
            stats = manager.stats()
            return Measured(losses, taken_s, bits_of(model.state_dict().values())), stats

        yield measure


def run_swapped(
    bench: Bench,
    way: Way,
    figures: Sequence[str],
    sizes: Sizes,
    tokens: torch.Tensor,
    plain: dict[int, Measured],
) -> Iterator[Row]:
    with swapped(bench, way, sizes, tokens) as measure:

        def row(figure: str, count: int) -> Iterator[Row]:
            plain_s = plain[count].seconds
            found, stats = measure(count)
            taken_s, limit, drive = found.seconds, 1.0, ""
            if way.needs_drive:
                with tempfile.TemporaryDirectory(dir=bench.directory) as place:
                    writes, reads = drive_rates(bench, Path(place) / "rate", bench.size(1 << 30, 1 << 20))
                drive_s = max(stats.read_bytes / reads, stats.written_bytes / writes)
                limit, drive = min(1.0, plain_s / max(drive_s, 1e-9)), f", the drive needs {drive_s:.2f} s"
            is_equal, ratio, bar = found.equals(plain[count]), plain_s / taken_s, way.bars[count]
            yield Row(
                figure,
                f"{bar}{' x min(1, limit)' if way.needs_drive else ''} of plain torch's throughput",
                f"{ratio:.3f} ({taken_s:.3f} s, plain {plain_s:.3f} s, {count * tokens.numel()} tokens{drive}; "
                f"{found.against(plain[count])}; {stats.brief})",
                ratio >= bar * limit,
                is_equal=is_equal if way.exact else None,
            )

        yield from each(
            *(((figure,), partial(row, figure, count)) for figure, count in zip(figures, way.bars, strict=True))
        )


def seven(bench: Bench) -> Iterator[Row]:
    """Train with everything in host memory, and compare with the kernels of one resident block and the ends."""
    sizes, micro_batches = large_sizes_of(bench), 4
    tokens = tokens_of(bench, sizes)
    kernels_s = micro_batches * kernels_of(bench, sizes, tokens)
    model = make_model(bench, sizes, "cpu")
    count = sum(parameter.numel() for parameter in model.parameters())
    device_memory = 8 << 20 if bench.is_rehearsal else 4_000_000_000
    never = CommitPolicy(every=None)
    if not bench.on_cpu:
        torch.cuda.reset_peak_memory_stats()
    with (
        tempfile.TemporaryDirectory(dir=bench.directory) as place,
        swapper.SwapManager(place, count * 8 + 2 * roomy(bench), commits=never) as manager,
    ):
        given = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        model, optimizer = manager.offload(
            model,
            given,
            device=device_of(bench),
            device_memory=device_memory,
            params="host",
            optimizer_state="host",
            gradients="host",
            update="backward",
            state_codec="8bit",
            master_weights=torch.float32,
        )
        _, taken_s = measured(
            bench,
            partial(take_step, model, optimizer, tokens, micro_batches, accumulate=manager.accumulate),
            SEVEN_STEPS,
        )
        stats = manager.stats()
    peak = 0 if bench.on_cpu else torch.cuda.max_memory_allocated()
    found = kernels_s / taken_s
    number = (
        f"{found:.3f} ({taken_s:.2f} s, its kernels {kernels_s:.2f} s, {micro_batches * tokens.numel() / taken_s:,.0f} tokens/s, "
        f"{peak / 1e9:.1f} GB of device memory; {stats.brief})"
    )
    yield Row(SEVEN, f"{SEVEN_BAR} of its kernels' time", number, found >= SEVEN_BAR and peak < 8e9)


def kernels_of(bench: Bench, sizes: Sizes, tokens: torch.Tensor) -> float:
    """Return the seconds of a forward and backward, from those of models of one and of two blocks."""

    def taken(layers: int) -> float:
        model = make_model(bench, replace(sizes, layers=layers), bench.device)

        def act() -> float:
            model(tokens).backward()
            model.zero_grad()
            return 0.0

        return measured(bench, act)[1]

    one, two = taken(1), taken(2)
    return one + (sizes.layers - 1) * max(two - one, 0.0)

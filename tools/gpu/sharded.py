"""Measures swapper's FSDP2 on one rank against plain FSDP2, in device memory and with its CPUOffloadPolicy.

The Llama of 1.24 billion parameters of language_model.py, with a policy of bf16: the shards are the fp32 masters.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import swapper
from gpu.bench import Bench, Row
from gpu.language_model import (
    HOST,
    Llama,
    Sizes,
    Way,
    make_model,
    measured,
    run_plain,
    sizes_of,
    swapped,
    take_step,
    tokens_of,
)
from gpu.training import device_of, roomy
from swapper import CommitPolicy

MICRO_BATCHES = 4
UPDATES = "step", "backward"
BAR = 0.93
OFFLOADED = "FSDP2's CPUOffloadPolicy, one rank, swapper against it"
OFFLOADED_BAR = 7.0
OURS = Way("against FSDP2", {**HOST, "update": "backward"}, {MICRO_BATCHES: OFFLOADED_BAR})
BYTES = 16
"""Of a parameter in host memory: fp32 master, gradient and two moments."""


def figure_of(update: str) -> str:
    return f"FSDP2 of swapper, one rank, state in host memory, {update}"


@contextmanager
def alone(bench: Bench) -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory(dir=bench.directory) as place:
        store = dist.FileStore(str(Path(place) / "store"), 1)
        backend = "gloo" if bench.on_cpu else "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "cpu:gloo,cuda:gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            gc.collect()
            dist.destroy_process_group()


def make_sharded(bench: Bench, sizes: Sizes, where: torch.device | str, **options: Any) -> Llama:
    model = make_model(bench, sizes, where).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options |= {"mesh": init_device_mesh(bench.device.type, (1,)), "mp_policy": policy}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def run_fsdp(bench: Bench, sizes: Sizes, tokens: torch.Tensor, **options: Any) -> tuple[list[float], float]:
    """Return losses and seconds of a step of plain FSDP2."""
    model = make_sharded(bench, sizes, "cpu" if options else bench.device, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    found = measured(bench, partial(take_step, model, optimizer, tokens, MICRO_BATCHES), 1 if options else None)
    del model, optimizer
    gc.collect()
    return found


def sharded(update: str, bench: Bench) -> Iterator[Row]:
    """Measure swapper's FSDP2 after plain FSDP2 in device memory."""
    sizes = sizes_of(bench)
    tokens = tokens_of(bench, sizes)
    with alone(bench), tempfile.TemporaryDirectory(dir=bench.directory) as place:
        plain_losses, plain_s = run_fsdp(bench, sizes, tokens)
        model = make_sharded(bench, sizes, "cpu" if bench.on_cpu else bench.device)
        count = sum(parameter.numel() for parameter in model.parameters())
        host_bytes = count * BYTES * 5 // 4 + roomy(bench)
        given = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        options = {"device": device_of(bench), "device_memory": "64MiB"} if bench.on_cpu else {}
        with swapper.SwapManager(place, host_bytes, commits=CommitPolicy(every=None)) as manager:
            _, optimizer = manager.offload(
                model, given, params="host", optimizer_state="host", gradients="host", update=update, **options
            )
            losses, taken_s = measured(
                bench, partial(take_step, model, optimizer, tokens, MICRO_BATCHES, accumulate=manager.accumulate)
            )
            stats = manager.stats()
        del model, optimizer, given
    is_equal, ratio = losses == plain_losses, plain_s / taken_s
    told = "losses equal" if is_equal else f"losses {losses}, plain {plain_losses}"
    number = f"{ratio:.3f} ({taken_s:.3f} s, plain {plain_s:.3f} s; {told}; {stats.brief})"
    yield Row(figure_of(update), f"{BAR} of plain FSDP2", number, ratio >= BAR, is_equal=is_equal)


def offloaded_by_fsdp(bench: Bench) -> Iterator[Row]:
    """Measure FSDP2's own offload, whose optimizer runs on the CPU: one step, after one that does not count."""
    sizes = sizes_of(bench)
    tokens = tokens_of(bench, sizes)
    plain = run_plain(bench, OURS, sizes, tokens)[MICRO_BATCHES]
    with swapped(bench, OURS, sizes, tokens) as measure:
        ours, _ = measure(MICRO_BATCHES)
    with alone(bench):
        taken_s = run_fsdp(bench, sizes, tokens, offload_policy=CPUOffloadPolicy(pin_memory=not bench.on_cpu))[1]
    ratio = taken_s / ours.seconds
    number = f"{ratio:.2f} x (FSDP2 {taken_s:.3f} s, swapper {ours.seconds:.3f} s, {ours.against(plain)})"
    yield Row(
        OFFLOADED, f"swapper {OFFLOADED_BAR} x as fast", number, ratio >= OFFLOADED_BAR, is_equal=ours.equals(plain)
    )

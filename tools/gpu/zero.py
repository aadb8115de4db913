"""Measures DeepSpeed's ZeRO with its optimizer in host memory, and swapper's step beside it, both against plain torch.

The Llama of 1.24 billion parameters of language_model.py. DeepSpeed keeps fp32 masters and AdamW's state in host memory and updates
them on the processors. Its losses need not equal plain torch's: it adds gradients up in another order.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from gpu.bench import Bench, Row
from gpu.language_model import HOST, Way, make_model, measured, run_plain, run_swapped, sizes_of, tokens_of
from gpu.sharded import alone

STAGES = {2: "its optimizer in host memory", 3: "its optimizer and parameters there"}
COUNTS = 4, 1
"""Micro-batches of a step."""
BAR = 1.6
OURS = Way("beside DeepSpeed", {**HOST, "update": "backward"}, dict.fromkeys(COUNTS, 0.0))


def figures_of(stage: int) -> tuple[str, ...]:
    return tuple(f"DeepSpeed's ZeRO-{stage}, {STAGES[stage]}, A = {count}, swapper beside it" for count in COUNTS)


def zero(stage: int, bench: Bench) -> Iterator[Row]:
    """Measure DeepSpeed after plain torch and swapper, for each number of micro-batches."""
    if importlib.util.find_spec("deepspeed") is None:
        for figure in figures_of(stage):
            yield Row(figure, reason="deepspeed is not installed", is_open=True)
        return
    sizes = sizes_of(bench)
    tokens = tokens_of(bench, sizes)
    plain = run_plain(bench, OURS, sizes, tokens)
    ours = list(run_swapped(bench, OURS, figures_of(stage), sizes, tokens, plain))
    with alone(bench):  # DeepSpeed remembers the group
        for row, count in zip(ours, COUNTS, strict=True):
            yield beside(row, plain[count][1], *run_zero(bench, stage, count, tokens)) if row.number else row


def beside(ours: Row, plain_s: float, taken_s: float, losses: list[float]) -> Row:
    """Return the row of swapper beside DeepSpeed, which took `taken_s`."""
    ratio, our_ratio = plain_s / taken_s, float(ours.number.split()[0])
    number = (
        f"{our_ratio / ratio:.2f} x: DeepSpeed {ratio:.3f} of plain torch's throughput ({taken_s:.3f} s, losses {losses}), "
        f"swapper {ours.number}"
    )
    return Row(ours.figure, f"swapper at least {BAR} x as fast", number, our_ratio / ratio >= BAR)


def run_zero(bench: Bench, stage: int, count: int, tokens: torch.Tensor) -> tuple[float, list[float]]:
    """Return the seconds of the fastest step of DeepSpeed's engine, and the losses of its first steps."""
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    if bench.on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # type: ignore[import-not-found]

    host = {"device": "cpu", "pin_memory": not bench.on_cpu}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": len(tokens),
        "gradient_accumulation_steps": count,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": host,
            **({"offload_param": host} if stage == 3 else {}),
        },
    }
    model = make_model(bench, sizes_of(bench), "cpu")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses, taken_s = measured(bench, partial(take_step, engine, tokens, count))
    engine.destroy()
    del engine, model
    gc.collect()
    return taken_s, losses


def take_step(engine: Any, tokens: torch.Tensor, count: int) -> float:
    """Take a step of this many micro-batches, and return the last one's loss, divided by their number as plain torch's is."""
    for _ in range(count):
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
    return float(loss.detach()) / count

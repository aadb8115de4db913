"""Measures DeepSpeed's ZeRO with its optimizer in host memory against plain torch, and swapper's step against both.

The Llama of 1.24 billion parameters of language_model.py. DeepSpeed keeps fp32 masters and AdamW's state in host memory and updates
them on the processors. Its losses are shown, and need not equal plain torch's: it adds gradients up in another order.
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
from gpu.language_model import COUNTS, HOST, Way, make_model, measured, run_plain, sizes_of, swapped, tokens_of
from gpu.sharded import alone

STAGES = {2: "its optimizer in host memory", 3: "its optimizer and parameters there"}
BAR = 1.6
OURS = Way("against DeepSpeed", {**HOST, "update": "backward"}, dict.fromkeys(COUNTS, BAR))


def figures_of(stage: int) -> tuple[str, ...]:
    return tuple(f"DeepSpeed's ZeRO-{stage}, {STAGES[stage]}, A = {count}, swapper against it" for count in COUNTS)


def zero(stage: int, bench: Bench) -> Iterator[Row]:
    """Measure DeepSpeed after plain torch and swapper, for each number of micro-batches."""
    if importlib.util.find_spec("deepspeed") is None:
        for figure in figures_of(stage):
            yield Row(figure, reason="deepspeed is not installed", is_open=True)
        return
    sizes = sizes_of(bench)
    tokens = tokens_of(bench, sizes)
    plain = run_plain(bench, OURS, sizes, tokens)
    with swapped(bench, OURS, sizes, tokens) as measure:
        ours = {count: measure(count)[0] for count in COUNTS}
    with alone(bench):  # DeepSpeed remembers the group
        for figure, count in zip(figures_of(stage), COUNTS, strict=True):
            losses, taken_s = run_zero(bench, stage, count, tokens)
            plain_s, our_s = plain[count].seconds, ours[count].seconds
            number = (
                f"{taken_s / our_s:.2f} x (DeepSpeed {taken_s:.3f} s, {plain_s / taken_s:.3f} of plain torch's throughput, losses "
                f"{losses}; swapper {our_s:.3f} s, {plain_s / our_s:.3f} of it, {ours[count].against(plain[count])})"
            )
            is_equal = ours[count].equals(plain[count])
            yield Row(figure, f"swapper {BAR} x as fast", number, taken_s / our_s >= BAR, is_equal=is_equal)


def run_zero(bench: Bench, stage: int, count: int, tokens: torch.Tensor) -> tuple[list[float], float]:
    """Return the losses of the first steps of DeepSpeed's engine, and the seconds of the fastest of some more."""
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    if bench.on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

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
    found = measured(bench, partial(take_step, engine, tokens, count))
    engine.destroy()
    del engine, model
    gc.collect()
    return found


def take_step(engine: Any, tokens: torch.Tensor, count: int) -> float:
    """Take a step of this many micro-batches, and return the last one's loss, divided by their number as plain torch's is."""
    for _ in range(count):
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
    return float(loss.detach()) / count

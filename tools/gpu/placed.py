"""Measures training with gradients or state on the device, and with swapper's AdamW, against plain torch.

Only reported: each variant saves another part of the time of `training.py` with state in host memory: copies of
gradients, copies of state, passes over a slice. A short step shows it better than a compute-bound one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from gpu.bench import Bench, Row
from gpu.training import plain_step, streamed_update, swapped_step
from swapper import Accelerator

SHORT_STEP_S = 1.0
THERE = Accelerator(update_on="device")
BY_US = Accelerator(update_on="device", update_with="kernel")
PLACED: dict[str, dict[str, Any]] = {
    "training, state streamed to the device": {"gradients": "host"},
    "training, gradients stay on the device": {"gradients": "device"},
    "training, gradients and state stay on the device": {"gradients": "device", "optimizer_state": "device"},
    "training, updates by swapper's kernel": {"gradients": "device", "accelerator": BY_US},
}
BY_KERNEL = "update of streamed state by the kernel, of the link"


def placed(bench: Bench) -> Iterator[Row]:
    layers, width = bench.size(8, 2), bench.size(1536, 32)
    value = torch.randn(bench.size(4, 1), bench.size(1024, 16), width, dtype=torch.bfloat16, device=bench.device)
    microbatches, plain_s = plain_step(bench, layers, width, value, SHORT_STEP_S)
    with tempfile.TemporaryDirectory(dir=bench.directory) as place:
        yield streamed_update(bench, layers, width, place, BY_KERNEL, "kernel")
        for figure, options in PLACED.items():
            options = {"optimizer_state": "host", "accelerator": THERE, **options}
            taken_s, _ = swapped_step(bench, layers, width, value, microbatches, place, options)
            yield Row(
                figure, "", f"{plain_s / taken_s:.3f} of plain torch (a step of {taken_s:.2f} s, plain {plain_s:.2f} s)"
            )

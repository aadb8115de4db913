"""Measures training with gradients or state on the device, and with swapper's AdamW, against plain torch.

Only reported: each variant saves another part of the time of `training.py` with state in host memory: copies of
gradients, copies of state, passes over a slice. A short step shows it better than a compute-bound one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from gpu.bench import Bench, Row, each
from gpu.training import MICROBATCHES, ON_DEVICE, streamed_update, train_beside_plain
from swapper import Accelerator

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
    with tempfile.TemporaryDirectory(dir=bench.directory) as place:

        def row(figure: str) -> Iterator[Row]:
            options = {"optimizer_state": "host", "accelerator": ON_DEVICE, **PLACED[figure]}
            yield Row(figure, "", str(train_beside_plain(bench, layers, width, value, MICROBATCHES, place, options)))

        yield from each(
            ((BY_KERNEL,), lambda: [streamed_update(bench, layers, width, place, BY_KERNEL, "kernel")]),
            *(((figure,), partial(row, figure)) for figure in PLACED),
        )

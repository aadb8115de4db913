"""The small GPT that most tests of inference load, in files and in memory, and how they look at it."""

from __future__ import annotations

import os
from copy import deepcopy
from functools import cache
from pathlib import Path

import torch

from swapper.bench.plain import Gpt, GptConfig

CONFIG = GptConfig(vocabulary=512, context=32, layers=6, width=256)
BUDGET = "6MiB"
TOKENS = torch.arange(32).view(1, 32) * 7 % 512


@cache
def first_values(config):
    torch.manual_seed(0)
    return Gpt(config).eval()


def make(dtype=torch.float32, config=CONFIG):
    """Return a model of its own: a copy, which takes a tenth of the time that random values do."""
    return deepcopy(first_values(config)).to(dtype)


def on_meta(config=CONFIG, dtype=torch.float32):
    with torch.device("meta"):
        return Gpt(config).to(dtype).eval()


def total_bytes(model):
    return sum(p.nbytes for p in model.parameters())


def run(model):
    with torch.no_grad():
        return model(TOKENS)


def descriptors():
    return sum(1 for entry in Path("/proc/self/fd").iterdir() if "model.safetensors" in os.path.realpath(entry))

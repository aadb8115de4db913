"""Loads the stand-in for CUDA of tools/test_cuda into each process of a rehearsal that runs over it."""

from __future__ import annotations

import importlib
import os

PLUGIN = "cuda_stand_in.plugin"


def is_used() -> bool:
    return "STAND_IN_DEVICES" in os.environ


def load() -> None:
    """Have this process run torch's CUDA build on the stand-in, if tools/test_cuda has started it."""
    if is_used():
        importlib.import_module(PLUGIN)


def pytest_options() -> list[str]:
    """Return the options with which pytest does the same."""
    return ["-p", PLUGIN] if is_used() else []

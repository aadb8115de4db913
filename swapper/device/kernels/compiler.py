"""Imports the kernels' Triton modules when a kernel is first used: Triton is an extra of this package.

On a GPU the kernels run; on a CPU plain torch does, unless TRITON_INTERPRET=1 has Triton's interpreter run the kernels there, as
the tests do. Triton reads the variable when it is first imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType

import torch

from swapper.errors import UnsupportedError

ACCELERATORS = ("cuda", "xpu")
"""Device types for which Triton compiles. ROCm's is "cuda" too."""


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_kernel(device: torch.device) -> bool:
    """Return whether kernels, and not plain torch, compute on `device`."""
    return device.type in ACCELERATORS or os.environ.get("TRITON_INTERPRET") == "1"


def kernel(name: str) -> ModuleType:
    """Return the Triton module of that name in `swapper.device.kernels.triton`.

    Raises:
        UnsupportedError: Triton is not installed, or too old.
    """
    try:
        return importlib.import_module(f"swapper.device.kernels.triton.triton_{name}")
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise UnsupportedError(
            f"swapper's kernels need Triton 3.3 or newer, which is not to be had ({error}): pip install 'torch-swapper[triton]'"
        ) from error

"""Threads of torch's operations: GNU OpenMP, which torch's wheels for Linux bring, keeps a team of them for each thread that
has called one.

[Note: teams] Between operations a team spins, for a millisecond, so that the next one begins at once; but as soon as there are
more threads in teams than processors, each team sleeps after each operation, and is woken for the next. Micro-batches have a
thread each, of which one runs: with their teams kept, each operation paid for that (ten times the context switches of one
thread's). So a thread that lets another one run ends its team. The results are the same: a team has as many threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

from swapper.runtime.process import is_off

_SOFT = 1
"""omp_pause_soft: settings of OpenMP stay."""


def end_team() -> None:
    """End the team of the calling thread, which must not be in an operation; the next operation makes another one."""
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """Return omp_pause_resource_all of the library that torch has loaded; None if it is not GNU's, or older than OpenMP 5."""
    if is_off("openmp"):
        return None
    folder = Path(torch.__file__).parent
    for path in (*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")):
        try:
            return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD).omp_pause_resource_all
        except (OSError, AttributeError):  # not loaded
            continue
    return None

"""Knows the process: which changes of it are left out, its limits, and the states of its random number generators.

SWAPPER_OFF in the environment names the changes to leave out. It is read when swapper is imported (csrc/base/process.h
reads it too). docs/reference/environment.md says what each is for, and what is lost without it. A limit that is
reached is an error that names it: Python's own do not.
"""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from swapper.errors import LIMITS, ConfigError, IoError, SwapperError, remedy

VARIABLE = "SWAPPER_OFF"
CHANGES = {
    "atexit": "what is open is closed when the program ends",
    "ddp": "DistributedDataParallel's constructor sends parameters of managers by swapper",
    "fork": "a forked child gives up the run's lock, and its parameters raise errors",
    "mallopt": "glibc keeps freed memory until swapper gives it back",
    "mlock": "memory of transfers is locked",
    "optimizers": "another optimizer's step on parameters of a manager is refused",
    "save": "torch.save and others write a file that is mapped under another name first",
    "sigbus": "accesses beyond the end of a mapped file that was truncated are noted",
    "signals": "handlers of signals are deferred for moments",
    "sigsegv": "memory that is away is read when it is touched, and writes are noted",
    "sigusr1": "the signal asks for a dump",
    "watchdog": "a thread looks for waits that are too long",
}
"""By name, the change."""


def _parse(said: str) -> frozenset[str]:
    words = {word.strip() for word in said.split(",")} - {""}
    if unknown := words - CHANGES.keys():
        raise ConfigError(
            f"{VARIABLE}={said!r}: {', '.join(sorted(unknown))} is not known: use any of {', '.join(CHANGES)}"
        )
    return frozenset(words)


_off = _parse(os.environ.get(VARIABLE, ""))


def is_off(change: str) -> bool:
    """Whether the environment says to leave out one of CHANGES."""
    assert change in CHANGES, change
    return change in _off


def after_fork_in_child(act: Callable[[], None]) -> None:
    """Have `act` called in each forked child."""
    if not is_off("fork"):
        os.register_at_fork(after_in_child=act)


_NO_THREAD = ("can't start new thread", os.strerror(errno.EAGAIN))
"""Messages of Python's and C++'s RuntimeError."""


@contextmanager
def naming_limits(op: str, path: str | os.PathLike[str] = "") -> Iterator[None]:
    """Return a context in which a limit that is reached is an error of ours, which names it.

    Args:
        op: what is done in it, as in `IoError`.
        path: of the file, if any.

    Raises:
        IoError: a limit is reached. All other errors are as they were.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, SwapperError) or error.errno not in LIMITS:
            raise
        raise IoError(op, str(path), 0, 0, error.errno) from error
    except RuntimeError as error:
        if str(error) not in _NO_THREAD:
            raise
        raise IoError(op, str(path), 0, 0, errno.EAGAIN, f"no thread can be started; {remedy(errno.EAGAIN)}") from error


# --- random numbers ---------------------------------------------------------------------------------------------------


def rng_states(devices: bool = True) -> dict[str, object]:
    """Return the states, those of devices too, in a form that torch.load(weights_only=True) reads."""
    import torch  # late: a process that only moves bytes starts at once

    states: dict[str, object] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if devices and torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, [int(key) for key in keys], int(position), int(has_gauss), float(gauss))
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Set the generators to `states`, from `rng_states`, except those of missing devices."""
    import torch

    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
    if "numpy" in states:
        import numpy

        name, keys, position, has_gauss, gauss = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))

"""Names the changes that swapper makes in its process, beyond its own memory and the user's model, and turns them off.

The environment's SWAPPER_OFF names those to leave out. It is read when swapper is imported (csrc/base/process.h reads it too).
docs/reference/environment.md says what each is for, and what is lost without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from swapper.errors import ConfigError

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

"""Tells functions the statistics of each step: the monitoring that a user asks for, and the warning of slow steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("swapper")

Observer = Callable[[Any], object]
"""Called with a StepStats after each step."""

FAR = 1.5
"""A step that takes this multiple of its limit is far from it: runs that we measured take 1.0 to 1.2 of it."""
IN_A_ROW = 3
"""Steps that must be far from the limit before the warning: one may have waited for a snapshot, or another program."""
WARM_UP = 3
"""Steps that do not count: the first use of everything, and a pool that fills."""


class Observers:
    """Owns the functions. One that fails does not fail the step: the log says so once, and it is called again."""

    def __init__(self) -> None:
        self._functions: list[Observer] = []
        self._warned: list[Observer] = []

    def add(self, function: Observer) -> None:
        self._functions.append(function)

    def remove(self, function: Observer) -> None:
        """Remove a function, if it is there."""
        if function in self._functions:
            self._functions.remove(function)

    def tell(self, stats: Any) -> None:
        """Call all functions."""
        for function in list(self._functions):
            try:
                function(stats)
            except Exception as error:
                if function not in self._warned:
                    self._warned.append(function)
                    text = repr(error)  # not the error: a handler may keep it, and its traceback everything
                    log.warning("monitoring of step %d failed, and is tried after each step: %s", stats.step, text)


class LimitWatch:
    """Warns once, when IN_A_ROW steps have been far from their limit. An observer."""

    def __init__(self) -> None:
        self._seen = self._far = 0
        self._has_warned = False

    def __call__(self, stats: Any) -> None:
        self._seen += 1
        if self._has_warned or self._seen <= WARM_UP or stats.limit_ratio is None:
            return
        self._far = self._far + 1 if stats.limit_ratio > FAR else 0
        if self._far == IN_A_ROW:
            self._has_warned = True
            log.warning(
                "step %d took %.2f s, %.1f times its limit of %.2f s (the longer one of computing and the drive's time for its "
                "bytes): %s. print(manager.stats()) has the rest, and `swapper trace` shows where it waits",
                stats.step, stats.wall_s, stats.limit_ratio, stats.limit_s, cause_of(stats),
            )  # fmt: skip


def cause_of(stats: Any) -> str:
    """Say what a step waits for most, and what helps."""
    waits = {name: getattr(stats.total, f"{name}_wait_s") for name in ("read", "write", "frame")}
    kind = max(waits, key=lambda name: waits[name])
    phase = max(stats.phases, key=lambda name: getattr(stats.phases[name], f"{kind}_wait_s"))
    remedy = {
        "read": "pages arrive late: a larger host_memory= reads further ahead, and another program on the drive slows it",
        "write": "changed pages are not written in time: update='deferred' spreads writes over the forward",
        "frame": "the pool is full of pages in use or being written: a larger host_memory= has more frames",
    }
    return f"it waits {waits[kind]:.2f} s for {kind}s, most of it in {phase}; {remedy[kind]}"

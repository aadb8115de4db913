"""Counters of one manager or loaded model: bytes, waits and pages, and, for the watchdog, which thread waits for what now."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from swapper.runtime.trace import Trace

FAMILIES = {"param": "parameters", "state": "optimizer state", "grad": "gradients"}
"""Families that bytes are counted by, and their names in messages. Masters count as state."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A thread that waits: for "read", "write", "frame" or "rank", of what, and since when (time.monotonic(), in seconds)."""

    kind: str
    what: object
    since_s: float


def _by_family() -> dict[str, int]:
    return dict.fromkeys(FAMILIES, 0)


@dataclass
class Counters:
    """Sums since the start. Times are in seconds; waits of one thread do not overlap.

    Attributes:
        step: optimizer steps taken.
        bytes_read, bytes_written: of the engine's completed transfers, whatever they were for.
        read_bytes, written_bytes: by family, of pages and commits, as they were submitted.
        read_wait_s: waiting for pages to arrive.
        write_wait_s: waiting for writes: of pages about to be changed again, and of a commit.
        frame_wait_s: waiting for a frame that another page was still being written from or read into.
        rank_wait_s: waiting for other ranks to come to a step.
        update_s: in the optimizer's arithmetic.
        pages_used: pages leased in the order of a step, each time.
        pages_missed: of these, those that had not been prefetched; pages whose content is overwritten do not count.
        pages_awaited: those that had to be waited for, prefetched or not.
        pool_bytes, frame_bytes: of all frames together, and of one.
        resident_bytes: of sections that stay in memory, outside of the frames.
        state_bytes: parameters, masters and optimizer state together.
        uploaded_bytes, downloaded_bytes: copied to a device, and from it.
        upload_s, download_s: that those copies took, by its clock, of those that are over. On two streams both count.
        device_peak_bytes: the peak that groups had on it.
        registered_bytes: host memory that its driver knows by now: other memory is copied more slowly.
        waits: by thread, the wait that goes on now.
        trace: of spans of time, while it is recorded.
    """

    step: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    read_bytes: dict[str, int] = field(default_factory=_by_family)
    written_bytes: dict[str, int] = field(default_factory=_by_family)
    read_wait_s: float = 0.0
    write_wait_s: float = 0.0
    frame_wait_s: float = 0.0
    rank_wait_s: float = 0.0
    update_s: float = 0.0
    pages_used: int = 0
    pages_missed: int = 0
    pages_awaited: int = 0
    pool_bytes: int = 0
    frame_bytes: int = 0
    resident_bytes: int = 0
    state_bytes: int = 0
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    upload_s: float = 0.0
    download_s: float = 0.0
    device_peak_bytes: int = 0
    registered_bytes: int = 0
    waits: dict[int, Wait] = field(default_factory=dict, repr=False, compare=False)
    trace: Trace | None = field(default=None, repr=False, compare=False)

    @contextmanager
    def waiting(self, kind: str, what: object) -> Iterator[None]:
        """Count the time in the context as waiting for `kind`: "read", "write", "frame" or "rank".

        Args:
            what: whose repr says what is waited for.
        """
        thread, name = threading.get_ident(), f"{kind}_wait_s"
        began_s, outer = time.monotonic(), self.waits.get(thread)
        self.waits[thread] = Wait(kind, what, began_s)
        try:
            yield
        finally:
            if outer is None:
                del self.waits[thread]
            else:  # this one was inside a signal handler
                self.waits[thread] = outer
            ended_s = time.monotonic()
            setattr(self, name, getattr(self, name) + ended_s - began_s)
            if self.trace is not None:
                self.trace.add("waits", f"wait for a {kind}", began_s, ended_s, what=str(what))

    def updated(self, began_s: float, what: object) -> None:
        """Count the optimizer's arithmetic on `what`, from `began_s` (time.monotonic()) until now."""
        ended_s = time.monotonic()
        self.update_s += ended_s - began_s
        if self.trace is not None:
            self.trace.add("updates", f"update {what}", began_s, ended_s)

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of all numbers, by name."""
        copies = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("waits", "trace")}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in copies.items()}

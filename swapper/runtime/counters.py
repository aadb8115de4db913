"""Counters of one manager or loaded model, and its trace: bytes, waits and pages, and which thread waits for what now.

The trace is in the JSON that chrome://tracing and ui.perfetto.dev open. It has spans of time on named tracks: phases
of a step, waits, the optimizer's arithmetic, leases, and transfers from submission to completion. A ring keeps the
last spans of a long run. Without recording it costs nothing: then `Counters.trace` is None.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

MAX_SPANS = 200_000
"""About 50 MB."""

ENVIRONMENT = "SWAPPER_TRACE"
"""Environment variable with the name of a file: each manager of the process is traced there."""

TRACKS = ("phases", "waits", "updates", "leases", "reads", "writes")
LANES = 1000
"""Track n has the thread numbers from n * LANES on: spans of one track that overlap lie in lanes below each other."""

SAMPLE_S = 0.02
"""Least time between two samples of memory."""
SAMPLE_COST = 50
"""A sample is taken at most this many times as often as it takes time: the memory of a large model has many pages."""

Span = tuple[str, str, float, float, dict[str, object]]
"""(track, name, begin, end, arguments); times of time.monotonic(), in seconds."""


def asked_for(rank: int) -> Path | None:
    """Return a free path for the trace that the environment asks for; None if it does not. Ranks but 0 have theirs in the name."""
    wanted = os.environ.get(ENVIRONMENT)
    if not wanted:
        return None
    path = Path(wanted).absolute()
    stem = path.stem + (f".rank-{rank}" if rank else "")
    names = (f"{stem}{'' if number == 1 else f'-{number}'}{path.suffix}" for number in itertools.count(1))
    return next(path.with_name(name) for name in names if not path.with_name(name).exists())


class Trace:
    """Owns the spans, the latest `max_spans` of them.

    Args:
        sample: returns bytes of memory by kind; takes no lock.
        about: what a reader must know besides the spans, in types that JSON knows.
    """

    def __init__(
        self,
        max_spans: int = MAX_SPANS,
        sample: Callable[[], dict[str, int]] | None = None,
        about: dict[str, object] | None = None,
    ) -> None:
        self.about = about or {}
        self._sample = sample
        self._memory: deque[tuple[float, dict[str, int]]] = deque(maxlen=max_spans)
        self._next_sample_s = 0.0
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._began_s = time.monotonic()
        self._count = 0
        self._lock = threading.Lock()

    @property
    def dropped(self) -> int:
        """How many spans were dropped for later ones."""
        return self._count - len(self._spans)

    def add(self, track: str, name: str, begin_s: float, end_s: float, **arguments: object) -> None:
        """Note a span of time.

        Args:
            track: one of TRACKS.
            name: of the span.
            begin_s, end_s: of time.monotonic(), in seconds.
            arguments: shown with it, as JSON or as their str.
        """
        with self._lock:
            self._count += 1
            self._spans.append((track, name, begin_s, end_s, arguments))
            if self._sample is not None and end_s >= self._next_sample_s and track in ("leases", "phases"):
                self._memory.append((end_s, self._sample()))
                self._next_sample_s = end_s + max(SAMPLE_S, SAMPLE_COST * (time.monotonic() - end_s))

    def write(self, path: Path) -> None:
        """Write the spans to `path`, as JSON in Chrome's trace event format."""
        with self._lock:
            spans, memory = list(self._spans), list(self._memory)
        with path.open("w") as stream:
            stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            stream.write(",\n".join(json.dumps(event, default=str) for event in self._events(spans, memory)))
            stream.write(f'\n], "otherData": {json.dumps(self.about, default=str)}}}\n')

    def _events(self, spans: list[Span], memory: list[tuple[float, dict[str, int]]]) -> Iterator[dict[str, object]]:
        pid = os.getpid()
        about = {"name": f"swapper ({self.dropped} earlier spans were dropped)" if self.dropped else "swapper"}
        yield {"name": "process_name", "ph": "M", "pid": pid, "args": about}
        for number, track in enumerate(TRACKS, 1):
            lanes: list[float] = []  # of each lane, when its last span ends
            for _, name, begin_s, end_s, arguments in sorted((s for s in spans if s[0] == track), key=lambda s: s[2]):
                lane = next((n for n, free_s in enumerate(lanes) if free_s <= begin_s), len(lanes))
                tid = number * LANES + lane
                if lane == len(lanes):
                    lanes.append(0.0)
                    yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": track}}
                    yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
                lanes[lane] = end_s
                begin_s = max(begin_s, self._began_s)
                times = {"ts": (begin_s - self._began_s) * 1e6, "dur": max(end_s - begin_s, 0.0) * 1e6}
                yield {"name": name, "cat": track, "ph": "X", **times, "pid": pid, "tid": tid, "args": arguments}
        for at_s, kinds in memory:
            ts = (at_s - self._began_s) * 1e6
            yield {"name": "memory", "cat": "memory", "ph": "C", "ts": ts, "pid": pid, "args": kinds}


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

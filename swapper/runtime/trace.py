"""A trace of a run, in the JSON that chrome://tracing and ui.perfetto.dev open.

It has spans of time on named tracks: phases of a step, waits, the optimizer's arithmetic, leases, and transfers from
submission to completion. A ring keeps the last spans of a long run. Without recording it costs nothing: then
`Counters.trace` is None.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

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

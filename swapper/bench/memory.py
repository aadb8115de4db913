"""Samples this process's memory with a thread, and its peak: proportional set size, or the process's own memory.

RSS would count a frame twice that is mapped twice in one process; PSS counts each page once. Pages of a memory file that nobody has
touched are in no map, and take memory all the same: of such files what they take counts.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from swapper.runtime.free_memory import anonymous_bytes

_ROLLUP, _STATM = Path("/proc/self/smaps_rollup"), Path("/proc/self/statm")
PAUSES = 100
"""Between samples passes at least this many times the time of a sample."""


def pss_bytes() -> int:
    """Return this process's proportional set size now, in bytes; 0 if the system does not report it.

    Its share of mapped libraries changes by tens of MB as other processes come and go that have them too.
    """
    if not _ROLLUP.exists():
        return 0
    found = re.findall(r"^(Pss\w*):\s+(\d+) kB$", _ROLLUP.read_text(), re.MULTILINE)
    nbytes = Counter({name: int(kilobytes) * 1024 for name, kilobytes in found})
    return nbytes["Pss"] + max(_memory_file_bytes() - nbytes["Pss_Shmem"], 0)


def own_bytes() -> int:
    """Return what this process has in anonymous memory and in memory files now, in bytes; 0 if the system does not report it.

    The kernel counts both all the time, so a sample takes a tenth of a millisecond, whatever the process has.
    """
    return anonymous_bytes() + _memory_file_bytes() if _STATM.exists() else 0


def _memory_file_bytes() -> int:
    """Return what the memory files take that this process has open. By os: pathlib takes three times as long."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:"):  # noqa: PTH115
                status = os.fstat(int(name))
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


class PeakMemory:
    """Samples the growth of this process's memory since its construction, as a context.

    Args:
        interval_s: seconds between samples; more if one takes long, so that they take a hundredth of a processor at most.
        measure: `pss_bytes`, or `own_bytes`, which is fast enough to see each peak of a step.

    Attributes:
        growth_bytes: the maximum beyond that, so far.
    """

    def __init__(self, interval_s: float = 0.25, measure: Callable[[], int] = pss_bytes) -> None:
        self._measure = measure
        self.baseline_bytes = measure()
        self.growth_bytes = 0
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="swapper-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        pause_s = self._interval_s
        while not self._stopped.wait(pause_s):
            began_s = time.perf_counter()
            self.growth_bytes = max(self.growth_bytes, self._measure() - self.baseline_bytes)
            pause_s = max(self._interval_s, PAUSES * (time.perf_counter() - began_s))

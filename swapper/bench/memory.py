"""Samples this process's memory with a thread, and its peak: proportional set size.

RSS would count a frame twice that is mapped twice in one process; PSS counts each page once. Pages of a memory file that nobody has
touched are in no map, and take memory all the same: of such files what they take counts.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter
from pathlib import Path

_ROLLUP = Path("/proc/self/smaps_rollup")


def pss_bytes(files: bool = True) -> int:
    """Return this process's proportional set size now, in bytes; 0 if the system does not report it.

    Args:
        files: with mapped files. The share of libraries changes by tens of MB as other processes come and go that have them too.
    """
    if not _ROLLUP.exists():
        return 0
    found = re.findall(r"^(Pss\w*):\s+(\d+) kB$", _ROLLUP.read_text(), re.MULTILINE)
    nbytes = Counter({name: int(kilobytes) * 1024 for name, kilobytes in found})
    mapped_bytes = nbytes["Pss"] if files else nbytes["Pss_Anon"] + nbytes["Pss_Shmem"]
    return mapped_bytes + max(_memory_file_bytes() - nbytes["Pss_Shmem"], 0)


def _memory_file_bytes() -> int:
    """Return what the memory files take that this process has open."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(entry.readlink()).startswith("/memfd:"):
                status = entry.stat()
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


class PeakMemory:
    """Samples the growth of this process's memory since its construction, as a context.

    Args:
        interval_s: seconds between samples; more if one takes long, so that they take a hundredth of a processor at most.

    Attributes:
        growth_bytes: the maximum beyond that, so far.
    """

    def __init__(self, interval_s: float = 0.25, files: bool = True) -> None:
        self._files = files
        self.baseline_bytes = pss_bytes(files)
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
            self.growth_bytes = max(self.growth_bytes, pss_bytes(self._files) - self.baseline_bytes)
            pause_s = max(self._interval_s, 100 * (time.perf_counter() - began_s))

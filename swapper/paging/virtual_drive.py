"""A drive and a clock in arithmetic only: with them a dry run tells how long a step takes.

Reads are carried out in the order of their submission, and so are writes; both at the same time, each at the drive's rate for it,
or slower if the drive does not reach both rates at once. A read that waits for a write (`after`) begins after it, and does not hold
up the reads behind it: as in the engine (csrc/io/scheduler.cpp). What a drive does while nobody waits, it does during `compute`.

[Note: the drive's time] A transfer is never delayed by later ones in its direction, and what slows the drive slows both directions
alike. So the end of a transfer is known when it is submitted, in seconds of a drive that is at its full rates: the drive's time.
How fast that passes on the clock depends on what the drive and the processors do.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter

from swapper.io.drives import Tuning
from swapper.io.engines import Transfer
from swapper.paging.section import NoWindow
from swapper.runtime.counters import Counters

MIN_S, ROUNDING_S = 1e-9, 1e-12
"""Less than this is not computed now, but with what follows; and times that differ by less are one."""


@dataclass(frozen=True)
class DriveRates:
    """Bytes a second that a drive reaches: reading alone, writing alone, and both together. Infinite: bytes take no time.

    `busy` is what reads and writes reach together while the processors compute: the engine and the kernel need them too. By
    `slowing_byte_s`, in seconds, each byte that moves meanwhile makes the computing longer.
    """

    read: float = math.inf
    write: float = math.inf
    both: float = math.inf
    busy: float = math.inf
    slowing_byte_s: float = 0.0

    @classmethod
    def measured(cls, tuning: Tuning) -> DriveRates:
        """Return the rates that `swapper tune` has measured."""
        read, write, both = tuning.read_bytes_per_s, tuning.write_bytes_per_s, tuning.both_bytes_per_s
        return cls(read, write, both, tuning.busy_bytes_per_s, tuning.slowing_byte_s)

    def lanes(self) -> tuple[Lane, Lane]:
        """Return the directions of a drive with these rates: reads, writes."""
        return Lane(self.read), Lane(self.write)

    def faster(self, times: float) -> DriveRates:
        """Return the rates of a drive that is `times` as fast, with the same processors."""
        return replace(self, read=self.read * times, write=self.write * times, both=self.both * times)

    def with_checksums(self, byte_s: float) -> DriveRates:
        """Return the rates of an engine whose thread takes checksums of what it moves, in `byte_s` seconds a byte.

        Writes alone are as fast as before: their checksums are taken while they are under way. If the engine's thread slows the
        computing, it does so for longer.
        """
        slower = {name: 1 / (1 / getattr(self, name) + byte_s) for name in ("read", "both", "busy")} if byte_s else {}
        return replace(self, **slower, slowing_byte_s=self.slowing_byte_s + byte_s * (self.slowing_byte_s > 0))

    def seconds_for(self, read_bytes: int, written_bytes: int) -> float:
        """Return the least seconds for these bytes."""
        return max(read_bytes / self.read, written_bytes / self.write, (read_bytes + written_bytes) / self.both)

    def share(self, reading: bool, writing: bool, computing: bool) -> float:
        """Return which part of its rates a drive reaches while it reads and writes, and the processors compute, or do not."""
        both = min(self.both, self.read + self.write)
        share = both / (self.read + self.write) if reading and writing and both < math.inf else 1.0
        return share * self.busy / both if computing and self.busy < both < math.inf else share


class DryTransfer:
    """A transfer of a dry run. See `swapper.io.engines.Transfer`.

    Attributes:
        end_s: when it is over. [Note: the drive's time]
    """

    __slots__ = ("_drive", "done", "end_s", "nbytes")
    error = None
    crc32 = 0
    submitted_s = completed_s = 0.0

    def __init__(self, drive: VirtualDrive, nbytes: int, end_s: float) -> None:
        self._drive = drive
        self.nbytes = nbytes
        self.end_s = end_s
        self.done = False

    def exception(self) -> None: ...

    def wait(self) -> None:
        self._drive.wait(self)


class Lane:
    """One direction of a drive. [Note: the drive's time]

    Args:
        rate: bytes a second.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._busy: list[tuple[float, float]] = []  # from when to when, in order

    def add(self, begin_s: float, nbytes: float) -> tuple[float, float]:
        """Move these bytes from `begin_s` on, when nothing else moves. Returns since when it moves something then, and the end."""
        busy, first_s, end_s = self._busy, begin_s, begin_s + nbytes / self.rate
        at = after = bisect_left(busy, begin_s, key=itemgetter(1))
        while after < len(busy) and busy[after][0] < end_s - ROUNDING_S:
            since_s, until_s = busy[after]
            first_s, end_s = min(first_s, since_s), end_s + until_s - max(since_s, begin_s)
            after += 1
        busy[at:after] = [(first_s, end_s)]
        return first_s, end_s

    def look(self, now_s: float) -> tuple[bool, float]:
        """Return whether something moves, and until when that stays so."""
        busy = self._busy
        while busy and busy[0][1] <= now_s:
            del busy[0]
        if not busy:
            return False, math.inf
        since_s, until_s = busy[0]
        return (True, until_s) if since_s <= now_s else (False, since_s)


class VirtualDrive:
    """A drive on a clock. See the module.

    Args:
        rates: of the drive. Default: it takes no time.
        access_s: that each access adds to the computing after it.
        mapped_byte_s: the same of each byte that is mapped into its window.
        checked_byte_s: of the engine's checksum of a byte.

    Attributes:
        rates: bytes a second.
        now_s: the time, in seconds.
        busy_until_s: when an accelerator has computed what was queued.
        finished: how many transfers have finished.
        counters: whose waits take the time of this drive.
    """

    def __init__(
        self,
        rates: DriveRates | None = None,
        access_s: float = 0.0,
        mapped_byte_s: float = 0.0,
        checked_byte_s: float = 0.0,
    ) -> None:
        self.rates = rates or DriveRates()
        self.now_s = self.busy_until_s = 0.0
        self.finished = 0
        self.counters: Counters = _Counters(self)
        self._access_s, self._mapped_byte_s = access_s, mapped_byte_s
        self._rates = self.rates.with_checksums(checked_byte_s)
        self._lanes = self._rates.lanes()
        self._drive_s = 0.0  # [Note: the drive's time]
        self._under_way: list[tuple[float, int, DryTransfer]] = []  # a heap
        self._added_s = 0.0  # to the computing
        self._is_computing = False

    def read(self, nbytes: int, after: Transfer | None) -> DryTransfer:
        begin_s = after.end_s if isinstance(after, DryTransfer) else 0.0
        return self._submit(self._lanes[0], nbytes, max(begin_s, self._drive_s))

    def write(self, nbytes: int) -> DryTransfer:
        return self._submit(self._lanes[1], nbytes, self._drive_s)

    def _submit(self, lane: Lane, nbytes: int, begin_s: float) -> DryTransfer:
        transfer = DryTransfer(self, nbytes, lane.add(begin_s, nbytes)[1])
        heapq.heappush(self._under_way, (transfer.end_s, id(transfer), transfer))
        self._finish()
        return transfer

    def compute(self, seconds: float) -> None:
        """Let this time pass, and what pages and their transfers take of the processors, while the drive works."""
        self._added_s += seconds
        end_s, self._is_computing = self.now_s, True
        while self._added_s > MIN_S:
            end_s, self._added_s = end_s + self._added_s, 0.0
            self.wait_until(end_s)
        self._is_computing = False

    def wait_until(self, end_s: float) -> None:
        """Let time pass while the drive works."""
        self._go_on(end_s, math.inf)

    def wait(self, transfer: DryTransfer) -> None:
        """Let time pass until `transfer` is done."""
        self._go_on(math.inf, transfer.end_s)

    @property
    def clock_s(self) -> float:
        """The time of what goes on longest: the run, or what it has queued."""
        return max(self.now_s, self.busy_until_s)

    def window(self) -> NoWindow:
        """Return a window for a section, which shows nothing, and takes time."""
        return _Window(self)

    def lease(self) -> None:
        """Note that an access is leased: the next computing takes longer."""
        self._added_s += self._access_s

    def map(self, nbytes: int) -> None:
        """Note that these bytes are mapped into a window: the next computing takes longer."""
        self._added_s += nbytes * self._mapped_byte_s

    def _go_on(self, until_s: float, until_drive_s: float) -> None:
        """Let time pass until the clock has come to `until_s`, or the drive's time to `until_drive_s`."""
        while self.now_s < until_s and self._drive_s < until_drive_s:
            began_s, (reads, writes) = self._drive_s, self._lanes
            (reading, read_s), (writing, written_s) = reads.look(began_s), writes.look(began_s)
            share = self._rates.share(reading, writing, self._is_computing)
            change_s = min(read_s, written_s, until_drive_s)
            seconds = (change_s - began_s) / share
            if seconds < until_s - self.now_s:
                self.now_s, self._drive_s = self.now_s + seconds, change_s
            else:
                self._drive_s += (until_s - self.now_s) * share
                self.now_s = until_s
            if self._is_computing and self._rates.slowing_byte_s:
                rate = (reads.rate if reading else 0.0) + (writes.rate if writing else 0.0)
                self._added_s += (self._drive_s - began_s) * rate * self._rates.slowing_byte_s
            self._finish()

    def _finish(self) -> None:
        """Note which transfers are done."""
        while self._under_way and self._under_way[0][0] <= self._drive_s:
            heapq.heappop(self._under_way)[2].done = True
            self.finished += 1


class _Window(NoWindow):
    """A window that takes time and shows nothing."""

    def __init__(self, drive: VirtualDrive) -> None:
        self._drive = drive

    def map(self, window_offset: int, arena_offset: int, nbytes: int, *guarded: bool) -> bool:
        self._drive.map(nbytes)
        return False


class _Counters(Counters):
    """Counters whose waits take the time of a virtual drive."""

    def __init__(self, drive: VirtualDrive) -> None:
        super().__init__()
        self._drive = drive

    @contextmanager
    def waiting(self, kind: str, what: object) -> Iterator[None]:
        began_s, name = self._drive.clock_s, f"{kind}_wait_s"
        yield
        setattr(self, name, getattr(self, name) + self._drive.clock_s - began_s)

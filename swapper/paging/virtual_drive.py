"""A drive and a clock in arithmetic only: with them a dry run tells how long a step takes.

Reads are carried out in the order of their submission, and so are writes; both at the same time, each at the drive's rate for it,
or slower if the drive does not reach both rates at once. A read that waits for a write (`after`) begins after it, and does not hold
up the reads behind it: as in the engine (csrc/io/scheduler.cpp). What a drive does while nobody waits, it does during `compute`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swapper.errors import InvariantError
from swapper.io.engines import Transfer
from swapper.runtime.counters import Counters

DRIVE_CPU_S_A_BYTE = 1e-10
"""Seconds of a processor for each byte that moves: the engine's threads, checksums, mapping of pages. Measured beside plain torch
(docs/benchmarks/notebook.md): 0.04 to 0.16 s a GB on two cores. All cores compute meanwhile, so a step computes so much longer."""
MOST_CPU_SHARE = 0.5
"""Of the processors, that transfers can take from computing: a choice."""


@dataclass(frozen=True, slots=True)
class DriveRates:
    """Bytes a second that a drive reaches: reading alone, writing alone, and both together.

    `cpu_s_a_byte` is what a byte takes of the processors while these compute, in seconds: so much longer they compute.
    """

    read: float = math.inf
    write: float = math.inf
    both: float = math.inf
    cpu_s_a_byte: float = 0.0

    def faster(self, times: float) -> DriveRates:
        """Return the rates of a drive that is `times` as fast."""
        return DriveRates(self.read * times, self.write * times, self.both * times, self.cpu_s_a_byte)

    def seconds_for(self, read_bytes: int, written_bytes: int) -> float:
        """Return the least seconds for these bytes."""
        return max(read_bytes / self.read, written_bytes / self.write, (read_bytes + written_bytes) / self.both)

    def of(self, reading: bool, writing: bool) -> tuple[float, float]:
        """Return the rates of reads and of writes while the drive does these."""
        share = min(1.0, self.both / (self.read + self.write)) if reading and writing else 1.0
        return self.read * share, self.write * share


class VirtualTransfer:
    """A transfer of a virtual drive. See `swapper.io.engines.Transfer`."""

    error = None
    crc32 = 0
    submitted_s = completed_s = 0.0

    def __init__(self, drive: VirtualDrive, nbytes: int, after: Transfer | None) -> None:
        self._drive = drive
        self.nbytes = nbytes
        self.left = float(nbytes)
        self.after = after

    @property
    def done(self) -> bool:
        return self.left <= 0

    def exception(self) -> None: ...

    def wait(self) -> None:
        self._drive.wait(self)


class VirtualDrive:
    """See the module. The default is a drive that takes no time.

    Attributes:
        rates: bytes a second.
        now_s: the time, in seconds.
        finished: how many transfers have finished.
    """

    def __init__(self, rates: DriveRates | None = None) -> None:
        self.rates = rates or DriveRates()
        self._takes_time = rates is not None
        self._reads: list[VirtualTransfer] = []
        self._writes: list[VirtualTransfer] = []
        self.now_s = 0.0
        self.finished = 0

    def read(self, nbytes: int, after: Transfer | None) -> VirtualTransfer:
        return self._submit(self._reads, nbytes, after)

    def write(self, nbytes: int) -> VirtualTransfer:
        return self._submit(self._writes, nbytes, None)

    def _submit(self, queue: list[VirtualTransfer], nbytes: int, after: Transfer | None) -> VirtualTransfer:
        transfer = VirtualTransfer(self, nbytes if self._takes_time else 0, after)
        if self._takes_time:
            queue.append(transfer)
        else:
            self.finished += 1
        return transfer

    def compute(self, seconds: float) -> None:
        """Let this time pass, in which the drive works."""
        left_s = seconds
        while True:
            share = (
                sum(rate * self.rates.cpu_s_a_byte for _, _, rate in self._moving()) if self.rates.cpu_s_a_byte else 0
            )
            pace = 1 - min(share, MOST_CPU_SHARE)
            began_s, end_s = self.now_s, self.now_s + left_s / pace
            if not self._advance(end_s) or self.now_s >= end_s:
                self.now_s = end_s
                return
            left_s -= (self.now_s - began_s) * pace

    def wait(self, transfer: VirtualTransfer) -> None:
        """Let time pass until `transfer` is done."""
        while not transfer.done:
            if not self._advance(math.inf):
                raise InvariantError("a transfer is waited for that can never begin")

    def _moving(self) -> list[tuple[list[VirtualTransfer], VirtualTransfer, float]]:
        """Return the transfers that are under way: the queue, the transfer, and its rate."""
        read = next((one for one in self._reads if one.after is None or one.after.done), None)
        write = self._writes[0] if self._writes else None
        rates = self.rates.of(read is not None, write is not None)
        found = zip((self._reads, self._writes), (read, write), rates, strict=True)
        return [(queue, one, rate) for queue, one, rate in found if one is not None]

    def _advance(self, end_s: float) -> bool:
        """Go on to the end of the next transfer, or to `end_s` if that comes first. False if nothing is under way."""
        moving = self._moving()
        if not moving:
            return False
        seconds = min(one.left / rate for _, one, rate in moving)
        is_last = self.now_s + seconds > end_s
        seconds = end_s - self.now_s if is_last else seconds
        self.now_s = end_s if is_last else self.now_s + seconds
        for queue, one, rate in moving:
            one.left -= seconds * rate
            if one.left <= 1e-3:  # of a byte: rounding
                one.left = 0.0
                self.finished += 1
                queue.remove(one)
        return True


class VirtualCounters(Counters):
    """Counters whose waits take the time of a virtual drive."""

    def __init__(self, drive: VirtualDrive) -> None:
        super().__init__()
        self._drive = drive

    @contextmanager
    def waiting(self, kind: str, what: object) -> Iterator[None]:
        began_s, name = self._drive.now_s, f"{kind}_wait_s"
        yield
        setattr(self, name, getattr(self, name) + self._drive.now_s - began_s)

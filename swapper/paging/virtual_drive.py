"""A drive and a clock in arithmetic only: with them a dry run tells how long a step takes.

Reads are carried out in the order of their submission, and so are writes; both at the same time, each at the drive's rate for it,
or slower if the drive does not reach both rates at once. A read that waits for a write (`after`) begins after it, and does not hold
up the reads behind it: as in the engine (csrc/io/scheduler.cpp). What a drive does while nobody waits, it does during `compute`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

from swapper.errors import InvariantError
from swapper.io.drives import Tuning
from swapper.io.engines import Transfer
from swapper.paging.section import NoWindow
from swapper.runtime.counters import Counters

MIN_S = 1e-9
"""Less than this is not computed now, but with what follows."""


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

    def open(self, costs: PagingCosts) -> VirtualDrive:
        """Return a drive with these rates."""
        return VirtualDrive(self, costs)

    def faster(self, times: float) -> DriveRates:
        """Return the rates of a drive that is `times` as fast, with the same processors."""
        return replace(self, read=self.read * times, write=self.write * times, both=self.both * times)

    def with_checksums(self, byte_s: float) -> DriveRates:
        """Return the rates of an engine whose thread takes checksums of what it moves, in `byte_s` seconds a byte.

        Writes alone are as fast as before: their checksums are taken while they are under way.
        """
        slower = {name: 1 / (1 / getattr(self, name) + byte_s) for name in ("read", "both", "busy")} if byte_s else {}
        return replace(self, **slower)

    def seconds_for(self, read_bytes: int, written_bytes: int) -> float:
        """Return the least seconds for these bytes."""
        return max(read_bytes / self.read, written_bytes / self.write, (read_bytes + written_bytes) / self.both)

    def of(self, reading: bool, writing: bool, computing: bool = False) -> tuple[float, float]:
        """Return the rates of reads and of writes while the drive, and the processors, do these.

        Args:
            reading, writing: what the drive does.
            computing: whether the processors compute meanwhile.
        """
        both = min(self.both, self.read + self.write)
        share = both / (self.read + self.write) if reading and writing and both < math.inf else 1.0
        if computing and self.busy < both < math.inf:  # one direction alone is slower by as much
            share *= self.busy / both
        return self.read * share, self.write * share


@dataclass(frozen=True, slots=True)
class PagingCosts:
    """Seconds that paging takes of the processors. Measured ones are in forecast/compute.py.

    Attributes:
        access_s: of an access, whatever its pages.
        page_s: of a page, whatever its size; the next use of the page waits for it.
        mapped_byte_s: the same for a byte of it, which is mapped into its window.
        transfer_s: of the engine's thread for a transfer, whatever its size.
        checked_byte_s: of the engine's checksum of a byte that moves: its thread submits nothing meanwhile.
        use_s: of a use of a module whose weights stay.
        takes_turns: the computing needs each processor, and waits for the engine's thread.
    """

    access_s: float = 0.0
    page_s: float = 0.0
    mapped_byte_s: float = 0.0
    transfer_s: float = 0.0
    checked_byte_s: float = 0.0
    use_s: float = 0.0
    takes_turns: bool = True

    def faster(self, times: float) -> PagingCosts:
        """Return the costs with processors that are `times` as fast."""
        return replace(self, **{of.name: getattr(self, of.name) / times for of in fields(self)[:-1]})


class DryTransfer:
    """A transfer of a dry run. See `swapper.io.engines.Transfer`."""

    __slots__ = ("_drive", "after", "done", "left", "nbytes")
    error = None
    crc32 = 0
    submitted_s = completed_s = 0.0

    def __init__(self, drive: VirtualDrive, nbytes: int, after: Transfer | None = None) -> None:
        self._drive = drive
        self.nbytes = nbytes
        self.left = float(nbytes)
        self.done = nbytes == 0
        self.after = after

    def exception(self) -> None: ...

    def wait(self) -> None:
        self._drive.wait(self)


class VirtualDrive:
    """A drive on a clock. See the module.

    Args:
        rates: of the drive. Default: it takes no time.
        costs: that its transfers, and their pages, add to the computing.

    Attributes:
        rates: bytes a second.
        now_s: the time, in seconds.
        busy_until_s: when an accelerator has computed what was queued.
        finished: how many transfers have finished.
        counters: whose waits take the time of this drive.
    """

    def __init__(self, rates: DriveRates | None = None, costs: PagingCosts | None = None) -> None:
        self.rates = rates or DriveRates()
        self.now_s = self.busy_until_s = 0.0
        self.finished = 0
        self.counters: Counters = _Counters(self)
        self._costs = costs or PagingCosts()
        self._rates = self.rates.with_checksums(self._costs.checked_byte_s)
        self._at_once = DryTransfer(self, 0) if math.isinf(self.rates.read + self.rates.write) else None
        self._reads: list[DryTransfer] = []
        self._writes: list[DryTransfer] = []
        self._added_s = 0.0  # to the computing, by pages and transfers
        self._is_computing = False

    def read(self, nbytes: int, after: Transfer | None) -> DryTransfer:
        return self._submit(self._reads, nbytes, after)

    def write(self, nbytes: int) -> DryTransfer:
        return self._submit(self._writes, nbytes, None)

    def _submit(self, queue: list[DryTransfer], nbytes: int, after: Transfer | None) -> DryTransfer:
        if self._at_once is not None:
            self.finished += 1
            return self._at_once
        transfer = DryTransfer(self, nbytes, after)
        queue.append(transfer)
        return transfer

    def compute(self, seconds: float) -> None:
        """Let this time pass, and what pages and transfers take of the processors, while the drive works."""
        self._added_s += seconds
        end_s, self._is_computing = self.now_s, True
        while self._added_s > MIN_S:
            end_s, self._added_s = end_s + self._added_s, 0.0
            self.wait_until(end_s)
        self._is_computing = False

    def wait_until(self, end_s: float) -> None:
        """Let time pass while the drive works."""
        while self.now_s < end_s and self._advance(end_s):
            pass
        self.now_s = max(self.now_s, end_s)

    @property
    def clock_s(self) -> float:
        """The time of what goes on longest: the run, or what it has queued."""
        return max(self.now_s, self.busy_until_s)

    def window(self) -> NoWindow:
        """Return a window for a section, which shows nothing, and takes time."""
        return _Window(self) if self._at_once is None else NoWindow()

    def lease(self) -> None:
        """Note that an access is leased: the next computing takes longer."""
        self._added_s += self._costs.access_s

    def map(self, nbytes: int) -> None:
        """Note that a page of this size is shown in its window: the next computing takes longer."""
        self._added_s += self._costs.page_s + nbytes * self._costs.mapped_byte_s

    def wait(self, transfer: DryTransfer) -> None:
        """Let time pass until `transfer` is done."""
        while not transfer.done:
            if not self._advance(math.inf):
                raise InvariantError("a transfer is waited for that can never begin")

    def _moving(self) -> list[tuple[list[DryTransfer], DryTransfer, float]]:
        """Return the transfers that are under way: the queue, the transfer, and its rate."""
        read = next((one for one in self._reads if one.after is None or one.after.done), None)
        write = self._writes[0] if self._writes else None
        rates = self._rates.of(read is not None, write is not None, self._is_computing)
        found = zip((self._reads, self._writes), (read, write), rates, strict=True)
        return [(queue, one, rate) for queue, one, rate in found if one is not None]

    def _advance(self, end_s: float) -> bool:
        """Go on to the end of the next transfer, or to `end_s` if that comes first. False if nothing is under way."""
        moving = self._moving()
        if not moving:
            return False
        seconds = min(self._until_change(one, rate, queue is self._writes) for queue, one, rate in moving)
        is_last = self.now_s + seconds > end_s
        seconds = end_s - self.now_s if is_last else seconds
        self.now_s = end_s if is_last else self.now_s + seconds
        for queue, one, rate in moving:
            one.left -= seconds * rate
            self._passed(seconds * rate, queue is self._writes)
            self._added_s += seconds * rate * self.rates.slowing_byte_s * self._is_computing
            if one.left <= 1e-3:  # of a byte: rounding
                one.left, one.done = 0.0, True
                self.finished += 1
                if self._is_computing and self._costs.takes_turns:
                    self._added_s += self._costs.transfer_s + one.nbytes * self._costs.checked_byte_s
                queue.remove(one)
        return True

    def _until_change(self, transfer: DryTransfer, rate: float, writes: bool) -> float:
        """Return the seconds until this rate ends."""
        return transfer.left / rate

    def _passed(self, nbytes: float, writes: bool) -> None:
        """Note that bytes have moved."""


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

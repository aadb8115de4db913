"""A drive, memory and an engine made of byte arrays, for running the real pager without threads, files or a clock.

Everything that time decides in the real engine is decided by a seeded random number here: when an operation starts, in
which order operations finish, what fails. The rules of the real one hold: an operation with `after` starts only when that
ticket is done, and fails untouched if that one failed. What the real engine leaves to its caller is checked:

- two operations that touch the same memory, or the same place of a file with a write among them, never overlap in time;
- memory that is being written out does not change until its ticket is done;
- a wait for something that can never finish is reported, and so is a call that ends in a circle;
- a touch of an address where nothing is mapped is an error, as it is a fault in reality;
- memory that is mapped in a window is never read into: the window would show another page's bytes.
"""

from __future__ import annotations

import errno
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, NoReturn

import pytest

from swapper.errors import InvariantError, IoError

CALLS_PER_REQUEST = 20_000
"""A single request to the pager that asks the engine more often than this will never end."""


class SimulationError(AssertionError):
    """The code under test broke a rule of memory, of the drive, or of its own."""


def assert_noticed(what: str, runs: Iterable[tuple[Callable[[], object], Callable[[], object]]]) -> None:
    """Fail unless a rule that is broken on purpose is noticed for what it is: other effects of it do not count.

    Args:
        what: a pattern of what one of the runs must raise.
        runs: some that break the rule, each with the same run that keeps it, which must raise nothing.
    """
    others: Counter[str] = Counter()
    for break_rule, keep_rule in runs:
        try:
            break_rule()
        except (SimulationError, InvariantError) as error:
            if re.search(what, str(error)):
                keep_rule()
                return
            others[re.sub(r"\d+", "", str(error))[:80]] += 1
    pytest.fail(f"no seed noticed it; what was noticed: {others}")


class Arena:
    """Memory at made-up addresses."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.bytes = bytearray(b"\xcc" * nbytes)
        self.windows: list[Window] = []
        self.overwritten: Callable[[int, int], None] = lambda address, nbytes: None

    def overwrite(self, address: int, content: bytes) -> None:
        """Change memory though somebody may be writing it to a file."""
        self.at(address, len(content))[:] = content
        self.overwritten(address, len(content))

    def at(self, address: int, nbytes: int) -> memoryview:
        begin = address - self.address
        if not 0 <= begin <= begin + nbytes <= len(self.bytes):
            raise SimulationError(f"address {address:#x} with {nbytes} bytes is outside of the arena")
        return memoryview(self.bytes)[begin : begin + nbytes]


class Growth:
    """The system, which gives the arena's memory piece by piece, unless all of it is there from the start."""

    def __init__(self, nbytes: int, random: Random) -> None:
        self._random = random
        self._nbytes = nbytes
        self._populated_bytes = random.choice([0, nbytes, nbytes])

    @property
    def populated_bytes(self) -> int:
        if self._random.random() < 0.2:
            self._populated_bytes = min(self._nbytes, self._populated_bytes + self._random.randrange(self._nbytes // 2))
        return self._populated_bytes

    def wait_populated(self, nbytes: int) -> None:
        if nbytes > self._nbytes:
            raise SimulationError(f"somebody waits for {nbytes} bytes of an arena of {self._nbytes}")
        self._populated_bytes = max(self._populated_bytes, nbytes)


class Window:
    """A range of addresses that shows pieces of the arena: `swapper._C.Window`, and the tensor made from it."""

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._arena = arena
        self._nbytes = nbytes
        self.mapped: dict[int, tuple[int, int]] = {}  # window offset -> arena offset, bytes
        self._absent: dict[int, Callable[[], bytes]] = {}  # window offset -> what code reads there all the same
        self._kept: dict[int, bytes] = {}  # window offset -> absent, but written: what is there
        self._guarded: set[int] = set()
        self._written: set[int] = set()
        arena.windows.append(self)

    def untyped_storage(self) -> NoReturn:
        raise NotImplementedError("no tensor of torch's has it")

    def map(self, window_offset: int, arena_offset: int, nbytes: int, guarded: bool = False) -> bool:
        if not 0 <= window_offset <= window_offset + nbytes <= self._nbytes:
            raise SimulationError(f"{nbytes} bytes at {window_offset} are mapped outside of the window")
        if self.mapped.get(window_offset, (arena_offset, nbytes)) != (arena_offset, nbytes):
            raise SimulationError(f"offset {window_offset} is mapped while something else is mapped there")
        self.mapped[window_offset] = (arena_offset, nbytes)
        self._absent.pop(window_offset, None)
        self._guarded.discard(window_offset)
        self._written.discard(window_offset)
        kept = self._kept.pop(window_offset, None)
        if kept is not None:
            self._arena.overwrite(self._arena.address + arena_offset, kept)
            self._written.add(window_offset)
        if guarded or kept is not None:
            self._guarded.add(window_offset)
        return kept is not None

    def guard(self, window_offset: int, nbytes: int) -> None:
        if self.mapped.get(window_offset, (0, -1))[1] != nbytes:
            raise SimulationError(f"{nbytes} bytes at {window_offset} are guarded, but not mapped")
        self._guarded.add(window_offset)
        self._written.discard(window_offset)

    def written_at(self, window_offset: int) -> int:
        return window_offset if window_offset in self._written or window_offset in self._kept else -1

    def fill(self, window_offset: int, nbytes: int) -> bool:
        raise SimulationError(f"{nbytes} bytes at {window_offset} are filled, which only a close does")

    def write(self, offset: int, content: bytes) -> None:
        """Code that goes past the guard writes all of a page."""
        if offset not in self.mapped:
            self._kept[offset] = content
            return
        self._arena.overwrite(self._arena.address + self.mapped[offset][0], content)
        if offset in self._guarded:
            self._written.add(offset)

    def _hide(self, offset: int, is_backed: bool) -> None:
        """What was written stays, where anything of it does."""
        if not is_backed:
            self._kept.pop(offset, None)
        if offset in self.mapped:
            nbytes = self.mapped[offset][1]
            if offset in self._written and is_backed:
                self._kept[offset] = bytes(self.touch(offset, nbytes))
            del self.mapped[offset]
        self._guarded.discard(offset)
        self._written.discard(offset)

    def promise(
        self, window_offset: int, nbytes: int, arena_offset: int, write: Ticket, source: File, source_offset: int
    ) -> None:
        if self.mapped.get(window_offset, (arena_offset, nbytes)) != (arena_offset, nbytes):
            raise SimulationError(f"{nbytes} bytes at {window_offset} are promised, but not mapped from {arena_offset}")
        if write.address != self._arena.address + arena_offset:
            raise SimulationError(f"{write!r} is not of the memory that is promised")
        self._hide(window_offset, True)

        def read() -> bytes:
            if write.finished and write.failure is None:
                return source.at(source_offset, nbytes)
            return bytes(self._arena.at(write.address, nbytes))

        self._absent[window_offset] = read

    def unmap(self, window_offset: int, nbytes: int, source: Any = None, source_offset: int = 0) -> None:
        self._absent.pop(window_offset, None)
        if source is not None:
            self._absent[window_offset] = lambda: source.at(source_offset, nbytes)
        if window_offset not in self.mapped:
            self._hide(window_offset, source is not None)
            return
        if self.mapped.get(window_offset, (0, -1))[1] != nbytes:
            raise SimulationError(f"{nbytes} bytes at {window_offset} are unmapped, but not mapped")
        self._hide(window_offset, source is not None)

    def touch(self, offset: int, nbytes: int) -> memoryview:
        """The bytes that a kernel sees at `offset`. They lie within one page."""
        if offset not in self.mapped or self.mapped[offset][1] != nbytes:
            raise SimulationError(f"segmentation fault: {nbytes} bytes at {offset} are touched, but not mapped")
        arena_offset, _ = self.mapped[offset]
        return self._arena.at(self._arena.address + arena_offset, nbytes)

    def look(self, offset: int, nbytes: int) -> bytes | None:
        """What code reads at `offset` that goes past the guard; None where that is a fault."""
        if offset in self.mapped:
            return bytes(self.touch(offset, nbytes))
        if offset in self._kept:
            return self._kept[offset]
        return self._absent[offset]() if offset in self._absent else None

    def __getitem__(self, place: slice) -> WindowBytes:
        return WindowBytes(self.touch(place.start, place.stop - place.start))


class ArenaView:
    """All of an arena, as what code reads where a page is in a frame and not mapped."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def at(self, offset: int, nbytes: int) -> bytes:
        return bytes(self._arena.at(self._arena.address + offset, nbytes))


class WindowBytes:
    """What the pager does with a piece of a section's memory."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def zero_(self) -> None:
        self._memory[:] = bytes(len(self._memory))


class File:
    """A file whose content is `bytes`."""

    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        self.bytes = bytearray(b"\xee" * nbytes)
        self.direct = True
        self.is_frozen = False  # it is a snapshot too

    def at(self, offset: int, nbytes: int) -> bytes:
        return bytes(self.bytes[offset : offset + nbytes])

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class Faults:
    """Which operations fail. A drive that failed once may go on failing at that place, or everywhere, until `repair`."""

    def __init__(self, random: Random, rate: float) -> None:
        self._random = random
        self.rate = rate
        self._broken: dict[tuple[str, str, int], int] = {}
        self._full = False

    def strike(self, op: str, path: str, offset: int) -> int:
        """Return the errno with which this operation fails, or 0."""
        place = (op, path, offset)
        if op == "write" and self._full:
            return errno.ENOSPC
        if place in self._broken:
            return self._broken[place]
        if self._random.random() >= self.rate:
            return 0
        number = errno.EIO if op == "read" else self._random.choice([errno.EIO, errno.ENOSPC])
        if self._random.random() < 0.3:
            self._broken[place] = number
        elif number == errno.ENOSPC and self._random.random() < 0.3:
            self._full = True
        return number

    def repair(self) -> None:
        self._broken.clear()
        self._full = False


class Ticket:
    """An operation and its completion: `swapper._C.Ticket` for those who only look at that."""

    def __init__(
        self, engine: Engine, op: str, file: File, offset: int, address: int, nbytes: int, after: Ticket | None
    ) -> None:
        self._engine = engine
        self.op = op
        self.file = file
        self.offset = offset
        self.address = address
        self.nbytes = nbytes
        self.after = after
        self.slow = False
        self.running = False
        self.finished = False
        self.cancelled = False
        self.failure: IoError | None = None
        self.content = b""  # of a write, when it was submitted
        self.torn = 0  # so many of its bytes are not as they were meant
        self.checksum: int | None = None
        self.expected: int | None = None  # of a read
        self.submitted_s = 0.0  # nothing here takes time

    @property
    def done(self) -> bool:
        self._engine.poll()
        return self.finished

    @property
    def error(self) -> IoError | None:
        return self.failure if self.finished else None

    @property
    def crc32(self) -> int:
        if self.checksum is None:
            raise SimulationError("the checksum of a ticket is asked for that is not done, or failed")
        return self.checksum

    def wait(self, timeout_s: float | None = None) -> bool:
        self._engine.wait(self)
        if self.failure is not None:
            raise self.failure
        return True

    def exception(self) -> IoError | None:
        self._engine.wait(self)
        return self.failure

    @property
    def is_doomed(self) -> bool:
        """What it waits for failed: it will fail too, and never touch anything."""
        return self.after is not None and self.after.failure is not None

    def touches_memory_of(self, other: Ticket) -> bool:
        return self.address < other.address + other.nbytes and other.address < self.address + self.nbytes

    def touches_file_of(self, other: Ticket) -> bool:
        return (
            self.file is other.file
            and self.offset < other.offset + other.nbytes
            and other.offset < self.offset + self.nbytes
        )

    def __repr__(self) -> str:
        return f"{self.op} of {self.file.path} at {self.offset}"


class Engine:
    """`swapper._C.Engine` on byte arrays.

    Args:
        arena: the memory.
        random: decides the order of everything.
        faults: decides what fails.
        eagerness: chance that an operation makes a move whenever somebody looks at the engine.
        slowness: chance that an operation takes much longer than others.
    """

    def __init__(self, arena: Arena, random: Random, faults: Faults, eagerness: float, slowness: float) -> None:
        self._arena = arena
        self._random = random
        self._faults = faults
        self._eagerness = eagerness
        self._slowness = slowness
        self._calls = 0
        self.open: list[Ticket] = []  # not done, in the order of submission
        self.errors: list[IoError] = []  # of operations that failed, and of those that were cancelled for it
        self.write_failed = False  # since somebody was last told
        self.seen: Counter[str] = Counter()
        self.before_write: Callable[[File, int], None] = lambda file, offset: None
        self.during_wait: Callable[[], None] = lambda: None
        self.after_tick: Callable[[], None] = lambda: None
        arena.overwritten = self._take_for_written

    # --- the engine's face ----------------------------------------------------------------------------------------

    def create_file(self, path: str, nbytes: int) -> File:
        return File(path, nbytes)

    def read(
        self,
        file: File,
        offset: int,
        address: int,
        nbytes: int,
        *,
        after: Ticket | None = None,
        checksum: bool = False,
        expected: int | None = None,
    ) -> Ticket:
        ticket = Ticket(self, "read", file, offset, address, nbytes, after)
        ticket.expected = expected
        return self._submit(ticket)

    def write(
        self, file: File, offset: int, address: int, nbytes: int, *, after: Ticket | None = None, checksum: bool = False
    ) -> Ticket:
        self.before_write(file, offset)
        ticket = Ticket(self, "write", file, offset, address, nbytes, after)
        ticket.content = bytes(self._arena.at(address, nbytes))
        return self._submit(ticket)

    # --- time -----------------------------------------------------------------------------------------------------

    def begin_request(self) -> None:
        """The pager is about to be asked for something that must end."""
        self._calls = 0

    def count_call(self) -> None:
        """Raise if the present request asks for more than any that ends."""
        self._calls += 1
        if self._calls > CALLS_PER_REQUEST:
            raise SimulationError("a request to the pager ends in a circle")

    def poll(self) -> None:
        """Somebody looks at the engine: some time may have passed."""
        self.count_call()
        while self._random.random() < self._eagerness and self.tick():
            pass

    def wait(self, ticket: Ticket) -> None:
        self.count_call()
        self.during_wait()
        while not ticket.finished:
            if not self.tick():
                raise SimulationError(f"hang: {ticket!r} is waited for and can never finish")
        self.poll()

    def tick(self) -> bool:
        """One operation starts or finishes. False if there is none that can."""
        able = [t for t in self.open if t.running or t.after is None or t.after.finished]
        quick = [t for t in able if not t.slow]
        if quick and self._random.random() < 0.98:
            able = quick
        if not able:
            return False
        ticket = self._random.choice(able)
        if ticket.running:
            self._finish(ticket)
        elif ticket.is_doomed:
            self.seen[f"cancelled {ticket.op}"] += 1
            ticket.cancelled = True
            self._fail(ticket, 0, "an operation that it waited for failed")
        else:
            self._start(ticket)
        self.after_tick()
        return True

    # --------------------------------------------------------------------------------------------------------------

    def _submit(self, ticket: Ticket) -> Ticket:
        self._arena.at(ticket.address, ticket.nbytes)
        ticket.slow = self._random.random() < self._slowness
        self.seen[ticket.op] += 1
        if ticket.after is not None:
            self.seen[f"{ticket.op} after another"] += 1
        self.open.append(ticket)
        self.poll()
        return ticket

    def _start(self, ticket: Ticket) -> None:
        for earlier in self.open[: self.open.index(ticket)]:
            if earlier.is_doomed:
                continue
            if ticket.touches_memory_of(earlier):
                raise SimulationError(f"{ticket!r} starts in memory that {earlier!r} uses")
            if ticket.touches_file_of(earlier) and "write" in (ticket.op, earlier.op):
                raise SimulationError(f"{ticket!r} starts before {earlier!r} of the same place has ended")
        ticket.running = True
        if ticket.op == "read":
            begin = ticket.address - self._arena.address
            for window in self._arena.windows:
                for at, nbytes in window.mapped.values():
                    if at < begin + ticket.nbytes and begin < at + nbytes:
                        raise SimulationError(f"{ticket!r} starts in memory that a window shows")
            self._arena.at(ticket.address, ticket.nbytes)[:] = b"\xdd" * ticket.nbytes

    def _finish(self, ticket: Ticket) -> None:
        memory = self._arena.at(ticket.address, ticket.nbytes)
        place = slice(ticket.offset, ticket.offset + ticket.nbytes)
        reads = ticket.op == "read"
        if memory != (b"\xdd" * ticket.nbytes if reads else ticket.content):
            raise SimulationError(f"memory was changed during {ticket!r}")
        number = self._faults.strike(ticket.op, ticket.file.path, ticket.offset)
        done = ticket.nbytes if number == 0 else self._random.randrange(ticket.nbytes)
        if reads:
            memory[:done] = ticket.file.bytes[place][:done]
        else:
            content = b"\xbb" * ticket.torn + ticket.content[ticket.torn :]
            ticket.file.bytes[place] = content[:done] + ticket.file.bytes[place][done:]
        if number:
            self.seen[f"failed {ticket.op}"] += 1
            self.write_failed = self.write_failed or not reads
            self._fail(ticket, number, "simulated")
            return
        ticket.checksum = zlib.crc32(memory)
        if ticket.expected not in (None, ticket.checksum):
            raise SimulationError(f"{ticket!r} expects another checksum than that of what the store has there")
        self._end(ticket)

    def _take_for_written(self, address: int, nbytes: int) -> None:
        """Memory has changed under a write, which then writes the old content, the new, or a mix."""
        for ticket in self.open:
            if ticket.op == "write" and ticket.address < address + nbytes and address < ticket.address + ticket.nbytes:
                ticket.content = bytes(self._arena.at(ticket.address, ticket.nbytes))
                ticket.torn = self._random.randrange(ticket.nbytes)

    def _fail(self, ticket: Ticket, number: int, detail: str) -> None:
        ticket.failure = IoError(ticket.op, ticket.file.path, ticket.offset, ticket.nbytes, number, detail)
        self.errors.append(ticket.failure)
        self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        ticket.running = False
        ticket.finished = True
        self.open.remove(ticket)

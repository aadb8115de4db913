"""Opens the files that a handle reads or writes: a path, a descriptor that stays its caller's, or one striped over several drives.

A file is opened for each operation, shared by those in flight on it, and then closed: a handle that kept files open
would write into removed ones, and hold the space of deleted ones.

A striped file `name` has a part `name.stripe0of2` in each directory, with that drive's stripes one after the other, and
a record `name.stripes` of their assignment. Drives get stripes by weight, so that one of twice the speed gets twice the
bytes. The record is made with the file and never changes: every later open uses it, whatever the handle's weights.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from swapper import _C
from swapper.errors import ConfigError, IoError
from swapper.io import beneath
from swapper.io.drives import assign_to_drives
from swapper.runtime import records

Target = str | bytes | os.PathLike[str] | os.PathLike[bytes] | int
"""A path, or an open descriptor."""


class Opened(Protocol):
    """The target of an operation: one file, or one striped over several drives."""

    @property
    def path(self) -> str: ...
    @property
    def files(self) -> list[OpenFile]: ...
    @property
    def is_regular(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    def allocate(self, nbytes: int) -> None: ...
    def truncate(self, nbytes: int) -> None: ...
    def segments(self, offset: int, nbytes: int) -> Iterator[Segment]: ...


class Segment(NamedTuple):
    """A run of bytes in one file."""

    opened: OpenFile
    offset: int
    nbytes: int


@dataclass(eq=False)
class OpenFile:
    """One open file and the number of operations that use it. The last of them closes it."""

    file: _C.File
    key: tuple[int, int, bool]
    device: int
    is_regular: bool
    users: int = 0

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def files(self) -> list[OpenFile]:
        return [self]

    @property
    def nbytes(self) -> int:
        return self.file.nbytes

    def allocate(self, nbytes: int) -> None:
        self.file.allocate(nbytes)

    def truncate(self, nbytes: int) -> None:
        self.file.truncate(nbytes)

    def segments(self, offset: int, nbytes: int) -> Iterator[Segment]:
        yield Segment(self, offset, nbytes)


class OpenFiles:
    """The files with operations in flight, by inode and direction."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int, bool], OpenFile] = {}
        self._lock = threading.Lock()

    def open(self, target: Target, writing: bool) -> OpenFile:
        """Open `target`, making a missing file if `writing`. Pass the result to `release`.

        Raises:
            IoError: the system's error, or EINVAL for anything that is neither a file nor a drive; EBADF for a
                descriptor that is not open, or not in this direction.
        """
        path = _path_of(target, writing)
        for _ in range(8):  # a file may appear or disappear between the check and the open
            status = _status(path, target, writing)
            with self._lock:
                shared = self._files.get((status.st_dev, status.st_ino, writing)) if status else None
                if shared is not None:
                    shared.users += 1
                    return shared
            try:
                file = _C.File(path, create=status is None, read_only=not writing)
            except IoError as error:
                if error.errno == (errno.EEXIST if status is None else errno.ENOENT) and writing:
                    continue
                raise
            return self._adopt(file, path, writing)
        raise IoError("open", path, 0, 0, errno.EBUSY, "the file keeps appearing and disappearing")

    def _adopt(self, file: _C.File, path: str, writing: bool) -> OpenFile:
        try:
            status = os.stat(path)  # noqa: PTH116 - paths may be descriptors under /proc
        except OSError as error:
            file.close()
            raise IoError("open", path, 0, 0, error.errno or 0, "removed while it was opened") from error
        is_regular = stat.S_ISREG(status.st_mode)
        device = status.st_dev if is_regular else status.st_rdev
        opened = OpenFile(file, (status.st_dev, status.st_ino, writing), device, is_regular, users=1)
        with self._lock:
            self._files.setdefault(opened.key, opened)
        return opened

    def release(self, opened: Opened) -> None:
        """Release the result of `open`. The engine keeps the descriptor until its transfers are done."""
        for file in opened.files:
            self._release_one(file)

    def _release_one(self, opened: OpenFile) -> None:
        with self._lock:
            opened.users -= 1
            if opened.users:
                return
            if self._files.get(opened.key) is opened:
                del self._files[opened.key]
        opened.file.close()


def _path_of(target: Target, writing: bool) -> str:
    if isinstance(target, bool):
        raise ConfigError(f"{target!r} is neither a path nor a descriptor")
    if not isinstance(target, int):
        path = os.fsdecode(target)
        if "\0" in path:
            raise ConfigError(f"{path!r} is not a path: it contains a NUL")
        return path
    try:
        mode = fcntl.fcntl(target, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, ValueError, OverflowError) as error:
        raise IoError("open", f"descriptor {target}", 0, 0, errno.EBADF, "it is not open") from error
    if mode == (os.O_RDONLY if writing else os.O_WRONLY):
        missing = "writing" if writing else "reading"
        raise IoError("open", f"descriptor {target}", 0, 0, errno.EBADF, f"it is not open for {missing}")
    # Opened again: the caller may close its own at once, and its flags and position do not change.
    return f"/proc/self/fd/{target}"


def _status(path: str, target: Target, writing: bool) -> os.stat_result | None:
    """Return the status of `path`; None if it is missing and may be made. Refuses a FIFO, whose open would block."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except FileNotFoundError as error:
        if writing and not isinstance(target, int):
            return None
        raise IoError("open", path, 0, 0, errno.ENOENT) from error
    except OSError as error:
        raise IoError("open", path, 0, 0, error.errno or errno.EIO) from error
    if stat.S_ISDIR(status.st_mode):
        raise IoError("open", path, 0, 0, errno.EISDIR)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)):
        raise IoError("open", path, 0, 0, errno.EINVAL, "it is neither a file nor a drive")
    return status


STRIPE_BYTES = 4 << 20  # a choice
MAX_PATTERN = 64  # stripes; a choice
MAX_RECORD_BYTES = 4096  # of a sane record; it is read whole
FORMAT = 2  # of the record; other numbers are refused
_SHAPE = records.fields(
    {
        "format": records.exactly(FORMAT),
        "id": records.text,
        "index": records.whole(most=MAX_PATTERN - 1),
        "stripe_bytes": records.whole(least=4096),
        "pattern": records.listing(records.whole(most=MAX_PATTERN - 1), 1, MAX_PATTERN),
    }
)


@dataclass(frozen=True)
class StripeLayout:
    """The assignment of one file's bytes to drives. Pure. Stripe n belongs to drive `pattern[n % len(pattern)]`."""

    stripe_bytes: int
    pattern: tuple[int, ...]

    @staticmethod
    def by_weight(stripe_bytes: int, weights: Sequence[float]) -> StripeLayout:
        """Return the shortest pattern, of at most MAX_PATTERN stripes, that is nearest to the weights."""
        shares = [weight / sum(weights) for weight in weights]
        lengths = range(len(weights), MAX_PATTERN + 1)
        patterns = [tuple(assign_to_drives([1] * length, weights)) for length in lengths]
        whole = [pattern for pattern in patterns if len(set(pattern)) == len(weights)]
        best = min(whole, key=lambda pattern: (round(_error(pattern, shares), 6), len(pattern)))
        return StripeLayout(stripe_bytes, best)

    @cached_property
    def _places(self) -> list[list[int]]:
        """Return each drive's positions in the pattern."""
        return [[n for n, d in enumerate(self.pattern) if d == drive] for drive in range(max(self.pattern) + 1)]

    def runs(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (drive, offset in its part, bytes), in the order of the file."""
        end = offset + nbytes
        while offset < end:
            stripe, within = divmod(offset, self.stripe_bytes)
            cycle, position = divmod(stripe, len(self.pattern))
            drive = self.pattern[position]
            places = self._places[drive]
            index = cycle * len(places) + places.index(position)
            count = min(self.stripe_bytes - within, end - offset)
            yield drive, index * self.stripe_bytes + within, count
            offset += count

    def part_bytes(self, drive: int, nbytes: int) -> int:
        """Return the size of a drive's part of a file of `nbytes`."""
        cycle_bytes = len(self.pattern) * self.stripe_bytes
        cycles, rest = divmod(nbytes, cycle_bytes)
        places = self._places[drive]
        partial = sum(min(max(rest - place * self.stripe_bytes, 0), self.stripe_bytes) for place in places)
        return cycles * len(places) * self.stripe_bytes + partial

    def end_of(self, drive: int, part_bytes: int) -> int:
        """Return the file offset at which the last byte of a part of that size ends."""
        if part_bytes == 0:
            return 0
        index, within = divmod(part_bytes - 1, self.stripe_bytes)
        cycle, n = divmod(index, len(self._places[drive]))
        return (cycle * len(self.pattern) + self._places[drive][n]) * self.stripe_bytes + within + 1


def _error(pattern: Sequence[int], shares: Sequence[float]) -> float:
    return max(abs(pattern.count(drive) / len(pattern) - share) for drive, share in enumerate(shares))


@dataclass(frozen=True)
class StripeRecord:
    """The record next to each part of a striped file, as JSON with a checksum."""

    id: str
    index: int
    layout: StripeLayout

    def data(self) -> bytes:
        layout = {"stripe_bytes": self.layout.stripe_bytes, "pattern": list(self.layout.pattern)}
        return records.seal({"format": FORMAT, "id": self.id, "index": self.index, **layout})

    @staticmethod
    def parse(data: bytes) -> StripeRecord:
        """Raises ValueError for anything that `data` could not have made."""
        found = records.unseal(data, _SHAPE)
        stripe_bytes, pattern = found["stripe_bytes"], tuple(found["pattern"])
        if stripe_bytes % 4096:
            raise ValueError(f"stripes of {stripe_bytes} bytes")
        if set(pattern) != set(range(max(pattern) + 1)):
            raise ValueError(f"the pattern {pattern}")
        return StripeRecord(found["id"], found["index"], StripeLayout(stripe_bytes, pattern))


class StripedFile:
    """An open striped file. Its parts belong to the handle's `OpenFiles`."""

    def __init__(self, path: str, layout: StripeLayout, files: list[OpenFile]) -> None:
        self.path = path
        self.files = files
        self.is_regular = True
        self._layout = layout

    @property
    def nbytes(self) -> int:
        return max(self._layout.end_of(drive, opened.nbytes) for drive, opened in enumerate(self.files))

    def allocate(self, nbytes: int) -> None:
        for drive, opened in enumerate(self.files):
            opened.allocate(self._layout.part_bytes(drive, nbytes))

    def truncate(self, nbytes: int) -> None:
        for drive, opened in enumerate(self.files):
            opened.truncate(self._layout.part_bytes(drive, nbytes))

    def segments(self, offset: int, nbytes: int) -> Iterator[Segment]:
        for drive, at, count in self._layout.runs(offset, nbytes):
            yield Segment(self.files[drive], at, count)


class Stripes:
    """The directories over which a handle stripes files with relative paths."""

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        stripe_bytes: int = STRIPE_BYTES,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Check the directories.

        Args:
            directories: of the drives, one each.
            stripe_bytes: of one stripe.
            weights: the drives' speeds, one a directory, in any unit; equal by default.

        Raises:
            ConfigError: no directory, one of them twice or not a directory, or invalid numbers.
        """
        self.directories = [Path(directory).resolve() for directory in directories]
        if not self.directories or len(set(self.directories)) < len(self.directories):
            raise ConfigError("directories= takes one directory or more, each of them once")
        for directory in self.directories:
            if not directory.is_dir():
                raise ConfigError(f"directories=: {directory} is not a directory")
        if isinstance(stripe_bytes, bool) or stripe_bytes < 4096 or stripe_bytes % 4096:
            raise ConfigError(f"stripe_bytes={stripe_bytes!r} must be a multiple of 4096")
        weights = [1.0] * len(self.directories) if weights is None else list(weights)
        if len(weights) != len(self.directories) or any(not 0 < weight < float("inf") for weight in weights):
            raise ConfigError(f"weights={weights!r} must be a number above 0 for each of the directories")
        if sum(weights) > MAX_PATTERN / 2 * min(weights):
            raise ConfigError(f"weights={weights!r}: a drive so much slower than another only delays it; leave it out")
        self._layout = StripeLayout.by_weight(stripe_bytes, weights)
        self._lock = threading.Lock()  # for threads that make the same file

    def open(self, name: str, files: OpenFiles, writing: bool) -> StripedFile:
        """Open the striped file of that name, making a missing one if `writing`.

        Args:
            name: of the striped file, below the directories.
            files: open its parts.
            writing: make a missing one.

        Raises:
            IoError: it does not exist, a part or a record is missing, or records contradict each other.
        """
        if ".." in Path(name).parts or not Path(name).name:
            raise ConfigError(f"{name!r} does not name a file below the directories")
        records = self._records(name, writing)
        count = len(self.directories)
        opened: list[OpenFile] = []
        try:
            for directory, (index, _) in zip(self.directories, records, strict=True):
                part = directory / f"{name}.stripe{index}of{count}"
                opened.append(files.open(part, writing))
        except BaseException:
            for each in opened:
                files.release(each)
            raise
        by_index = dict(zip((index for index, _ in records), opened, strict=True))
        return StripedFile(str(self.directories[0] / name), records[0][1], [by_index[n] for n in range(count)])

    def _records(self, name: str, writing: bool) -> list[tuple[int, StripeLayout]]:
        """Return each directory's part number, and the layout."""
        paths = [directory / f"{name}.stripes" for directory in self.directories]
        with self._lock:
            if writing and not any(path.exists() for path in paths):
                self._make_records(paths)
        records = [_read_record(path) for path in paths]
        layout, drives = records[0].layout, list(range(len(paths)))
        is_whole = sorted(each.index for each in records) == drives == sorted(set(layout.pattern))
        if not is_whole or any((each.id, each.layout) != (records[0].id, layout) for each in records):
            detail = f"the records {', '.join(map(str, paths))} are not those of one file over {len(paths)} directories"
            raise IoError("open", str(paths[0]), 0, 0, errno.EINVAL, detail)
        return [(each.index, layout) for each in records]

    def _make_records(self, paths: list[Path]) -> None:
        identity = secrets.token_hex(8)
        for index, path in enumerate(paths):
            temporary = path.with_name(f"{path.name}.{identity}")
            try:
                with os.fdopen(beneath.create_file(temporary, 0o666), "wb") as file:
                    file.write(StripeRecord(identity, index, self._layout).data())
                path.hardlink_to(temporary)  # never over another file
            except FileExistsError:
                return  # somebody made the same file first: use theirs
            except OSError as error:
                raise IoError("open", str(path), 0, 0, error.errno or errno.EIO) from error
            finally:
                temporary.unlink(missing_ok=True)


def _read_record(path: Path) -> StripeRecord:
    try:
        return StripeRecord.parse(beneath.read_small(path, MAX_RECORD_BYTES, follow=True))
    except OSError as error:
        raise IoError("open", str(path), 0, 0, error.errno or errno.EIO, "the record of a striped file") from error
    except ValueError as error:
        raise IoError("open", str(path), 0, 0, errno.EINVAL, f"it is no record of a striped file: {error}") from error

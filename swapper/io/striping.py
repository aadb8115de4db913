"""Stripes files over several drives: each drive transfers its part at its own speed.

A striped file `name` has a part `name.stripe0of2` in each directory, with that drive's stripes one after the other, and
a record `name.stripes` of their assignment. Drives get stripes by weight, so that one of twice the speed gets twice the
bytes. The record is made with the file and never changes: every later open uses it, whatever the handle's weights.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from swapper.errors import ConfigError, IoError
from swapper.io import beneath
from swapper.io.drives import assign_to_drives
from swapper.io.files import OpenFile, OpenFiles, Segment
from swapper.runtime import records

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

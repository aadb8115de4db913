"""Takes snapshots: the whole state as one container under the user's name, without copying bytes on the drive.

`snapshot(path, keep=N)` removes the oldest that the run published by the same pattern. Two names have one pattern if
they lie in the same directory and differ only in runs of digits: `step-90.pt`, `step-100.pt`. Only files that this
run published with `keep=` are ever removed, and only if unchanged: the same inode, size and time of change. A file
that somebody replaced, changed or renamed is left alone, and no longer counts.

`capture` copies the state in memory, at the user's call. When the step's last writes are done, `start` makes the newest
swap file the snapshot's: another file replaces it, and a thread (publication.py) publishes it while training continues.

[Note: who touches what while a snapshot is published] Until `start` everything belongs to the training thread. `start`
gives the publication its own values and objects: captured bytes, paths, runs of bytes with their checksums, open files.
From then on its thread touches only those, and the engine, which any thread may use: no page, no pager, no store. The
file that it completes is frozen: the store does not write to it. The alternating files that it reads from are named by
the last commit, so no step touches those bytes before the next commit, and there is none while `reads_sources`.
`settle` handles the outcome, in the training thread.

[Note: external content] A snapshot is whole: content of external files (swap_files.py) is copied into it, unless it is
left out with the rest of what does not change. If such a file ends within the last sector of a section, the snapshot
has zeros there.
"""

from __future__ import annotations

import bisect
import copy
import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from swapper import _C
from swapper.durability.commit import tensors_of
from swapper.durability.directory import RETENTION_NAME
from swapper.durability.publication import Base, Publication, SnapshotContents, SnapshotTicket
from swapper.durability.snapshot_directory import DirectoryTicket, SnapshotDirectory, check_free
from swapper.errors import CheckpointError, InvariantError, IoError
from swapper.formats.container import ContainerLayout, PreparedTail
from swapper.formats.torch_writer import Locate, StorageRef
from swapper.io import beneath
from swapper.io.copying import CopyRange
from swapper.io.engines import Engine
from swapper.paging.section import EXTERNAL, Page, Section, pieces_of
from swapper.paging.store.swap_files import Store
from swapper.runtime import records

_SHAPE = records.fields(
    {
        "published": records.listing(
            records.row(
                records.path, records.whole(most=(1 << 64) - 1), records.whole(), records.whole(least=-(1 << 63))
            )
        )
    }
)


@dataclass(frozen=True, slots=True)
class Published:
    """A snapshot that was published with `keep=`, and its identity."""

    path: str
    inode: int
    nbytes: int
    changed_ns: int

    @classmethod
    def look(cls, path: Path) -> Published:
        status = os.lstat(path)
        return cls(str(path), status.st_ino, status.st_size, status.st_mtime_ns)

    @property
    def pattern(self) -> str:
        path = Path(self.path)
        return str(path.with_name(re.sub(r"[0-9]+", "#", path.name)))

    def is_there(self) -> bool:
        try:
            return Published.look(Path(self.path)) == self
        except OSError:
            return False


class Retention:
    """The removable snapshots of a run, oldest first, in a file of its directory. Thread-safe.

    A snapshot published right before a kill may be missing in the file, and is then never removed.
    """

    def __init__(self, directory: Path) -> None:
        self._lock = threading.Lock()
        self._file = directory / RETENTION_NAME
        self._published: list[Published] = []
        if beneath.exists(self._file):
            try:
                found = records.unseal(beneath.read_small(self._file, records.MAX_RECORD_BYTES), _SHAPE)
                self._published = [Published(*row) for row in found["published"]]
            except (OSError, ValueError) as error:
                log.warning("%s cannot be read (%s): the snapshots that it names are kept", self._file, str(error))

    def published(self, path: Path, keep: int | None) -> None:
        """Note that `path` was published. With `keep`, remove the oldest of its pattern beyond that number."""
        if keep is None:
            return
        newest = Published.look(path)
        with self._lock:
            self._published = [*(p for p in self._published if p.is_there()), newest]
            alike = [p for p in self._published if p.pattern == newest.pattern]
            self._save()
            for old in alike[:-keep]:
                self._remove(old)
            self._save()

    def _remove(self, old: Published) -> None:
        try:
            Path(old.path).unlink()
        except OSError as error:
            log.warning("cannot remove %s for keep=: %s", old.path, error.strerror)
            return
        self._published.remove(old)

    def _save(self) -> None:
        rows = [[p.path, p.inode, p.nbytes, p.changed_ns] for p in self._published]
        beneath.replace_file(self._file, records.seal({"published": rows}))


log = logging.getLogger("swapper")


@dataclass(frozen=True)
class Snapshot:
    """A requested snapshot, with the state of memory at the call."""

    path: Path
    tail: PreparedTail
    keep: int | None
    left_out: frozenset[int]  # numbers of sections
    ticket: SnapshotTicket


@dataclass(eq=False, repr=False)
class Publisher:
    """Takes the snapshots of one run.

    Args:
        sections: the payload records, one each, in order.
        layout: of the container.
        engine: does the transfers.
        store: has the swap files.
        retention: of snapshots published with `keep=`.
        unchanging: numbers of the sections that training does not change.
        check_external: raises CheckpointError if an external file has changed. Called in any thread.
    """

    _sections: Sequence[Section]
    _layout: ContainerLayout
    _engine: Engine
    _store: Store
    _retention: Retention
    _unchanging: frozenset[int]
    _check_external: Callable[[], None]
    _publications: list[Publication] = field(default_factory=list)  # those that `settle` has not finished
    _tickets: list[SnapshotTicket] = field(default_factory=list)  # those whose failure may be unreported

    def check_free(self, path: Path) -> None:
        """Make missing directories above `path`. Raise CheckpointError if it exists or is about to."""
        check_free(path)
        if any(not ticket.done and ticket.path == path for ticket in self._tickets):
            raise CheckpointError(f"{path} exists already, as a snapshot in flight: choose another name")

    def capture(
        self,
        path: Path,
        content: dict[str, object],
        keep: int | None,
        with_unchanging: bool,
        step: int,
        hurry: Callable[[], None],
    ) -> Snapshot:
        """Capture the state in memory.

        Args:
            path: must not exist.
            content: the result of torch.load. Of tensors in the sections only the location is read.
            keep: how many snapshots of this name's pattern to keep.
            with_unchanging: False leaves out what training does not change, and names it.
            step: of the snapshot.
            hurry: calls `start`, if that was not done yet.

        Raises:
            CheckpointError: `path` exists or is about to, its directory cannot be made, or `content` cannot be written.
        """
        self.check_free(path)
        left_out = frozenset() if with_unchanging else self._unchanging
        if not with_unchanging:
            content = self._leave_out(content, left_out)
        tail = PreparedTail(self._layout, content, _locator(self._sections, self._layout))
        ticket = SnapshotTicket(path, step, hurry)
        self._tickets.append(ticket)
        return Snapshot(path, tail, keep, left_out, ticket)

    def capture_part(
        self, directory: SnapshotDirectory, content: dict[str, object], step: int, hurry: Callable[[], None]
    ) -> Snapshot:
        """Capture this rank's part of the snapshot `directory`. See `capture`. A failure is raised, and fails the ticket.

        Args:
            directory: of the ranks' files.
            content: the user's, of this rank.
            step: number of the step.
            hurry: as of `capture`.
        """
        previous = [ticket for ticket in self._tickets if isinstance(ticket, DirectoryTicket)]
        ticket = DirectoryTicket(directory, step, hurry, previous[-1] if previous else None)
        self._tickets.append(ticket)
        try:
            locate = _locator(self._sections, self._layout)
            items = directory.items(locate, {record.key: record.nbytes for record in self._layout.records})
            tail = PreparedTail(self._layout, content, locate, items)
            return Snapshot(directory.file, tail, None, frozenset(), ticket)
        except BaseException as error:
            ticket.fail(error)
            raise

    def _leave_out(self, content: dict[str, Any], left_out: frozenset[int]) -> dict[str, object]:
        places = _Places([self._sections[number] for number in left_out])
        absent = [n for n, t in content["model"].items() if places.find(t) is not None]
        model = copy.copy(content["model"])  # an OrderedDict with _metadata
        for name in absent:
            del model[name]
        return {**content, "model": model, "swapper": {**content["swapper"], "left_out": absent}}

    def start(self, snapshot: Snapshot, forbids_linking: Callable[[int], bool] = lambda number: False) -> None:
        """Publish the step in the background, once it is written (and, if the run commits, committed).

        The ticket reports a failure; the run continues.

        Args:
            forbids_linking: returns True if file `number` must not change, and so cannot be completed to the snapshot.
        """
        try:
            self._start(snapshot, forbids_linking)
        except Exception as error:
            snapshot.ticket.finish(error)

    def settle(self) -> None:
        """Handle finished publications. Cheap if there are none."""
        for publication in filter(attrgetter("is_over"), tuple(self._publications)):
            self._publications.remove(publication)
            publication.join()
            if publication.base is not None:
                self._store.published(publication.base.number, publication.base.status)

    @property
    def reads_sources(self) -> bool:
        """Return True if a publication still reads from an alternating file."""
        return any(not publication.sources_read.is_set() for publication in self._publications)

    @property
    def is_publishing(self) -> bool:
        """Return True if a snapshot is being written in the background."""
        return any(not ticket.done for ticket in self._tickets)

    def wait_for_sources(self) -> None:
        """Wait until no publication reads from an alternating file."""
        for publication in self._publications:
            publication.sources_read.wait()

    def finish(self) -> None:
        """Wait for every publication that was started."""
        for publication in self._publications:
            publication.join()
        for ticket in self._tickets:
            if isinstance(ticket, DirectoryTicket):
                ticket.join()
        self.settle()

    def raise_failure(self) -> None:
        """Raise the first unreported failure, and log the others."""
        over = [ticket for ticket in self._tickets if ticket.done]
        self._tickets = [ticket for ticket in self._tickets if ticket not in over]
        errors = [error for ticket in over if (error := ticket.unreported_error()) is not None]
        for error in errors[1:]:
            log.error("another snapshot failed: %s", str(error))
        if errors:
            raise errors[0]

    # ------------------------------------------------------------------------------------------------------------------

    def _start(self, snapshot: Snapshot, forbids_linking: Callable[[int], bool]) -> None:
        absent = [self._sections[number] for number in sorted(snapshot.left_out)]
        present = [section for section in self._sections if section not in absent]
        number = self._store.newest(without=absent)
        pieces = [piece for section in present for piece in pieces_of(section)]
        places = {piece: piece.location for piece in pieces}

        def check() -> None:
            self._check_external()
            self._store.check_whole(places)

        check()
        found = {_place(piece) for piece in pieces}
        files = {place: beneath.open_for_transfers(self._path(*place), read_only=True) for place in found}
        is_near = beneath.status(self._store.path(number)).st_dev == _device(snapshot.path.parent)
        may_link = is_near and not forbids_linking(number)
        base = self._replace(number, is_near)
        try:
            # The run may need the frozen file's content of them: that stays, though nothing names it.
            kept = {
                p: CopyRange(base.file, p.file_offset, p.nbytes, p.crc32, repr(p))
                for s in absent
                for p in pieces_of(s)
                if base is not None and is_near and _place(p) == (number, 0)
            }
            holes = [(p.file_offset, p.nbytes) for s in absent for p in pieces_of(s) if p not in kept]
            content = self._contents(snapshot, pieces, files, holes, list(kept.values()), check)
            previous = self._publications[-1] if self._publications else None
            publication = Publication(
                path=snapshot.path,
                ticket=snapshot.ticket,
                content=content,
                base=base,
                is_near=is_near,
                may_link=may_link,
                engine=self._engine,
                previous=previous,
                published=lambda: self._retention.published(snapshot.path, snapshot.keep),
            )
        except BaseException:
            if base is not None:
                self._store.published(number, base.close())
            raise
        self._publications.append(publication)
        publication.begin()
        if base is None:  # no space for a replacement: the files are written again as soon as this returns
            publication.join()

    def _contents(
        self,
        snapshot: Snapshot,
        pieces: Sequence[Page],
        files: Mapping[tuple[int, int | Path], _C.File],
        holes: list[tuple[int, int]],
        kept: list[CopyRange],
        check: Callable[[], None],
    ) -> SnapshotContents:
        everything = [
            CopyRange(
                files[_place(p)], p.file_offset, p.stored_bytes, p.crc32, repr(p), p.stored_offset - p.file_offset
            )
            for p in pieces
        ]
        return SnapshotContents(
            snapshot.tail,
            self._layout,
            {r.key: tensors_of(s) for r, s in zip(self._layout.records, self._sections, strict=True)},
            everything,
            frozenset(self._layout.records[index].key for index in snapshot.left_out),
            holes + [hole for p in pieces for hole in _behind_the_end(p)],  # [Note: external content]
            kept,
            check,
        )

    def _replace(self, number: int, is_near: bool) -> Base | None:
        """Replace file `number` with another one. Return None if there is no space, but the snapshot lies elsewhere."""
        base = Base(number, self._store.path(number))
        try:
            self._store.replace(number)
        except BaseException as error:
            base.close()
            if not is_near and isinstance(error, IoError) and error.errno == errno.ENOSPC:
                return None
            raise
        return base

    def _path(self, number: int, part: int | Path) -> Path:
        return part if isinstance(part, Path) else self._store.paths[number][part]


def _place(piece: Page) -> tuple[int, int | Path]:
    """Return the file with the newest content of `piece`, and its part: the drive, or the path of an external file."""
    if piece.location is None:
        raise InvariantError(f"{piece} is in no file yet")
    external = piece.section.plan.external
    return piece.location, external.path if external is not None and piece.location == EXTERNAL else piece.drive


def _behind_the_end(piece: Page) -> list[tuple[int, int]]:
    """Return the (offset, nbytes) of a piece that lie behind the end of its file. See [Note: external content]."""
    nbytes = piece.nbytes - piece.stored_bytes
    return [(piece.file_offset + piece.stored_bytes, nbytes)] if nbytes else []


def _device(directory: Path) -> int:
    try:
        return directory.stat().st_dev
    except FileNotFoundError:
        raise CheckpointError(f"directory {directory} was removed before the snapshot was written into it") from None


class _Places:
    """Finds the section of a tensor by its address: tensors have storages of their own."""

    def __init__(self, sections: Sequence[Section]) -> None:
        self._sections = sorted(sections, key=lambda section: section.memory.data_ptr())
        self._begins = [section.memory.data_ptr() for section in self._sections]

    def find(self, tensor: torch.Tensor) -> tuple[Section, int] | None:
        """Return the section that contains `tensor`, and its offset there in bytes; None if there is none."""
        address = tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.itemsize
        number = bisect.bisect_right(self._begins, address) - 1
        if number < 0 or address >= self._begins[number] + self._sections[number].plan.nbytes:
            return None
        return self._sections[number], address - self._begins[number]


def _locator(sections: Sequence[Section], layout: ContainerLayout) -> Locate:
    places = _Places(sections)
    keys = {section: record.key for section, record in zip(sections, layout.records, strict=True)}

    def locate(tensor: torch.Tensor) -> StorageRef | None:
        found = places.find(tensor)
        if found is None:
            return None
        section, offset = found
        return StorageRef(keys[section], offset // tensor.itemsize, untyped=section.plan.dtype is None)

    return locate

"""The store of a run: its swap files (page_files.py), and which of them has the newest content of each page.

All files have one layout, and two of them, the turns, alternate. A page's newest content is in file `location`; the last commit
names file `committed` for it. A page is written to the turn that the commit does not name for it, so that the committed content
stays whole during a step, at no extra I/O: a step rewrites what it touches anyway.

[Note: frozen files] A file that is published as a snapshot is frozen: it may be the user's too, by hard link, and the store never
writes to it again. Another takes its turn. It stays until it is published and no page needs it. On disk a frozen file is one
whose first part has no write permission or a second name, so that a run recognizes it after a crash.

[Note: turns of a resumed run] A commit names the turns too that have nothing of it. Such a file may have been published since, and
removed; and a run that is killed again and again before its next commit makes new turns each time, as all that the commit needs may
be frozen. So a resumed run takes as many of these files as it has turns for, where they are still there, and removes the others.

[Note: checksums] The engine's thread takes the CRC-32 of what it writes: a commit names it, and the engine compares every read with
it (`check_reads`), unless the page is torn ([Note: unannounced writes], frames.py). So bytes that a drive, memory or another
program has changed do not become part of a step, and no commit names a page that was found changed. Without `check_reads` only
reads for a resume or a rollback are compared, and in a run that never commits the optimizer's state, most of what a step writes,
has no checksum: the snapshot's thread takes it then, by reading. The costs are in docs/decisions/checks-of-reads.md.

[Note: external sections] A section may begin with the content of a file of the user's (ExternalBytes, layout.py). Its pages have
offsets in the swap files as others have, where they take no space: they are read from the user's file until they are changed, if
ever, and changed pages are written to the swap files. They have no checksums until then: the file's size and times stand for
those, and the first read of a page gives what later ones are compared with.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from swapper._C import File
from swapper.errors import InvariantError, IoError
from swapper.io import beneath
from swapper.io.drives import Drives
from swapper.io.engines import Engine, Transfer
from swapper.paging.section import EXTERNAL, Page, Section
from swapper.paging.store import page_files
from swapper.paging.store.page_files import Damages, ExternalFiles, FileStatus, SwapFile, as_changed, status_of

TURNS = 2
"""Files that alternate, so that one of them stays as the last commit has it."""


class Store:
    """Owns the swap files of one run. The engine outlives it.

    Args:
        drives: of the run; each page is assigned to one.
        headers: (file offset, bytes) of everything before the tail that is not payload.
        nbytes: size of a file, without a tail.
        existing: names of the files that a resumed run's commit names, by number; empty for a new run.
        first: number of the first file of a new run.
        turns: how many files alternate: TURNS, or 1 for a run that never commits. [Note: checksums]
        pieces: everything that is stored: pages, and resident sections as a whole.
        needed: numbers of those of `existing` that have content of a commit, and must be whole; None: all.
        check_reads: compare what is read with the checksum of what was written. [Note: checksums]

    Raises:
        IoError: the drive is full, or the directory refuses. Files that were created are removed again.
        CheckpointError: a file of a resumed run is missing or too short.
    """

    def __init__(
        self,
        engine: Engine,
        drives: Drives,
        headers: Iterable[tuple[int, bytes]],
        nbytes: int,
        existing: Mapping[int, str],
        turns: int,
        pieces: Sequence[Page],
        first: int = 0,
        needed: Collection[int] | None = None,
        check_reads: bool = True,
    ) -> None:
        self._engine = engine
        self._drives = drives
        self._commits = turns > 1
        self.nbytes = nbytes
        self._headers = list(headers)
        self._pieces = pieces
        for piece, drive in zip(pieces, drives.assign_to_drives([piece.nbytes for piece in pieces]), strict=True):
            piece.drive = drive
            if piece.section.plan.external is not None:
                piece.location = piece.committed = EXTERNAL
        self._files: dict[int, SwapFile] = {}
        self._external: ExternalFiles | None = None
        self._checks_reads = check_reads
        self._first_reads: dict[Page, Transfer] = {}  # tickets, of external pages
        self._damages = Damages()
        self._frozen: dict[int, FileStatus | None] = {}  # by number; None while it is being published, which changes it
        self._preferred: int | None = None
        self._spared: frozenset[int] = frozenset()
        self._written: dict[Page, None] = {}  # since the last commit, each once
        self._targets: dict[Page, int] = {}  # of the last write of each: the preference may change before it is done
        created: list[SwapFile] = []
        try:
            external = (piece.section.plan.external for piece in pieces)
            self._external = ExternalFiles(each.path for each in external if each is not None)
            for number, name in existing.items():
                if needed is None or number in needed:
                    self._open(number, name)
            for number, name in existing.items():  # [Note: turns of a resumed run]
                if number not in self._files and self._turn_count < turns and page_files.exists(drives, name):
                    self._open(number, name, is_needed=False)
            while self._turn_count < turns:
                number = max(self._files, default=first - 1) + 1
                self._files[number] = self.create_file(number)
                created.append(self._files[number])
        except BaseException:
            self.close()
            for file in created:
                file.remove()
            raise
        self._turns = sorted(self._files.keys() - self._frozen.keys())
        for number, name in existing.items():
            if number not in self._files:
                page_files.remove(drives, name)

    @property
    def names(self) -> dict[int, str]:
        """Names, by number, of the turns and of the files that have the newest content of some page."""
        needed = {piece.location for piece in self._pieces} | set(self._turns)
        return {number: file.name for number, file in self._files.items() if number in needed}

    @property
    def paths(self) -> dict[int, list[Path]]:
        """Paths of each file's parts, by number."""
        return {number: file.paths for number, file in self._files.items()}

    @property
    def io_mode(self) -> str:
        """How the files are opened: "direct", or "buffered" and the reason."""
        return self._files[self._turns[0]].io_mode

    def create_file(self, number: int) -> SwapFile:
        """Create a file of the store's layout, without payload yet."""
        return page_files.create(self._drives, f"turn-{number}.swap", self.nbytes, self._headers, self._pieces)

    def read(self, page: Page, address: int, after: Transfer | None = None) -> Transfer:
        """Submit a read of `page` into memory at `address`; returns its ticket. It fails on changed bytes. [Note: checksums]

        Args: as of `PageStore.read`.
        """
        if page.location == EXTERNAL and self._checks_reads and page.crc32 is None:
            return self._read_unknown(page, address, after)
        ticket = self._read(page, address, after, page.crc32 if self._checks_reads and not page.torn else None)
        self._damages.read_again(page, ticket)
        return ticket

    def read_now(self, piece: Page, address: int) -> int:
        """Read a page, or a resident section's piece, into memory at `address`, and return the CRC-32 of its bytes.

        Raises:
            ChecksumError: they were changed.
            IoError: they cannot be read.
        """
        ticket = self._read(piece, address, None, piece.crc32, checksum=True)
        try:
            ticket.wait()
        except IoError as error:
            raise self.explain(piece, error) from error
        return ticket.crc32

    def _read(
        self, page: Page, address: int, after: Transfer | None, expected: int | None, checksum: bool = False
    ) -> Transfer:
        file = self._file(page)
        offset, nbytes = page.stored_offset, page.stored_bytes
        return self._engine.read(file, offset, address, nbytes, after=after, checksum=checksum, expected=expected)

    def _file(self, page: Page) -> File:
        """Return the file that has the newest content of `page`, for transfers."""
        if page.location is None:
            raise InvariantError(f"{page} is read but was never written")
        if page.location == EXTERNAL and self._external is not None:
            return self._external.file(page)
        return self._files[page.location].of(page)

    def _read_unknown(self, page: Page, address: int, after: Transfer | None) -> Transfer:
        """Read an external page, whose checksum is known from its first read at best. [Note: external sections]"""
        first = self._first_reads.get(page)
        if first is not None and first.done and first.error is None:
            return self._read(page, address, after, first.crc32)
        self._first_reads[page] = ticket = self._read(page, address, after, None, checksum=True)
        return ticket

    def explain(self, page: Page, error: IoError) -> IoError:
        """Return the error to raise for a read of `page` that failed with `error`.

        That is a ChecksumError if its bytes were changed; then `check_whole` raises it too.
        """
        changed = as_changed(page, error, self._remedy(page))
        if changed is None:
            return error
        self._damages.note(page, changed)
        return changed

    def _remedy(self, page: Page) -> str:
        if page.location == EXTERNAL:
            return "Put the file back, with its time, and begin again with resume='auto'"
        if not self._commits:
            return "Close the manager and resume from a snapshot that was taken before"
        if page.location != page.committed:
            return (
                "The last commit does not need them: close the manager and begin again with resume='auto', or, if it is said that "
                "something else is lost there, from a snapshot"
            )
        if page.location in self._frozen and self._spared:
            return "Close the manager and begin again with resume='auto', which resumes from the commit before"
        return "The last commit needs them: close the manager and resume from a snapshot, with resume='discard'"

    def check_whole(self, places: Mapping[Page, int | None] | None = None) -> None:
        """Check what is known of the files.

        Args:
            places: the file of each page; None: those that have the newest content.

        Raises:
            ChecksumError: one of these pages was found changed, or a turn was cut off.
        """
        self._damages.check(places)
        for file in [self._files[number] for number in self._turns]:
            file.check_size(self.nbytes)

    def file_of(self, page: Page) -> File | None:
        """Return the file that has the newest content of `page`, at `page.stored_offset`; None if it was never written."""
        if page.location == EXTERNAL and self._external is not None:
            return self._external.file_of(page)
        return None if page.location is None else self._files[page.location].of(page)

    def write(self, page: Page, address: int) -> Transfer:
        """Submit a write of `page` from memory at `address`; returns its ticket, which carries the CRC-32 if one is taken."""
        self._targets[page] = self._target(page)
        file = self._files[self._targets[page]].of(page)
        return self._engine.write(file, page.file_offset, address, page.nbytes, checksum=self._takes_checksum(page))

    def written_to(self, page: Page) -> File:
        """Return the file that the last write of `page` goes to, at `page.file_offset`."""
        return self._files[self._targets[page]].of(page)

    def written(self, page: Page, ticket: Transfer) -> None:
        """Note that `ticket`, a write of `page`, is done."""
        page.location = self._targets[page]
        page.crc32 = ticket.crc32 if self._takes_checksum(page) else None
        self._damages.written(page)
        self._written[page] = None

    def _takes_checksum(self, page: Page) -> bool:
        """Return whether a write of the page is checksummed. [Note: checksums]"""
        return self._checks_reads or self._commits or page.section.resident or page.section.plan.family != "state"

    def commit(self, spared: frozenset[int] = frozenset()) -> None:
        """Note a commit of all that is written. No write is in flight. `spared`: files of the commit before, see `spare`."""
        for page in self._written:
            page.committed = page.location
            page.committed_crc32 = page.crc32
        self._written.clear()
        self.spare(spared)
        self.release_frozen()

    def roll_back(self, pieces: Iterable[Page]) -> None:
        """Return `pieces` to the content that the last commit names. No write of them is in flight."""
        for piece in pieces:
            piece.location, piece.crc32, piece.torn = piece.committed, piece.committed_crc32, False
            self._written.pop(piece, None)
            self._targets.pop(piece, None)

    def take_over(self, pieces: Iterable[Page], earlier: Iterable[Page]) -> None:
        """Copy the locations and checksums of `earlier`, the same pieces in an earlier store of the same files."""
        for piece, known in zip(pieces, earlier, strict=True):
            piece.location, piece.crc32 = known.location, known.crc32
            piece.committed, piece.committed_crc32 = known.committed, known.committed_crc32

    # --- publishing a file ----------------------------------------------------------------------------------------

    def newest(self, without: Collection[Section] = ()) -> int:
        """Return the number of the turn that has, or is about to get, the newest content of the most bytes.

        Sections in `without` do not count.
        """
        nbytes = dict.fromkeys(self._turns, 0)
        for piece in self._pieces:
            if piece.section in without:
                continue
            place = self._target(piece) if piece.section.resident else self._targets.get(piece, piece.location)
            if place in nbytes:
                nbytes[place] += piece.nbytes
        return max(nbytes, key=lambda number: nbytes[number])

    def path(self, number: int) -> Path:
        """Return the path of the first part of file `number`, which can become a snapshot."""
        return self._files[number].path

    def prefer(self, number: int | None) -> None:
        """Write to file `number`, until a call with None, all pages that the last commit does not name there."""
        self._preferred = number

    def spare(self, numbers: frozenset[int]) -> None:
        """Do not write to these files until the next commit, unless a page has no other."""
        self._spared = numbers

    def leave_spared(self) -> None:
        """Have a file that is not spared for every page that may be written, from now on.

        Raises:
            IoError: there is no room for another; nothing is changed.
        """
        committed = {piece.committed for piece in self._pieces}
        spared = [number for number in self._turns if number in self._spared]
        if spared and not set(self._turns) - committed - self._spared:
            self.replace(spared[0])
            self.published(spared[0], self._look(spared[0]) or (-1, 0, 0))

    def replace(self, number: int) -> None:
        """Freeze file `number`, which is about to be published, and create another for its turn. [Note: frozen files]

        Raises:
            IoError: there is no room for another; nothing is changed.
        """
        successor = max(self._files) + 1
        self._files[successor] = self.create_file(successor)
        self._turns = sorted({*self._turns, successor} - {number})
        self._frozen[number] = None
        self.freeze(number)

    def freeze(self, number: int) -> None:
        """Mark file `number` on disk as not to be written, also after a crash."""
        beneath.make_read_only(self.path(number))

    def published(self, number: int, status: FileStatus) -> None:
        """Note that file `number` was published, or could not be. It may be removed now; `status` shows later changes."""
        self._frozen[number] = status

    def changed_frozen(self) -> dict[int, Path]:
        """Return the published files, by number, that the run still needs and that were changed."""
        return {
            number: self.path(number)
            for number, expected in self._frozen.items()
            if expected is not None and expected != self._look(number)
        }

    def accept(self, number: int) -> bool:
        """Accept the changed file `number`: what the run needs of it is whole. Only later changes are reported from now on.

        Returns whether more than its names and permissions seems to have changed.
        """
        before, self._frozen[number] = self._frozen[number], self._look(number) or (-1, 0, 0)
        return before is None or before[:2] != self._frozen[number][:2]  # type: ignore[index]

    def _look(self, number: int) -> FileStatus | None:
        try:
            return status_of(self.path(number))
        except FileNotFoundError:
            return None

    def release_frozen(self) -> None:
        """Remove the published files that no page needs any more. A snapshot keeps its own name."""
        if not self._frozen:
            return
        needed = {piece.committed for piece in self._pieces} | self._spared
        needed |= {piece.location for piece in self._pieces if not piece.section.resident}  # the others are in memory
        needed |= {number for number, status in self._frozen.items() if status is None}
        for number in self._frozen.keys() - needed:
            self._files.pop(number).remove()
            del self._frozen[number]

    def sync(self) -> None:
        """Sync all files to their drives."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        if self._external is not None:
            self._external.close()
        for file in self._files.values():
            file.close()

    def _target(self, page: Page) -> int:
        preferred = self._preferred
        if preferred in self._turns and preferred != page.committed and preferred not in self._spared:
            return preferred
        turns = [number for number in self._turns if number != page.committed]
        for number in turns:
            if number not in self._spared:
                return number
        return turns[0]

    @property
    def _turn_count(self) -> int:
        return len(self._files) - len(self._frozen)

    def _open(self, number: int, name: str, is_needed: bool = True) -> None:
        """Open a file of a resumed run. [Note: frozen files]"""
        self._files[number], frozen = page_files.reopen(self._drives, name, self.nbytes, self._headers, is_needed)
        if frozen is not None:
            self._frozen[number] = frozen


def first_free_number(directory: Path) -> int:
    """Return a number such that no swap file of `directory` has it or a higher one."""
    names = [re.fullmatch(r"turn-(\d+)\.swap", path.name) for path in beneath.files(directory)]
    return max((int(name[1]) for name in names if name is not None), default=-1) + 1

"""The store: the swap files, and which of them has the newest content of each page. Each has a part on every drive (swap_file.py).

All files have one layout, and two of them are written in turns. A page's newest content is in file `location`; the last commit
names file `committed` for it. A page is written to the turn that the commit does not name for it, so that what the commit names
stays whole while a step is under way, at no extra I/O: a step rewrites what it touches anyway.

[Note: frozen files] A file that is published as a snapshot is frozen: it may be the user's too, by hard link, and the store never
writes to it again. Another takes its turn. It stays until it is published and no page needs it. On disk a frozen file is one
whose first part has no write permission or a second name, so that a run which goes on after a crash knows it without being told.

[Note: checksums] What is written has its CRC-32 taken in passing: a commit names it. In a run that never commits only a snapshot
would use it, and most of what is written is the optimizer's state, in each step: there the snapshot's own thread takes those
checksums, by reading. A step whose computing keeps all processors busy is one to two percent shorter without them.

[Note: what is lent] A section may have been lent its content by a file of the user's (Lent, layout.py). Its pages have their place
in the swap files as others have, which takes no space: they are read from that file until they are changed, if ever, and what
is changed is written to its place. Nobody has their checksums until then; the file's size and time stand for them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swapper import beneath
from swapper.core import swap_file
from swapper.core.lent import LentFiles
from swapper.core.section import LENT, Page, Section
from swapper.core.swap_file import SwapFile
from swapper.drives import Drives
from swapper.errors import InvariantError

TURNS = 2
"""How many files are written in turns, so that one of them stays as the last commit has it."""


class Store:
    """Owns the swap files of one run. The engine outlives it.

    Args:
        engine: does the transfers.
        drives: of the run; each page is dealt to one.
        headers: (file offset, bytes) of everything before the tail that is not payload.
        nbytes: size of a file, without a tail.
        existing: names of the files of a run that goes on, by number; empty for a new run.
        first: number of the first file of a new run.
        turns: how many files are written in turns: TURNS, or 1 for a run that never commits. [Note: checksums]
        pieces: everything that is stored: pages, and resident sections as a whole.

    Raises:
        IoError: the drive is full, or the directory refuses. Files that were created are removed again.
        CheckpointError: a file of a run that goes on is missing or too short.
    """

    def __init__(
        self,
        engine: Any,
        drives: Drives,
        headers: Iterable[tuple[int, bytes]],
        nbytes: int,
        existing: Mapping[int, str],
        turns: int,
        pieces: Sequence[Page],
        first: int = 0,
    ) -> None:
        self._engine = engine
        self._drives = drives
        self._commits = turns > 1
        self.nbytes = nbytes
        self._headers = list(headers)
        self._pieces = pieces
        for piece, drive in zip(pieces, drives.deal([piece.nbytes for piece in pieces]), strict=True):
            piece.drive = drive
            if piece.section.plan.lent is not None:
                piece.location = piece.committed = LENT
        self._files: dict[int, SwapFile] = {}
        self._lent: LentFiles | None = None
        # By number: size and time of last change; None while it is being published, which changes both.
        self._frozen: dict[int, tuple[int, int] | None] = {}
        self._preferred: int | None = None
        self._spared: frozenset[int] = frozenset()
        self._written: dict[Page, None] = {}  # since the last commit, each once
        self._targets: dict[Page, int] = {}  # of the last write of each: what is preferred may change before it is done
        created: list[SwapFile] = []
        try:
            self._lent = LentFiles(
                engine, [p.section.plan.lent.path for p in pieces if p.section.plan.lent is not None]
            )
            for number, name in existing.items():
                self._open(number, name)
            while len(self._files) - len(self._frozen) < turns:
                number = max(self._files, default=first - 1) + 1
                self._files[number] = self.create_file(number)
                created.append(self._files[number])
        except BaseException:
            self.close()
            for file in created:
                file.remove()
            raise
        self._turns = sorted(self._files.keys() - self._frozen.keys())

    @property
    def names(self) -> dict[int, str]:
        """Names, by number, of the files that are written in turns and of those that have the newest content of something."""
        needed = {piece.location for piece in self._pieces} | set(self._turns)
        return {number: file.name for number, file in self._files.items() if number in needed}

    @property
    def paths(self) -> dict[int, list[Path]]:
        """All files, by number: their parts by drive."""
        return {number: file.paths for number, file in self._files.items()}

    @property
    def io_mode(self) -> str:
        """How the files are opened: "direct", or "buffered" and the reason."""
        return self._files[self._turns[0]].io_mode

    def create_file(self, number: int) -> SwapFile:
        """Create a file of the store's layout: its space allocated, its headers written, its payload still empty."""
        return swap_file.create(self._drives, f"turn-{number}.swap", self.nbytes, self._headers, self._pieces)

    def read(self, page: Page, address: int, after: Any = None, checksum: bool = False) -> Any:
        """Submit a read of `page`, or of a resident section's piece, into memory at `address`; returns its ticket."""
        if page.location is None:
            raise InvariantError(f"{page} is read but was never written")
        if page.location == LENT and self._lent is not None:
            return self._lent.read(page, address, after, checksum)
        file = self._files[page.location].of(page)
        return self._engine.read(file, page.file_offset, address, page.nbytes, after=after, checksum=checksum)

    def file_of(self, page: Page) -> Any:
        """Return the file that has the newest content of `page`, at `page.stored_offset`; None if it was never written."""
        if page.location == LENT and self._lent is not None:
            return self._lent.file_of(page)
        return None if page.location is None else self._files[page.location].of(page)

    def write(self, page: Page, address: int) -> Any:
        """Submit a write of `page` from memory at `address`; returns its ticket, which carries the CRC-32 if one is taken."""
        self._targets[page] = self._target(page)
        file = self._files[self._targets[page]].of(page)
        return self._engine.write(file, page.file_offset, address, page.nbytes, checksum=self._takes_checksum(page))

    def written(self, page: Page, ticket: Any) -> None:
        """Note that `ticket`, a write of `page`, is done."""
        page.location = self._targets[page]
        page.crc32 = ticket.crc32 if self._takes_checksum(page) else None
        self._written[page] = None

    def _takes_checksum(self, page: Page) -> bool:
        """[Note: checksums]"""
        return self._commits or page.section.resident or page.section.plan.family != "state"

    def commit(self, spared: frozenset[int] = frozenset()) -> None:
        """What is written is what the commit names from now on. Call when no write is in flight.

        Args:
            spared: files that the commit before needs, and that are to `spare` from now on.
        """
        for page in self._written:
            page.committed = page.location
            page.committed_crc32 = page.crc32
        self._written.clear()
        self.spare(spared)
        self.release_frozen()

    def roll_back(self, pieces: Iterable[Page]) -> None:
        """What the last commit names of `pieces` is the newest content again. Call when no write of them is in flight."""
        for piece in pieces:
            piece.location, piece.crc32 = piece.committed, piece.committed_crc32
            self._written.pop(piece, None)
            self._targets.pop(piece, None)

    def take_over(self, pieces: Iterable[Page], earlier: Iterable[Page]) -> None:
        """`pieces` are divided as `earlier` were, of a store that had these very files: what that one knew of them is so."""
        for piece, known in zip(pieces, earlier, strict=True):
            piece.location, piece.crc32 = known.location, known.crc32
            piece.committed, piece.committed_crc32 = known.committed, known.committed_crc32

    # --- publishing a file ----------------------------------------------------------------------------------------

    def newest(self, without: Collection[Section] = ()) -> int:
        """Return the number of the turn that has, or is about to get, the newest content of the most bytes.

        Args:
            without: sections that do not count.
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
        """Until this is called with None, write to file `number` whatever the last commit does not have there."""
        self._preferred = number

    def spare(self, numbers: frozenset[int]) -> None:
        """Until the next commit leave these files as they are, as far as there are others to write to."""
        self._spared = numbers

    def leave_spared(self) -> None:
        """From now on there is another file than those that are spared for every page that may be written.

        Raises:
            IoError: there is no room for another; nothing is changed.
        """
        committed = {piece.committed for piece in self._pieces}
        spared = [number for number in self._turns if number in self._spared]
        if spared and not set(self._turns) - committed - self._spared:
            self.replace(spared[0])
            self.published(spared[0], self._look(spared[0]) or (-1, 0))

    def replace(self, number: int) -> None:
        """Have another file take the turn of file `number`, which is about to be published. [Note: frozen files]

        Raises:
            IoError: there is no room for another; nothing is changed.
        """
        successor = max(self._files) + 1
        self._files[successor] = self.create_file(successor)
        self._turns = sorted({*self._turns, successor} - {number})
        self._frozen[number] = None
        self.freeze(number)

    def freeze(self, number: int) -> None:
        """Have a run that goes on after a crash know that file `number` is not to be written."""
        beneath.make_read_only(self.path(number))

    def published(self, number: int, status: tuple[int, int]) -> None:
        """File `number` was published, or could not be: from now on it may go, and until then nobody may change it.

        Args:
            status: its size in bytes and the time of its last change in nanoseconds.
        """
        self._frozen[number] = status

    def changed_frozen(self) -> dict[int, Path]:
        """Return the published files, by number, that the run still needs and that were changed by someone."""
        return {
            number: self.path(number)
            for number, expected in self._frozen.items()
            if expected is not None and expected != self._look(number)
        }

    def accept(self, number: int) -> None:
        """What the run needs of the changed file `number` is whole: notice only what is changed from now on."""
        self._frozen[number] = self._look(number) or (-1, 0)

    def _look(self, number: int) -> tuple[int, int] | None:
        try:
            status = beneath.status(self.path(number))
        except FileNotFoundError:
            return None
        return status.st_size, status.st_mtime_ns

    def release_frozen(self) -> None:
        """Let go the frozen files that are published and that no page needs any more. The snapshot keeps its own name."""
        if not self._frozen:
            return
        needed = {piece.committed for piece in self._pieces} | self._spared
        needed |= {piece.location for piece in self._pieces if not piece.section.resident}  # the others are in memory
        needed |= {number for number, status in self._frozen.items() if status is None}
        for number in self._frozen.keys() - needed:
            self._files.pop(number).remove()
            del self._frozen[number]

    def sync(self) -> None:
        """Have the drive keep what was written to it."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        if self._lent is not None:
            self._lent.close()
        for file in self._files.values():
            file.close()

    def _target(self, page: Page) -> int:
        preferred = self._preferred
        if preferred in self._turns and preferred != page.committed and preferred not in self._spared:
            return preferred
        turns = [number for number in self._turns if number != page.committed]
        return next((number for number in turns if number not in self._spared), turns[0])

    def _open(self, number: int, name: str) -> None:
        """Open a file of a run that goes on. [Note: frozen files]"""
        self._files[number], frozen = swap_file.reopen(self._drives, name, self.nbytes, self._headers)
        if frozen is not None:
            self._frozen[number] = (frozen.st_size, frozen.st_mtime_ns)


def first_free_number(directory: Path) -> int:
    """Return a number such that no swap file of `directory` has it or a higher one."""
    names = [re.fullmatch(r"turn-(\d+)\.swap", path.name) for path in beneath.files(directory)]
    return max((int(name[1]) for name in names if name is not None), default=-1) + 1

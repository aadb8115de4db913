"""Contents that the drive must keep, whatever the pager writes next: those of the last commit and of snapshots."""

from __future__ import annotations

import zlib

from simulated_engine import File, SimulationError
from simulated_store import SimulatedStore, part_of

from swapper.paging.section import Page


class KeptContents:
    """Commits and publishes as durability/committer.py and snapshot.py do, and knows from then on what must not change.

    Attributes:
        published: snapshots that share a swap file, with their content.
    """

    def __init__(self, pages: list[Page], store: SimulatedStore) -> None:
        self._pages = pages
        self._store = store
        self._committed: list[tuple[File, bytes] | None] = [None] * len(pages)  # by the last commit
        self._copying: tuple[int, File, list[tuple[Page, File, bytes]]] | None = None
        self._at_offset = {page.file_offset: page for page in pages}
        self.published: list[tuple[File, bytes]] = []

    def commit(self) -> None:
        """Commit what the store has: all writes are done."""
        self.end_copy()
        self._store.commit()
        for page in self._pages:
            if page.committed != page.location:
                raise SimulationError(f"{page} is not committed")
            if page.location is not None:
                file = self._store.file(page.location)
                self._committed[page.index] = file, part_of(file, page)
                if page.crc32 != zlib.crc32(part_of(file, page)):
                    raise SimulationError(f"{page} is committed with the checksum of something else")

    def publish(self) -> None:
        """What was committed just now: begin to make its swap file a snapshot."""
        number = self._store.newest()
        runs = [
            (page, self._store.file(page.location), part_of(self._store.file(page.location), page))
            for page in self._pages
            if page.location is not None
        ]
        file = self._store.file(number)
        self._store.replace(number)
        self._copying = number, file, runs

    def end_copy(self) -> None:
        """What a snapshot's thread does, as late as it may."""
        if self._copying is None:
            return
        number, file, runs = self._copying
        self._copying = None
        for page, source, expected in runs:
            if part_of(source, page) != expected:
                raise SimulationError(f"{page} was changed in {source.path} before the snapshot had it")
            file.bytes[page.file_offset : page.file_offset + page.nbytes] = expected
        self._store.published(number, (0, 0, 0))
        self.published.append((file, bytes(file.bytes)))

    def check_target(self, file: File, offset: int) -> None:
        """Raise if a write to this place would change what must be kept."""
        committed = self._committed[self._at_offset[offset].index]
        if committed is not None and committed[0] is file:
            raise SimulationError(f"{self._at_offset[offset]} is written to the file that the last commit names")
        if file.is_frozen:
            raise SimulationError(f"{self._at_offset[offset]} is written to a snapshot")

    def check(self) -> None:
        """Raise unless everything is as it was."""
        if any(file.bytes != content for file, content in self.published):
            raise SimulationError("a snapshot was changed")
        for page, committed in zip(self._pages, self._committed, strict=True):
            if committed is not None and part_of(committed[0], page) != committed[1]:
                raise SimulationError(f"what the last commit names of {page} was changed")

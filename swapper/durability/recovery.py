"""Resumes from a committed step: sections find their content through the commit record.

Nothing is copied: paged sections only learn their locations, resident ones are read. After a restart of the system, the
drive's content is compared with the checksums first, since a crash may have lost writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from swapper.durability.commit import CommitRecord, boot_id
from swapper.errors import CheckpointError, ChecksumError
from swapper.paging.host_memory import Pool
from swapper.paging.section import Page, Section
from swapper.paging.store.swap_files import Store

REMEDY = "Say resume='discard' and load the last snapshot"


def follow_placement(record: CommitRecord, params: str, optimizer_state: str) -> tuple[str, str]:
    """Return the run's placement, if the user leaves it open.

    Raises:
        CheckpointError: the user wants another one.
    """
    wishes = {"param": ("params", params), "state": ("optimizer_state", optimizer_state)}
    for family, (option, wish) in wishes.items():
        place = record.placement[family]
        if wish not in ("auto", place):
            raise CheckpointError(
                f"{option}={wish!r}, but the directory's run has {option}={place!r}: leave it out to resume as it was, "
                "or take a snapshot, pass resume='discard' and load it"
            )
    return record.placement["param"], record.placement["state"]


def page_bytes_of(record: CommitRecord) -> int | None:
    """Return the size of the run's pages, or None if none of its sections has more than one."""
    sizes = {section.piece_bytes for section in record.sections if len(section.files) > 1}
    return max(sizes, default=None)


def restore(record: CommitRecord, sections: Sequence[Section], store: Store, pool: Pool) -> None:
    """Restore every section's content as of the commit.

    Raises:
        CheckpointError: a file's content differs from the commit.
        IoError: a file cannot be read.
    """
    for section, places in zip(sections, record.sections, strict=True):
        pieces = [section.piece] if section.resident else section.pages
        if [piece.nbytes for piece in pieces[:1]] != [places.piece_bytes] or len(pieces) != len(places.files):
            raise CheckpointError(f"{section.plan.name} is divided differently than in the run. {REMEDY}")
        for piece, file, crc32 in zip(pieces, places.files, places.crc32s, strict=True):
            piece.location = piece.committed = file
            piece.crc32 = piece.committed_crc32 = crc32 if crc32 >= 0 else None
        if section.resident:
            _read(section.piece, store, section.memory.data_ptr())
    if record.boot_id != boot_id():
        _verify([page for section in sections for page in section.pages], store, pool)


def _verify(pages: Sequence[Page], store: Store, pool: Pool) -> None:
    """Read every page that has a checksum, and compare. Uses one free frame."""
    frame = pool.take()
    if frame is None:
        return
    try:
        for page in [page for page in pages if page.crc32 is not None]:
            _read(page, store, pool.address(frame))
    finally:
        pool.give(frame)


def _read(piece: Page, store: Store, address: int) -> None:
    try:
        store.read_now(piece, address)
    except ChecksumError as error:
        raise CheckpointError(f"{piece} does not have the content of the commit ({error}). {REMEDY}") from error

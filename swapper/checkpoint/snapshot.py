"""Publishing a snapshot: the whole state as one container under the user's name, and no byte that is on the drive copied.

What is in the newest swap file stays there; pages that another file has, and what is in memory, are brought over; the tail is
written; and the file is published by reflink, which shares its bytes until either is changed, or else by hard link, after which
the run never writes to it again ([Note: frozen files], core/store.py). On another filesystem it is copied through the engine.

The file appears under its name when it is whole and synced, or not at all; an existing file is never replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swapper import _C
from swapper.checkpoint.container import ContainerLayout, StorageRef, build_tail
from swapper.core.pager import Pager
from swapper.core.schedule import Access
from swapper.core.section import Page, Section
from swapper.core.store import Store
from swapper.errors import CheckpointError

RESIDENT_PIECE_BYTES = 16 << 20
IN_FLIGHT_PAGES = 4
FICLONE = 0x40049409
"""ioctl_ficlone(2): make a file share another one's bytes."""


@dataclass(frozen=True)
class Publisher:
    """Publishes snapshots of one run.

    Attributes:
        sections: the payload records, one each, in order.
        layout: of the container.
        pager: brings pages in.
        pool_address: address of a frame.
        engine: does the transfers.
        store: has the swap files.
    """

    sections: Sequence[Section]
    layout: ContainerLayout
    pager: Pager
    pool_address: Callable[[int], int]
    engine: Any
    store: Store

    def publish(self, path: Path, content: dict[str, Any]) -> None:
        """Publish `content` as `path`. Call when no write is in flight and, where the run commits, all is committed.

        Args:
            path: must not exist; its directory must.
            content: what torch.load shall return. Tensors in the sections are only looked at for their place.

        Raises:
            CheckpointError: `path` exists, or its directory does not.
            IoError: a transfer failed, or the drive is full. Nothing is left under `path`.
        """
        if os.path.lexists(path):
            raise CheckpointError(f"{path} exists already: snapshots never overwrite; choose another name or remove it")
        if not path.parent.is_dir():
            raise CheckpointError(f"directory {path.parent} does not exist: create it first")
        temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            temporary.unlink(missing_ok=True)  # of an earlier process of the same number
        except OSError as error:
            raise CheckpointError(
                f"cannot write to {path.parent}: {error.strerror}. Choose a directory that you may write to"
            ) from error
        try:
            if not self._share(temporary, content):
                self._copy(temporary, content)
            _publish_name(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _share(self, temporary: Path, content: dict[str, Any]) -> bool:
        """Make `temporary` a snapshot that has its payload in common with a swap file. False if this cannot be had here."""
        self.store.release_frozen()
        number = self.store.newest()
        source = self.store.path(number)
        if source.stat().st_dev != temporary.parent.stat().st_dev:
            return False
        reflinked = _can_reflink(source, temporary)
        if not reflinked:
            try:
                os.link(source, temporary)
            except OSError:  # no hard links here, or not by this user
                return False
        checksums = self._bring_over(number)
        tail = build_tail(self.layout, content, _locator(self.sections, self.layout), checksums)
        if reflinked:
            _reflink(source, temporary)
        else:
            self.store.replace(number)
        _append_tail(temporary, self.layout.tail_offset, tail)
        if not reflinked:
            self.store.freeze(number)
        return True

    def _bring_over(self, number: int) -> dict[str, int]:
        """Have everything in file `number`; returns the CRC-32 of each record's payload, by key."""
        self.store.prefer(number)
        try:
            for section in self.sections:
                for page in section.pages:
                    if page.location != number:
                        access = Access(None, (page.index,), writes=frozenset({page.index}))
                        self.pager.acquire(access)
                        self.pager.release(access, access.writes)
            resident = [section.piece for section in self.sections if section.resident]
            tickets = [self.store.write(piece, piece.section.memory.data_ptr()) for piece in resident]
            self.pager.flush()
            _wait_for_all(tickets)
            for piece, ticket in zip(resident, tickets, strict=True):
                self.store.written(piece, ticket)
        finally:
            self.store.prefer(None)
        return {r.key: _checksum(s) for r, s in zip(self.layout.records, self.sections, strict=True)}

    def _copy(self, temporary: Path, content: dict[str, Any]) -> None:
        """Make `temporary` a snapshot by copying everything."""
        file = self.store.create_file(temporary)
        try:
            copier = _Copier(file, self.pager, self.pool_address, self.engine)
            checksums = {r.key: copier.copy(s) for r, s in zip(self.layout.records, self.sections, strict=True)}
        finally:
            file.close()
        tail = build_tail(self.layout, content, _locator(self.sections, self.layout), checksums)
        _append_tail(temporary, self.layout.tail_offset, tail)


class _Copier:
    """Copies sections into a snapshot file, a few pages in flight."""

    def __init__(self, file: Any, pager: Pager, pool_address: Callable[[int], int], engine: Any) -> None:
        self._file = file
        self._pager = pager
        self._pool_address = pool_address
        self._engine = engine

    def copy(self, section: Section) -> int:
        """Copy one section; returns the CRC-32 of its payload."""
        return self._copy_resident(section) if section.resident else self._copy_paged(section)

    def _copy_resident(self, section: Section) -> int:
        tickets: deque[Any] = deque()
        base = section.memory.data_ptr()
        for begin in range(0, section.plan.nbytes, RESIDENT_PIECE_BYTES):
            nbytes = min(RESIDENT_PIECE_BYTES, section.plan.nbytes - begin)
            tickets.append(self._write(section.file_offset + begin, base + begin, nbytes))
        return self._combine(tickets)

    def _copy_paged(self, section: Section) -> int:
        checksum = 0
        in_flight: deque[tuple[Access, Page, Any]] = deque()
        try:
            for page in section.pages:
                if len(in_flight) == IN_FLIGHT_PAGES:
                    checksum = self._finish(in_flight, checksum)
                access = Access(None, (page.index,))
                self._pager.acquire(access)
                try:
                    address = self._pool_address(page.frame)  # type: ignore[arg-type]
                    ticket = self._write(page.file_offset, address, page.nbytes)
                except BaseException:
                    self._pager.release(access)
                    raise
                in_flight.append((access, page, ticket))
            while in_flight:
                checksum = self._finish(in_flight, checksum)
        except BaseException:
            for access, _, ticket in in_flight:
                _drain(ticket)
                self._pager.release(access)
            raise
        return checksum

    def _finish(self, in_flight: deque[tuple[Access, Page, Any]], checksum: int) -> int:
        access, page, ticket = in_flight.popleft()
        try:
            ticket.wait()
        finally:
            _drain(ticket)
            self._pager.release(access)
        if page.crc32 is not None and page.crc32 != ticket.crc32:
            raise CheckpointError(
                f"{page} does not have the checksum with which it was written: the drive or memory changed its content. "
                "Do not trust this run; go back to an earlier snapshot"
            )
        return int(_C.crc32_combine(checksum, ticket.crc32, page.nbytes))

    def _write(self, offset: int, address: int, nbytes: int) -> Any:
        return self._engine.write(self._file, offset, address, nbytes, checksum=True)

    def _combine(self, tickets: Sequence[Any]) -> int:
        _wait_for_all(tickets)
        checksum = 0
        for ticket in tickets:
            checksum = _C.crc32_combine(checksum, ticket.crc32, ticket.nbytes)
        return checksum


def _wait_for_all(tickets: Sequence[Any]) -> None:
    """Wait for every ticket, also where one has failed: the others still use their memory. Raises the first error."""
    error: BaseException | None = None
    for ticket in tickets:
        try:
            ticket.wait()
        except BaseException as failure:
            error = error or failure
            _drain(ticket)
    if error is not None:
        raise error


def _drain(ticket: Any) -> None:
    """Wait until the engine has let go of the ticket's memory, well or not."""
    while not ticket.done:
        with contextlib.suppress(Exception):
            ticket.wait()


def _checksum(section: Section) -> int:
    """Return the CRC-32 of a section's payload, from those of its pieces."""
    checksum = 0
    for piece in [section.piece] if section.resident else section.pages:
        if piece.crc32 is None:
            raise CheckpointError(f"{piece} has no checksum yet: a bug in swapper")
        checksum = _C.crc32_combine(checksum, piece.crc32, piece.nbytes)
    return checksum


def _can_reflink(source: Path, temporary: Path) -> bool:
    try:
        _reflink(source, temporary)
    except OSError:
        temporary.unlink(missing_ok=True)
        return False
    return True


def _reflink(source: Path, target: Path) -> None:
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with source.open("rb") as file:
            fcntl.ioctl(descriptor, FICLONE, file.fileno())
    finally:
        os.close(descriptor)


def _append_tail(path: Path, tail_offset: int, tail: bytes) -> None:
    """Write the tail, cut off what was behind it, and make the whole file durable."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        view = memoryview(tail)
        offset = tail_offset
        while view:
            done = os.pwrite(descriptor, view, offset)
            view, offset = view[done:], offset + done
        os.ftruncate(descriptor, offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _locator(sections: Sequence[Section], layout: ContainerLayout) -> Callable[[torch.Tensor], StorageRef | None]:
    keys = {s.memory.data_ptr(): r.key for s, r in zip(sections, layout.records, strict=True)}

    def locate(tensor: torch.Tensor) -> StorageRef | None:
        key = keys.get(tensor.untyped_storage().data_ptr())
        return None if key is None else StorageRef(key, int(tensor.storage_offset()))

    return locate


def _publish_name(temporary: Path, path: Path) -> None:
    """Give the file its name, unless someone took it meanwhile, and make the name durable."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise CheckpointError(f"{path} appeared while the snapshot was written: it was left as it is") from None
    except OSError:  # no hard links here
        if os.path.lexists(path):
            raise CheckpointError(f"{path} appeared while the snapshot was written: it was left as it is") from None
        temporary.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

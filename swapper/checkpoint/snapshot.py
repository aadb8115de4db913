"""Publishing a snapshot: the whole state as one container under the user's name, by a copy through the engine.

Paged sections are read into frames and written from there; resident ones are written from where they are. The file
appears under its name when it is whole and synced, or not at all; an existing file is never replaced.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from swapper import _C
from swapper.checkpoint.container import ContainerLayout, StorageRef, build_tail
from swapper.core.pager import Pager
from swapper.core.schedule import Access
from swapper.core.section import Page, Section
from swapper.errors import CheckpointError

RESIDENT_PIECE_BYTES = 16 << 20
IN_FLIGHT_PAGES = 4


def publish(
    path: Path,
    content: dict[str, Any],
    sections: Sequence[Section],
    layout: ContainerLayout,
    pager: Pager,
    pool_address: Callable[[int], int],
    engine: Any,
    create_file: Callable[[Path], Any],
) -> None:
    """Write `content` to `path` as a container.

    Args:
        path: must not exist; its directory must.
        content: what torch.load shall return. Tensors in `sections` are only looked at for their place.
        sections: the payload records, one each, in order.
        layout: of the container.
        pager: brings pages in.
        pool_address: address of a frame.
        engine: does the transfers.
        create_file: creates a file of the container's layout, headers written.

    Raises:
        CheckpointError: `path` exists, or its directory does not.
        IoError: a transfer failed, or the drive is full. Nothing is left under `path`.
    """
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists already: snapshots never overwrite; choose another name or remove it")
    if not path.parent.is_dir():
        raise CheckpointError(f"directory {path.parent} does not exist: create it first")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    temporary.unlink(missing_ok=True)  # of an earlier process of the same number
    try:
        file = create_file(temporary)
        try:
            copier = _Copier(file, pager, pool_address, engine)
            checksums = {
                record.key: copier.copy(section) for record, section in zip(layout.records, sections, strict=True)
            }
        finally:
            file.close()
        tail = build_tail(layout, content, _locator(sections, layout), checksums)
        with temporary.open("r+b") as plain:
            plain.truncate(layout.tail_offset)
            plain.seek(layout.tail_offset)
            plain.write(tail)
            plain.flush()
            os.fsync(plain.fileno())
        _publish_name(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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

    def _combine(self, tickets: deque[Any]) -> int:
        checksum = 0
        error: BaseException | None = None
        while tickets:
            ticket = tickets.popleft()
            try:
                ticket.wait()
            except BaseException as failure:  # the others are still using the memory: wait for them too
                error = error or failure
                _drain(ticket)
                continue
            checksum = _C.crc32_combine(checksum, ticket.crc32, ticket.nbytes)
        if error is not None:
            raise error
        return int(checksum)


def _drain(ticket: Any) -> None:
    """Wait until the engine has let go of the ticket's memory, well or not."""
    while not ticket.done:
        try:
            ticket.wait()
        except Exception:
            return


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

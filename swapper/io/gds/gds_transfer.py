"""One run of device memory on its way by cuFile: in pieces of whole sectors, beside edges that go through host memory.

cuFile takes any offset and size, but what is not whole sectors it reads, changes and writes back, and two pieces or two operations
that meet in a sector would undo each other's bytes. So it gets whole sectors only; edges go the engine's way, which
changes exactly its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from swapper.io.device_errors import device_errors
from swapper.io.gds.cufile import CuFileFile
from swapper.io.staging import StagedTransfer, event_of

SECTOR_BYTES = 4096
PIECE_BYTES = 16 << 20

Stage = Callable[[int, int], StagedTransfer]
"""(begin, bytes) -> begins to transfer that part of the tensor through host memory."""


def whole_sectors(offset: int, nbytes: int) -> tuple[int, int]:
    """Return (begin, end) of the whole sectors of the file within [offset, offset + nbytes), counted from offset; pure.

    Both are 0 where there is none.
    """
    begin = -offset % SECTOR_BYTES
    end = nbytes - (offset + nbytes) % SECTOR_BYTES
    return (begin, end) if begin < end else (0, 0)


def begin_pieces(
    threads: ThreadPoolExecutor,
    file: CuFileFile,
    kind: str,
    flat: torch.Tensor,
    registered: int | None,
    offset: int,
    stage: Stage,
) -> list[StagedTransfer]:
    """Begins to transfer `flat`, bytes on a device, from or to file offset `offset`, behind what its stream has queued.

    `registered` is the address of the registered memory that it is a part of, if it is. Each piece uses `file` until it is over.
    """
    ready = event_of(flat)
    address = flat.data_ptr()

    def move(begin: int, nbytes: int) -> None:
        if ready is None:
            file.transfer(kind, address + begin, offset + begin, nbytes, registered)
            return
        with torch.cuda.device(flat.device), device_errors(flat.device, "what was queued before a transfer"):
            ready.synchronize()
            file.transfer(kind, address + begin, offset + begin, nbytes, registered)

    def pieces() -> Iterator[StagedTransfer]:
        begin, end = whole_sectors(offset, flat.numel())
        for at in range(begin, end, PIECE_BYTES):
            nbytes = min(PIECE_BYTES, end - at)
            file.use()
            try:
                piece = StagedTransfer(threads.submit(move, at, nbytes), (kind, file.path, offset + at, nbytes))
            except BaseException:  # it has not begun: the threads are gone
                file.close()
                raise
            piece.on_done(file.close)
            yield piece
        for edge, stop in ((0, begin), (end, flat.numel())):
            if edge < stop:
                yield stage(edge, stop - edge)

    return list(pieces())


class GdsTransfer:
    """A part of an operation that consists of parts."""

    def __init__(self, pieces: Sequence[StagedTransfer]) -> None:
        self._pieces = pieces

    @property
    def done(self) -> bool:
        return all(piece.done for piece in self._pieces)

    @property
    def cancelled(self) -> bool:
        return any(piece.cancelled for piece in self._pieces)

    @property
    def error(self) -> Exception | None:
        return next((piece.error for piece in self._pieces if piece.error is not None), None)

    def wait(self, timeout_s: float | None = None) -> bool:
        for piece in self._pieces:
            if not piece.settle(timeout_s):
                return False
        if self.error is not None:
            raise self.error
        return True

    def cancel(self) -> bool:
        return all(piece.cancel() for piece in self._pieces)

    def notify(self, fd: int) -> None:
        for piece in self._pieces:
            piece.notify(fd)

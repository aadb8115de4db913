"""Whether the files of a loaded model still have the bytes that they had: by reading them, where size and time are not enough.

Each pass looks at size and time of the last change, which a drive that decays, or somebody who puts the time back, leaves as they
were. Most formats have no checksum of their own, so the first look is what later ones are held against.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch

from swapper import _C
from swapper.errors import CheckpointError
from swapper.formats.sources import Source
from swapper.io.engines import open_for, shared_engine

PIECE_BYTES = 4 << 20
PIECES = 4


class Checksums:
    """The CRC-32 of each file of `source`, as far as they are known."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._known: dict[Path, int] = {}

    def check(self) -> dict[Path, int]:
        """Read all files and return their CRC-32, by path. Takes PIECES * PIECE_BYTES of memory.

        Raises:
            CheckpointError: a file is not what it was when its header was read, or at the last call.
            IoError: a file cannot be read.
        """
        self._source.check_unchanged()
        found = {path: _crc32(path, stamp.nbytes) for path, stamp in self._source.stamps.items()}
        self._source.check_unchanged()
        for path, crc32 in found.items():
            before = self._known.setdefault(path, crc32)
            if crc32 != before:
                raise CheckpointError(
                    f"{path} was changed while its weights are in use: the CRC-32 of its bytes was {before:08x} and is "
                    f"{crc32:08x}, with size and time as before. Take another copy of it, and load the model anew"
                )
        return found


def _crc32(path: Path, nbytes: int) -> int:
    engine, file = shared_engine(path), open_for(path, read_only=True)
    memory = [torch.empty(PIECE_BYTES, dtype=torch.uint8) for _ in range(PIECES)]
    waiting: deque[Any] = deque()
    crc32 = 0
    try:
        for number, offset in enumerate(range(0, nbytes, PIECE_BYTES)):
            if len(waiting) == PIECES:
                crc32 = _added(crc32, waiting.popleft())
            here = min(PIECE_BYTES, nbytes - offset)
            piece = memory[number % PIECES]
            waiting.append(engine.read(file, offset, piece.data_ptr(), here, keep=piece, checksum=True))
        while waiting:
            crc32 = _added(crc32, waiting.popleft())
    finally:
        file.close()
    return crc32


def _added(crc32: int, ticket: Any) -> int:
    ticket.wait()
    return _C.crc32_combine(crc32, ticket.crc32, ticket.nbytes)

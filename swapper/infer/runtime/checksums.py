"""Checks the files of a loaded model for changes by reading them, where size and time are not enough.

Each pass checks size and modification time. A decaying drive, or somebody who restores the time, leaves those as they
were. Most formats have no checksums, so later checks are compared with the first.
"""

from __future__ import annotations

from pathlib import Path

from swapper.errors import CheckpointError
from swapper.formats.sources import Source
from swapper.io.copying import CopyRange, checksums_of
from swapper.io.engines import open_for, shared_engine


class Checksums:
    """The known CRC-32s of the files of `source`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._known: dict[Path, int] = {}

    def check(self) -> dict[Path, int]:
        """Read all files and return their CRC-32, by path. Uses COPY_BYTES of memory.

        Raises:
            CheckpointError: a file has changed since its header was read, or since the last call.
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
                    f"{crc32:08x}, with size and time as before. Take another copy of it, and load the model again"
                )
        return found


def _crc32(path: Path, nbytes: int) -> int:
    file = open_for(path, read_only=True)
    try:
        return checksums_of(shared_engine(path), [CopyRange(file, 0, nbytes, None, str(path))]).get(0, 0)
    finally:
        file.close()

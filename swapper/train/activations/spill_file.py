"""The scratch file of saved activations: without a name, gone with the process, and which parts of it are in use."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any

import torch

from swapper.io import beneath
from swapper.io.extents import Extents

_numbers = count()


class SpillFile:
    """Owns the file, which is made when something is first written, and the places in it.

    Args:
        directory: on the drive that shall hold it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: Any = None
        self._extents = Extents()
        self._pid = os.getpid()
        self.allocated_bytes = 0

    @property
    def used_bytes(self) -> int:
        """What is in use of it."""
        return self._extents.used_bytes

    def write(self, engine: Any, memory: torch.Tensor) -> tuple[int, Any]:
        """Begin to write `memory`, uint8, to a place of its own. Returns the place's offset, and the ticket.

        Raises:
            IoError: the drive is full.
        """
        file = self._open()
        offset = self._extents.take(memory.nbytes)
        try:
            if self._extents.end > self.allocated_bytes:
                file.allocate(self._extents.end)
                self.allocated_bytes = self._extents.end
            return offset, engine.write(file, offset, memory.data_ptr(), memory.nbytes, keep=memory)
        except BaseException:
            self._extents.give(offset, memory.nbytes)
            raise

    def read(self, engine: Any, offset: int, memory: torch.Tensor) -> Any:
        """Begin to read into `memory`, uint8, from a place that was written. Returns the ticket."""
        return engine.read(self._file, offset, memory.data_ptr(), memory.nbytes, keep=memory)

    def give(self, offset: int, nbytes: int) -> None:
        """A place is not in use any more, and no transfer from or to it is under way."""
        self._extents.give(offset, nbytes)

    def _open(self) -> Any:
        if self._file is None:
            path = self._directory / f"activations-{os.getpid()}-{next(_numbers)}.swap"
            self._file = beneath.open_for_transfers(path, create=True)
            beneath.unlink(path)
        return self._file

    def __del__(self) -> None:
        if os.getpid() == self._pid and self._file is not None:
            self._file.close()  # transfers under way keep it open, and their memory

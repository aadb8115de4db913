"""Stashes gradients on NVMe, or on an accelerator, in an unnamed file during a relayout (relayout.py).

The pages belong to the session that closes, and their scratch file is deleted with it; gradients on an accelerator may
move to pages then.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from swapper.errors import IoError
from swapper.io import beneath
from swapper.train.gradients.cold_grad import GradientMeta
from swapper.train.gradients.grads import Gradients


class GradientStash:
    """Owns the file. It is filled from the old session's gradients and emptied into the new one's, any number of times.

    Args:
        directory: on the drive of the file.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = tempfile.TemporaryFile(dir=beneath.where(directory))  # noqa: SIM115
        self._places: dict[str, tuple[int, GradientMeta]] = {}
        self._end = 0

    def fill(self, gradients: Gradients) -> None:
        """Copy the gradients into the file.

        Raises:
            IoError: they cannot be read, or the drive is full.
        """
        for name in gradients.present():
            self._places[name] = self._end, gradients.content(name)
            for part in gradients.parts(name):
                self._end += self._write(part)

    def empty_into(self, gradients: Gradients) -> None:
        """Copy the file to `gradients`, which has space for all of these parameters.

        Raises:
            IoError: a transfer failed.
        """
        for name, (at, content) in self._places.items():
            for part in gradients.parts(name):
                self._read(part, at)
                at += part.nbytes
            gradients.present_again(name, content)

    def close(self) -> None:
        self._file.close()

    def _write(self, part: torch.Tensor) -> int:
        data, at = memoryview(_bytes_of(part)), self._end
        try:
            while data:
                done = os.pwrite(self._file.fileno(), data, at)
                data, at = data[done:], at + done
        except OSError as error:
            raise IoError(
                "write", str(self._directory), at, len(data), error.errno or 0, "stashing gradients"
            ) from error
        return part.nbytes

    def _read(self, part: torch.Tensor, at: int) -> None:
        data = memoryview(_bytes_of(part))
        try:
            while data:
                done = os.preadv(self._file.fileno(), [data], at)
                if not done:
                    raise IoError(
                        "read", str(self._directory), at, len(data), 0, "the file of stashed gradients is truncated"
                    )
                data, at = data[done:], at + done
        except OSError as error:
            if isinstance(error, IoError):
                raise
            raise IoError(
                "read", str(self._directory), at, len(data), error.errno or 0, "gradients were stashed"
            ) from error


def _bytes_of(part: torch.Tensor) -> memoryview:
    return memoryview(part.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]

"""Checks a finished transfer against the file, read another way: plain system calls, through the page cache."""

from __future__ import annotations

import errno
import os

import torch

from swapper.errors import IoError
from swapper.io.elements import copy_out
from swapper.io.files import Opened, OpenFile

CHUNK_BYTES = 8 << 20


def compare(opened: Opened, offset: int, tensor: torch.Tensor, op: str) -> None:
    """Raises IoError (EIO) where the file from `offset` on differs from the tensor's bytes. `opened` may be closed by now."""
    per_chunk = CHUNK_BYTES // tensor.element_size()
    for start in range(0, tensor.numel(), per_chunk):
        stop = min(start + per_chunk, tensor.numel())
        expected = torch.empty(stop - start, dtype=tensor.dtype)
        copy_out(tensor.detach(), start, stop, expected)
        wanted = expected.view(torch.uint8)
        at = offset + start * tensor.element_size()
        content = b"".join(_read_file(*segment) for segment in opened.segments(at, wanted.numel()))
        found = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if not torch.equal(wanted, found):
            first = at + int((wanted != found).nonzero()[0])
            raise IoError(op, opened.path, first, wanted.numel(), errno.EIO, "validation found other bytes in the file")


def _read_file(opened: OpenFile, offset: int, nbytes: int) -> bytes:
    descriptor = os.open(opened.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read(descriptor, offset, nbytes, opened.path)
    finally:
        os.close(descriptor)


def _read(descriptor: int, offset: int, nbytes: int, path: str) -> bytes:
    pieces = bytearray()
    while len(pieces) < nbytes:
        piece = os.pread(descriptor, nbytes - len(pieces), offset + len(pieces))
        if not piece:
            raise IoError("read", path, offset + len(pieces), nbytes, 0, "validation found the file too short")
        pieces += piece
    return bytes(pieces)

"""Makes the manifest and the seal, which detect and locate a change of any byte of a container.

A zip has checksums of its records, but none of the bytes between them. So a snapshot has one record more, the
**manifest** (JSON): the CRC-32 of every run of bytes before the tail, headers and padding included, and the tensors in
it. The **seal** is text at the start of the comment of the zip's end record: the tail's offset and the CRC-32 of all
bytes from there to the comment. The rest of the comment is zeros. So each byte of the file is in exactly one checked
run.

Pure: no file is opened here.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swapper.errors import CheckpointError

MANIFEST_NAME = "swapper/manifest.json"
FORMAT = 1  # of the manifest; other numbers are refused
END_RECORD_BYTES = 22
"""Bytes of a zip's end record without its comment (APPNOTE 4.3.16)."""
MAX_END_BYTES = END_RECORD_BYTES + 0xFFFF
_END_SIGNATURE = b"PK\x05\x06"
_SEAL = re.compile(rb"swapper-seal from ([0-9]{20}) crc32 ([0-9a-f]{8})\n\0*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ChecksumChunk:
    """A run of bytes of the file and its CRC-32."""

    offset: int  # bytes from the start of the file
    nbytes: int
    crc32: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor of a record: bytes [offset, offset + nbytes) of the file."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Checksums of all bytes before the tail, in file order, and which tensors lie there, by record."""

    chunks: tuple[ChecksumChunk, ...]
    tensors: Mapping[str, tuple[TensorPlace, ...]]

    @classmethod
    def make(
        cls, chunks: Sequence[ChecksumChunk], nbytes: int, tensors: Mapping[str, Sequence[TensorPlace]]
    ) -> Manifest:
        """Return the manifest of `nbytes` bytes.

        Raises:
            CheckpointError: the chunks do not cover them exactly once.
        """
        ordered = tuple(sorted(chunks, key=lambda chunk: chunk.offset))
        ends = [0, *(chunk.end for chunk in ordered)]
        if [chunk.offset for chunk in ordered] != ends[:-1] or ends[-1] != nbytes:
            raise CheckpointError(
                f"the checksums of a container must cover its first {nbytes} bytes without gap or overlap"
            )
        return cls(ordered, {key: tuple(places) for key, places in tensors.items()})

    def encode(self) -> bytes:
        content = {
            "format": FORMAT,
            "chunks": [[chunk.offset, chunk.nbytes, chunk.crc32] for chunk in self.chunks],
            "tensors": {key: [[p.name, p.offset, p.nbytes] for p in places] for key, places in self.tensors.items()},
        }
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, nbytes: int) -> Manifest:
        """Return the manifest that `encode` made, of a container whose tail begins at `nbytes`.

        Raises:
            CheckpointError: it is not one, or of another version.
        """
        try:
            content = json.loads(data)
            if content["format"] != FORMAT:
                raise CheckpointError(
                    f"the manifest is of format {str(content['format'])[:20]}, this swapper reads {FORMAT}"
                )
            chunks = [ChecksumChunk(*map(int, row)) for row in content["chunks"]]
            tensors = {
                str(key): [TensorPlace(str(name), int(offset), int(size)) for name, offset, size in rows]
                for key, rows in content["tensors"].items()
            }
            return cls.make(chunks, nbytes, tensors)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"the manifest cannot be read ({type(error).__name__})") from error


@dataclass(frozen=True, slots=True)
class Seal:
    """The seal of a file: bytes [begin, end) have this CRC-32, and the rest of the file is the comment."""

    begin: int
    end: int
    crc32: int


def seal_tail(tail: bytes, begin: int, alignment: int) -> bytes:
    """Return `tail`, whose last part is an end record with a comment, with a seal in that comment.

    Args:
        tail: all bytes of a file from offset `begin` to its end; the file's size is a multiple of `alignment`.
    """
    end = tail.rindex(_END_SIGNATURE) + END_RECORD_BYTES
    text_nbytes = len(_seal_text(0, 0))
    comment_nbytes = len(tail) - end
    if comment_nbytes < text_nbytes:
        comment_nbytes += alignment
    body = tail[: end - 2] + comment_nbytes.to_bytes(2, "little")
    return body + _seal_text(begin, zlib.crc32(body)).ljust(comment_nbytes, b"\0")


def find_seal(last: bytes, file_nbytes: int) -> Seal | None:
    """Return the seal of a file of `file_nbytes` bytes, of which `last` are the last MAX_END_BYTES (or all of them).

    None if there is none: the file was never sealed, or its end is damaged.
    """
    at = last.rfind(_END_SIGNATURE)
    if at < 0 or at + END_RECORD_BYTES > len(last):
        return None
    comment = last[at + END_RECORD_BYTES :]
    match = _SEAL.fullmatch(comment)
    if match is None or int.from_bytes(last[at + END_RECORD_BYTES - 2 : at + END_RECORD_BYTES], "little") != len(
        comment
    ):
        return None  # some of its zeros may be missing, or others appended
    end = file_nbytes - len(comment)
    begin = int(match[1])
    return Seal(begin, end, int(match[2], 16)) if begin < end else None


def _seal_text(begin: int, crc32: int) -> bytes:
    return b"swapper-seal from %020d crc32 %08x\n" % (begin, crc32)

"""Writes tensors of other files, in the formats of safetensors, torch and torch.distributed.checkpoint.

Each function gets a stream (stream.py) into an empty file, and tensors with bytes in files. Memory has only headers.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from swapper import _C
from swapper.checkpoint.stream import Archive, Checksum, StreamWriter, append_item
from swapper.errors import CheckpointError
from swapper.formats.dcp_format import Item
from swapper.formats.safetensors import DTYPES, METADATA_KEY
from swapper.formats.stored import Box, ChunkedTensor, Piece, StoredTensor
from swapper.formats.torch_writer import StorageRef, leading_records, pickle_state
from swapper.io.engines import open_for, shared_engine, wait_for_all
from swapper.io.tensor_bytes import SECTOR_BYTES, flat_bytes

PIECES_AHEAD = 2  # reads in flight while one is converted
PIECE_ELEMENTS = 4 << 20  # bounds the memory of a conversion: a choice
_Reading = tuple[torch.Tensor, list[_C.Ticket]]
"""Memory, and the reads that fill it."""
_SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ExportTensor:
    """A tensor to be written: its elements in row-major order are those of `parts`, in order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.numel for part in self.parts) * self.dtype.itemsize

    def pieces(self, payloads: Payloads) -> Iterator[torch.Tensor] | None:
        """Return the written bytes, flat, if they are computed on the way; None if they are those of the parts."""
        return None


class Payloads:
    """The source files, each opened once. A context."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[_C.Engine, _C.File]] = {}

    def __enter__(self) -> Payloads:
        return self

    def __exit__(self, *exception: object) -> None:
        for _, file in self._files.values():
            file.close()

    def append(self, stream: StreamWriter, tensor: ExportTensor, checksum: Checksum | None = None) -> None:
        """Append a tensor's elements.

        Args:
            stream: of the file.
            tensor: of any kind that is exported.
            checksum: as of `StreamWriter.append_later`.
        """
        pieces = tensor.pieces(self)
        if pieces is not None:
            for piece in pieces:
                stream.append(_bytes_of(piece), checksum)
            return
        for part in tensor.parts:
            if part.stride is None:
                engine, file = self._open(part.path)
                stream.append_read(engine, file, part.offset, part.nbytes, checksum)
                continue
            for piece in _pieces(self.strided(part)):
                stream.append(_bytes_of(piece), checksum)

    def elements(self, tensor: ExportTensor, count: int) -> Iterator[torch.Tensor]:
        """Yield a tensor's elements in order, `count` at a time, with the next ones in flight. No part has strides."""
        pieces = tensor.pieces(self)
        if pieces is not None:
            yield from _rebatched(pieces, count)
            return
        waiting: deque[_Reading] = deque()
        total = sum(part.numel for part in tensor.parts)
        for begin in range(0, total, count):
            waiting.append(self.read_elements(tensor.parts, begin, min(begin + count, total)))
            if len(waiting) > PIECES_AHEAD:
                yield arrived(*waiting.popleft())
        while waiting:
            yield arrived(*waiting.popleft())

    def read_elements(self, parts: Sequence[StoredTensor], begin: int, end: int) -> _Reading:
        """Begin to read elements of `parts`, in order. Returns memory and tickets.

        Args:
            parts: stored without strides, of one dtype.
            begin, end: counted over all parts, in elements.
        """
        itemsize = parts[0].dtype.itemsize
        memory = torch.empty(end - begin, dtype=parts[0].dtype, device="cpu")
        tickets = []
        first = 0  # the part's first element
        for part in parts:
            low, high = max(begin, first), min(end, first + part.numel)
            if low < high:
                engine, file = self._open(part.path)
                address = memory.data_ptr() + (low - begin) * itemsize
                at = part.offset + (low - first) * itemsize
                tickets.append(engine.read(file, at, address, (high - low) * itemsize, keep=memory))
            first += part.numel
        return memory, tickets

    def _open(self, path: Path) -> tuple[_C.Engine, _C.File]:
        if path not in self._files:
            self._files[path] = shared_engine(path), open_for(path, read_only=True)
        return self._files[path]

    def strided(self, part: StoredTensor) -> torch.Tensor:
        """Read a tensor with strides into memory."""
        engine, file = self._open(part.path)
        memory = torch.empty(part.nbytes, dtype=torch.uint8, device="cpu")
        engine.read(file, part.offset, memory.data_ptr(), part.nbytes, keep=memory).wait()
        return memory.view(part.dtype).as_strided(part.shape, part.stride or ())


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield contiguous tensors of at most PIECE_ELEMENTS that are the tensor's elements in order.

    An expanded tensor has many more elements than memory.
    """
    if tensor.numel() <= PIECE_ELEMENTS:
        yield tensor.contiguous()
        return
    row = tensor.numel() // tensor.shape[0]
    for part in torch.split(tensor, PIECE_ELEMENTS // row) if row <= PIECE_ELEMENTS else tensor:
        yield from _pieces(part)


def _bytes_of(piece: torch.Tensor) -> bytes:
    return flat_bytes(piece).numpy().tobytes()


def _rebatched(pieces: Iterator[torch.Tensor], count: int) -> Iterator[torch.Tensor]:
    """Yield the same elements, `count` at a time."""
    held: list[torch.Tensor] = []
    for piece in pieces:
        flat = torch.cat([*held, piece])
        whole = flat.numel() // count * count
        for begin in range(0, whole, count):
            yield flat[begin : begin + count]
        held = [flat[whole:]]
    left = torch.cat(held)
    if left.numel():
        yield left


def arrived(memory: torch.Tensor, tickets: list[_C.Ticket]) -> torch.Tensor:
    """Return `memory` when it is read."""
    wait_for_all(tickets)
    return memory


def write_safetensors(
    stream: StreamWriter, payloads: Payloads, tensors: Sequence[ExportTensor], metadata: Mapping[str, str]
) -> None:
    """Write one safetensors file.

    Wider types come first, as the format requires; among them those of whole runs of 4096 bytes: they are then all
    aligned for direct transfers, since the data begins at a multiple of 4096.

    Args:
        stream: of the file.
        payloads: read what the tensors have in files.
        tensors: in any order.
        metadata: of the header.
    """
    ordered = sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.nbytes % SECTOR_BYTES != 0, t.name))
    stream.append(safetensors_header(ordered, metadata))
    for tensor in ordered:
        payloads.append(stream, tensor)


def safetensors_header(tensors: Iterable[ExportTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file.

    Args: as of `write_safetensors`; the tensors in the file's order.

    Raises:
        CheckpointError: the format lacks the dtype or the name of a tensor.
    """
    entries: dict[str, object] = {METADATA_KEY: {"format": "pt", **metadata}}
    cursor = 0
    for tensor in tensors:
        if tensor.name == METADATA_KEY:
            raise CheckpointError(
                f"a tensor has the name {tensor.name!r}, which safetensors keeps for itself: use --to torch"
            )
        if tensor.dtype not in _SAFETENSORS_NAMES:
            raise CheckpointError(f"{tensor.name} is of {tensor.dtype}, which safetensors lacks: use --to torch")
        entries[tensor.name] = {
            "dtype": _SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [cursor, cursor + tensor.nbytes],
        }
        cursor += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % SECTOR_BYTES)
    return len(text).to_bytes(8, "little") + text


def write_torch(stream: StreamWriter, payloads: Payloads, tensors: Sequence[ExportTensor]) -> None:
    """Write a state dict, {name: tensor}, as torch.save does. Shared tensors stay shared.

    Args: as of `write_safetensors`.
    """
    records: dict[tuple[object, ...], int] = {}
    stand_ins: dict[int, StorageRef] = {}
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    unique: list[ExportTensor] = []
    for tensor in tensors:
        places = ((part.path, part.offset, part.nbytes, part.stride, part.shape) for part in tensor.parts)
        identity = (tensor.dtype, *places)
        key = records.setdefault(identity, len(unique)) if tensor.nbytes else len(unique)
        if key == len(unique):
            unique.append(tensor)
        state[tensor.name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        stand_ins[id(state[tensor.name])] = StorageRef(str(key), 0)
    sizes = {str(key): tensor.nbytes for key, tensor in enumerate(unique)}
    pickled = pickle_state(state, sizes, lambda tensor: stand_ins[id(tensor)]).data
    archive = Archive(stream, SECTOR_BYTES)
    for name, content in leading_records(pickled, SECTOR_BYTES):
        archive.add(name, content)
    for key, tensor in enumerate(unique):
        archive.add_payload(f"data/{key}", tensor.nbytes, partial(payloads.append, stream, tensor))
    archive.finish()


def write_items(
    stream: StreamWriter, payloads: Payloads, tensors: Sequence[ExportTensor]
) -> dict[str, tuple[int, int]]:
    """Write tensors as items of torch.distributed.checkpoint; return (offset, bytes) of each.

    Args: as of `write_safetensors`.
    """
    return {
        tensor.name: append_item(stream, Item.of(tensor.dtype, tensor.shape), partial(payloads.append, stream, tensor))
        for tensor in tensors
    }


BOX_BYTES = 4 << 20  # bounds the memory of an assembly: a choice


@dataclass(frozen=True, eq=False)
class AssembledTensor(ExportTensor):
    """A tensor cut along dimensions other than the first. `parts` are its chunks, in any order."""

    chunked: ChunkedTensor

    @classmethod
    def of(cls, chunked: ChunkedTensor, name: str) -> AssembledTensor:
        parts = tuple(chunk.stored for chunk in chunked.chunks)
        return cls(name, chunked.dtype, chunked.shape, parts, chunked)

    def pieces(self, payloads: Payloads) -> Iterator[torch.Tensor]:
        """Yield its elements in order, with the next ones in flight."""
        strided = {part: payloads.strided(part) for part in self.parts if part.stride is not None}  # whole, and rare
        waiting: deque[tuple[Box, list[_Reading]]] = deque()
        for box in self.chunked.boxes(BOX_BYTES):
            waiting.append((box, [_begin(payloads, piece, strided) for piece in box.pieces]))
            if len(waiting) > PIECES_AHEAD:
                yield self._assembled(*waiting.popleft())
        for box, readings in waiting:
            yield self._assembled(box, readings)

    def _assembled(self, box: Box, readings: Sequence[_Reading]) -> torch.Tensor:
        """Return a box's elements, flat, when they are read."""
        whole = torch.empty(box.shape, dtype=self.dtype, device="cpu")
        for piece, reading in zip(box.pieces, readings, strict=True):
            whole[piece.at] = arrived(*reading).reshape(piece.shape)
        return whole.view(-1)


def _begin(payloads: Payloads, piece: Piece, strided: Mapping[StoredTensor, torch.Tensor]) -> _Reading:
    if piece.stored in strided:
        return strided[piece.stored][piece.inside], []
    return payloads.read_elements((piece.stored,), piece.first, piece.first + math.prod(piece.shape))

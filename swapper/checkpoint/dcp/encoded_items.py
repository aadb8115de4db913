"""Finds encoded optimizer state in the metadata of a sharded model's snapshot, and decodes it for a plan's targets.

Where one process has a dictionary in place of a tensor, a DCP directory has items: `NAME.codec`, and a tensor for each part,
`NAME.code` and `NAME.scale`, cut by rows as the parameter is. An item is read by torch.load, which computes nothing, so torch's own
reader has the parts. `StorageReader` has NAME too, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from swapper.checkpoint.encoded_state import MARK
from swapper.codecs import CODECS, StateCodec
from swapper.errors import CheckpointError


@dataclass(frozen=True)
class EncodedTensor:
    """A tensor that is stored in parts, `names`, in the order of the codec's layout."""

    codec: StateCodec
    names: tuple[str, ...]

    def decode(self, request: ReadItem, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what `request` asks for, of parts with its rows."""
        rows = torch.empty(parts[0].shape)
        self.codec.decode([part.view(-1) for part in parts], rows.view(-1))
        for dim, (begin, length) in enumerate(zip(request.storage_offsets, request.lengths, strict=True)):
            rows = rows.narrow(dim, begin, length) if dim else rows
        return rows


def find_encoded(metadata: Metadata) -> dict[str, EncodedTensor]:
    """Return the encoded tensors by name, and add them to the metadata in fp32.

    A master, which is completed by its parameter, is left out.

    Raises:
        CheckpointError: the parts of one are of no known codec, or do not fit together.
    """
    entries, found = metadata.state_dict_metadata, {}
    for name in [mark.removesuffix(MARK) for mark in entries if mark.endswith(MARK)]:
        parts = {key.removeprefix(f"{name}."): entries[key] for key in entries if key.startswith(f"{name}.")}
        tensors = {suffix: part for suffix, part in parts.items() if isinstance(part, TensorStorageMetadata)}
        codec = _codec_of({suffix: part.properties.dtype for suffix, part in tensors.items()})
        if codec is None:
            raise CheckpointError(f"{name} is encoded, in parts that this swapper does not know: {sorted(tensors)}")
        of = [tensors[part.suffix] for part in codec.layout]
        rows = [[(chunk.offsets[0], chunk.sizes[0]) for chunk in part.chunks] for part in of]
        if any(each != rows[0] for each in rows) or name in entries:
            raise CheckpointError(f"the parts of {name}, which is encoded, do not fit together")
        if not codec.needs_parameter:
            found[name] = EncodedTensor(codec, tuple(f"{name}.{part.suffix}" for part in codec.layout))
            entries[name] = TensorStorageMetadata(TensorProperties(torch.float32), of[0].size, of[0].chunks)
    return found


def _codec_of(dtypes: dict[str, torch.dtype]) -> StateCodec | None:
    return next((c for c in CODECS.values() if {part.suffix: part.dtype for part in c.layout} == dtypes), None)


class _Targets:
    """A planner for parts of encoded tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def resolve_tensor(self, request: ReadItem) -> torch.Tensor:
        return self._tensors[request.dest_index.fqn]

    def commit_tensor(self, request: ReadItem, tensor: torch.Tensor) -> None: ...


def read_encoded(
    request: ReadItem,
    encoded: EncodedTensor,
    metadata: Metadata,
    planner: LoadPlanner,
    read: Callable[[list[ReadItem], Any], None],
) -> None:
    """Read the rows of one request, and decode them into the planner's target.

    Args:
        read: reads items for a planner.
    """
    first, rows = request.storage_offsets[0], request.lengths[0]
    targets, items = {}, []
    for name in encoded.names:
        part: Any = metadata.state_dict_metadata[name]
        columns = tuple(part.size[1:])
        begin = torch.Size([request.storage_index.offset[0], *[0] * len(columns)])  # type: ignore[index]
        targets[name] = torch.empty((rows, *columns), dtype=part.properties.dtype)
        zeros = [0] * len(columns)
        items.append(
            ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(name),
                torch.Size([0, *zeros]),
                MetadataIndex(name, begin),
                torch.Size([first, *zeros]),
                torch.Size([rows, *columns]),
            )
        )
    read(items, _Targets(targets))
    target = planner.resolve_tensor(request).detach()
    target.copy_(encoded.decode(request, list(targets.values())))
    planner.commit_tensor(request, target)

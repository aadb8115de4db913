"""Reads a run's own directory as a checkpoint; and lists the content of any checkpoint, for people and programs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swapper.checkpoint.encoded_state import STATE_CODEC, codecs_of
from swapper.checkpoint.writers import ExportTensor
from swapper.durability.commit import CommitRecord, name_of, read_commit, sections_of
from swapper.durability.directory import committed_runs
from swapper.durability.verify import at_rest
from swapper.errors import CheckpointError
from swapper.formats.dcp_format import METADATA_NAME, read_directory
from swapper.formats.sources import FileStamp, open_source
from swapper.formats.stored import StoredTensor
from swapper.formats.torch_file import TorchFile, read_torch_file
from swapper.paging.layout import Slot, TensorSpec
from swapper.paging.section import EXTERNAL, Section

StoredParts = tuple[StoredTensor, ...]


def find_run(path: Path) -> Path | None:
    """Return the directory of the committed run that `path` is, or that it has below; None if it has no run.

    Raises:
        CheckpointError: there are several, or the run has no commit.
    """
    if not path.is_dir():
        return None
    runs = committed_runs(path)
    if len(runs) > 1:
        raise CheckpointError(f"{path} holds the runs of {len(runs)} ranks: name one of them, such as {runs[0]}")
    if not runs and any(next(path.glob(f"{below}turn-*.swap"), None) for below in ("", "rank-*-of-*/")):
        raise CheckpointError(f"{path} holds a run without a commit, which nothing can read: name one of its snapshots")
    return runs[0] if runs else None


def read_run(directory: Path) -> tuple[CommitRecord, list[tuple[TensorSpec, StoredParts | None]]]:
    """Return the run's last commit, and its tensors with their runs of bytes; None for those in files of the user.

    Raises:
        CheckpointError: a process has the run open; or the record cannot be read.
    """
    with at_rest(directory, "read"):
        record = read_commit(directory)
        if record is None:
            raise CheckpointError(f"{directory} holds no committed run")
        sections, files = sections_of(directory, record)
        slots = ((section, slot) for section in sections for slot in section.plan.slots)
        return record, [(slot.spec, _parts(section, slot, files)) for section, slot in slots]


def _parts(section: Section, slot: Slot, files: Mapping[int, Sequence[Path]]) -> StoredParts | None:
    """Return the runs of bytes that have a tensor's elements, in order; None: they are external."""
    spec, found = slot.spec, []
    for page in section.pages_of(slot.offset, slot.end):
        if page.location is None or page.location == EXTERNAL:
            return None
        first, last = max(slot.offset, page.offset), min(slot.end, page.offset + page.nbytes)
        place = (files[page.location][page.drive], page.file_offset + first - page.offset, last - first)
        found.append(StoredTensor(name_of(spec), *place, spec.dtype, ((last - first) // spec.dtype.itemsize,)))
    return tuple(found)


def parameters_of(directory: Path) -> tuple[list[ExportTensor], list[str], dict[Path, FileStamp]]:
    """Return the run's parameters, the names of its other tensors, and the stamps of the files.

    Raises:
        CheckpointError: as `read_run`; or parameters are read from files of the user.
    """
    _, tensors = read_run(directory)
    chosen = []
    for tensor, parts in tensors:
        if tensor.kind == "param":
            if parts is None:
                raise CheckpointError(
                    f"{directory}: parameter {tensor.owner} is read from a file of yours (external=), so the run has no copy of "
                    "it: take a snapshot, and export that"
                )
            chosen.append(ExportTensor(tensor.owner, tensor.dtype, tensor.shape, parts))
    stamps = {part.path: FileStamp.of(part.path) for tensor in chosen for part in tensor.parts}
    return chosen, [name_of(tensor) for tensor, _ in tensors if tensor.kind != "param"], stamps


_MAX_ALIGNMENT = 1 << 21  # bytes; larger ones say nothing more


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of the checkpoint `path`, in types that JSON knows. Reads headers only.

    "tensors" is a list in file order; each has "name", "dtype", "shape", "stride" (null if contiguous), "file",
    "offset" and "bytes", "alignment" (the largest power of two that divides the offset, up to 2 MiB), and in torch
    checkpoints "record" and "crc32" (of the whole record, as 8 hex digits). Of a run's directory "file" and "offset" are those
    of the first of "pieces" many pieces; null for a tensor in a file of the user. "metadata" has the codecs of encoded optimizer
    state as "state_codec".

    Raises:
        CheckpointError: it is no checkpoint, or damaged.
        IoError: it cannot be read.
    """
    source = Path(path).absolute()
    if (source / METADATA_NAME).exists():
        directory = read_directory(source)
        tensors = [
            {**_describe(tensor.name, chunk.stored, chunk.stored), "chunk_offsets": list(chunk.offsets)}
            for tensor in directory.tensors.values()
            for chunk in tensor.chunks
        ]
        first = source / "rank-0.pt"  # of a sharded model's snapshot
        file = read_torch_file(first) if first.exists() else None
        return _summary(source, "dcp", tensors, {} if file is None else _encoded(file), _step(file) if file else None)
    if (run := find_run(source)) is not None:
        return _inspect_run(run)
    opened = open_source(source)
    tensors = [_describe(tensor.name, tensor, tensor) for tensor in opened.tensors.values()]
    if opened.kind != "torch":
        return _summary(source, opened.kind, tensors, dict(opened.metadata), step=None)
    file = read_torch_file(source)
    views = dict(file.skeleton.tensors())
    for tensor in tensors:
        record = file.record(views[tensor["name"]].storage)
        tensor["record"], tensor["crc32"] = record.name, f"{record.crc32:08x}"
    return _summary(source, "torch", tensors, {**opened.metadata, **_encoded(file)}, _step(file))


def _encoded(file: TorchFile) -> dict[str, str]:
    codecs = codecs_of(file.skeleton.tree)
    return {STATE_CODEC: ", ".join(f"{key}: {codec}" for key, codec in sorted(codecs.items()))} if codecs else {}


def _inspect_run(directory: Path) -> dict[str, object]:
    record, tensors = read_run(directory)
    described = []
    for tensor, parts in tensors:
        found = _describe(name_of(tensor), tensor, parts[0] if parts else None)
        described.append({**found, "pieces": 0 if parts is None else len(parts)})
    metadata = {
        "optimizer": record.optimizer,
        "rank": f"{record.rank} of {record.world_size}",
        **{f"{family} on": place for family, place in record.placement.items()},
        **{f"frozen parameters {number}": name for number, name in enumerate(record.external, 1)},
    }
    nbytes = sum(tensor.nbytes for tensor, _ in tensors)
    return {**_summary(directory, "run", described, metadata, record.step), "tensor_bytes": nbytes}


def _alignment(offset: int) -> int:
    return min(offset & -offset, _MAX_ALIGNMENT) if offset else _MAX_ALIGNMENT


def _describe(name: str, tensor: StoredTensor | TensorSpec, place: StoredTensor | None) -> dict[str, Any]:
    """Describe a tensor; `place` is where it, or its first part, is in a file."""
    stride = None if place is None else place.stride
    return {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": None if stride is None else list(stride),
        "file": None if place is None else place.path.name,
        "offset": None if place is None else place.offset,
        "bytes": tensor.nbytes,
        "alignment": None if place is None else _alignment(place.offset),
    }


def _summary(
    path: Path, kind: str, tensors: list[dict[str, Any]], metadata: dict[str, str], step: int | None
) -> dict[str, object]:
    unique = {(tensor["file"], tensor["offset"], tensor["bytes"]) for tensor in tensors}
    return {
        "path": str(path),
        "kind": kind,
        "step": step,
        "metadata": metadata,
        "tensor_bytes": sum(nbytes for _, _, nbytes in unique),
        "tensors": tensors,
    }


def _step(file: TorchFile) -> int | None:
    """Return the training step, if the checkpoint has one at the usual place."""
    tree = file.skeleton.tree
    if not isinstance(tree, dict):
        return None
    ours = tree.get("swapper")
    for holder, key in ((ours, "step"), (tree, "step"), (tree, "global_step")):
        value = holder.get(key) if isinstance(holder, dict) else None
        if type(value) is int:
            return value
    return None

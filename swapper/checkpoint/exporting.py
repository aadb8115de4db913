"""Exports a checkpoint of any format as another format, in memory that does not depend on its size.

It first locates the source's tensors (sources.py, dcp_format.py, pickle_reader.py), then reads and writes them at
once (stream.py). The result appears under its name when it is complete, file or directory, or not at all.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from swapper.checkpoint.encoded_state import MARK, codecs_of
from swapper.checkpoint.inspecting import find_run, find_zero, parameters_of, read_zero
from swapper.checkpoint.quantization import KEY, AlreadyQuantized, Loss, layouts_of, losses, metadata, quantised
from swapper.checkpoint.stream import StreamWriter
from swapper.checkpoint.torch_load import load
from swapper.checkpoint.torch_save import save
from swapper.checkpoint.writers import (
    AssembledTensor,
    ExportTensor,
    Payloads,
    safetensors_header,
    write_items,
    write_safetensors,
    write_torch,
)
from swapper.errors import CheckpointError
from swapper.formats.dcp_format import METADATA_NAME, METADATA_VERSION, read_directory
from swapper.formats.pickle_reader import Skeleton
from swapper.formats.sources import FileStamp, Source, open_source
from swapper.formats.stored import ChunkedTensor, StoredTensor
from swapper.formats.torch_file import read_torch_file
from swapper.io.replacing import make_parents, new_directory, replacing
from swapper.options import parse_choice
from swapper.runtime.sizes import parse_bytes
from swapper.tensors.torch_private import storage_info

FORMATS = ("torch", "safetensors", "huggingface", "dcp")
SAYS_QUANTIZED = ("safetensors", "huggingface")
"""Formats with metadata, which say of a tensor that it is quantized."""
WHAT = ("model", "all")
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
"""Keys of the model's state dict in a training state."""
SHARD_BYTES = 5 * 10**9  # a usual size of Hugging Face shards
_EXPORT_BLOCKS = 12  # half of them read, half written: a choice
_RESERVE_BYTES = 16 << 20  # space for headers and metadata: a choice

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Selection:
    """The part of a source to be exported.

    Attributes:
        left_out: names of entries that are no tensors, or not requested.
        metadata: remarks of a safetensors source, text to text, which such a target has too.
    """

    tensors: list[ExportTensor]
    left_out: list[str]
    stamps: Mapping[Path, FileStamp]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def select(path: str | os.PathLike[str], what: str = "model") -> Selection:
    """Select the part of the checkpoint `path` to be exported.

    Args:
        what: "model": of a training state, its model, by the names of the model's own state dict; of anything else,
            everything. "all": everything, by the path in the checkpoint.

    Raises:
        ConfigError: there is no such `what`.
        CheckpointError: it is no checkpoint, or damaged; or a tensor in it is sparse or quantized.
        IoError: it cannot be read.
    """
    parse_choice(what, "what", WHAT)
    source = Path(path).absolute()
    if (source / METADATA_NAME).exists():
        return _select_from_dcp(source, what)
    if (run := find_run(source)) is not None:
        if what == "all":
            raise CheckpointError(
                f"{run} is a run's own directory, whose parameters can be exported: leave the rest to resume='auto', or take a "
                "snapshot (manager.snapshot), which has all"
            )
        return Selection(*parameters_of(run))
    ranks = find_zero(source) if source.is_dir() else None
    if ranks is not None:
        if what == "all":
            raise CheckpointError(
                f"{ranks} is of DeepSpeed's ZeRO, whose fp32 weights can be exported: leave out what='all'"
            )
        tensors, stamps = read_zero(ranks)
        return Selection(tensors, [], stamps)
    opened = open_source(source)
    if opened.kind != "torch":
        return _select_all(opened)
    return _select_from_torch(opened, what)


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    what: str = "model",
    shard_bytes: int | str = SHARD_BYTES,
    overwrite: bool = False,
    selection: Selection | None = None,
    progress: Progress = lambda nbytes: None,
    quantize: str | None = None,
    keep: str | Sequence[str] = (),
) -> dict[str, Loss]:
    """Write the checkpoint `source` as `target`, in the format `to`.

    Args:
        source: a snapshot of swapper or any file of torch.save, a safetensors file, a Hugging Face directory, a
            directory of torch.distributed.checkpoint, DeepSpeed's ZeRO (its fp32 weights), or a run's own directory (its
            parameters as of its last commit).
        target: a file ("torch", "safetensors") or a directory ("huggingface", "dcp") to be made.
        to: one of FORMATS. The result is one flat state dict, {name: tensor}; from torch to torch, "all" keeps nesting.
        what: see `select`.
        shard_bytes: maximum size of a file in a Hugging Face directory, unless one tensor is larger: bytes, or "5GB".
        overwrite: replace an existing file. Directories are never replaced.
        selection: the result of `select`, if it was called before.
        progress: called with numbers of bytes as they are written.
        quantize: "int8" or "int4": large matrices in that many bits, for `swapper.load` (checkpoint/quantization.py).
            Only to safetensors and huggingface.
        keep: a pattern (fnmatch), or several, of names that are not quantized.

    Returns:
        The error of each quantized tensor, by name; empty without `quantize`.

    Raises:
        ConfigError: `what` or `shard_bytes` is none.
        CheckpointError: the source is damaged or changes, the format does not support it, or the target exists.
        IoError: a transfer failed, or the drive is full. Nothing is left of the target.
    """
    if to not in FORMATS:
        raise CheckpointError(f"there is no format {to!r}: use one of {', '.join(FORMATS)}")
    if quantize is not None and to not in SAYS_QUANTIZED:
        raise CheckpointError(f"quantized weights are for --to safetensors or huggingface, not {to}")
    if to == "torch" and what == "all" and Path(source).is_file() and open_source(source).kind == "torch":
        save(load(source, mmap=True), target, overwrite=overwrite)  # with its structure, and values that are no tensors
        return {}
    most = parse_bytes(shard_bytes, "shard_bytes")
    chosen = select(source, what) if selection is None else selection
    if quantize is not None:
        patterns = [keep] if isinstance(keep, str) else keep
        chosen = replace(chosen, tensors=quantised(chosen.tensors, quantize, patterns))
    if to not in SAYS_QUANTIZED:
        tensors = [
            tensor.dequantised() if isinstance(tensor, AlreadyQuantized) else tensor for tensor in chosen.tensors
        ]
        chosen = replace(chosen, tensors=tensors)
    if not chosen.tensors:
        raise CheckpointError(f"{source} has no tensors to export")
    destination = Path(os.path.realpath(target))
    make_parents(destination, CheckpointError)
    _check_room(destination.parent, chosen.nbytes)
    with Payloads() as payloads:
        if to in ("torch", "safetensors"):
            with replacing(destination, overwrite=overwrite) as temporary:
                _write_file(temporary, to, chosen, payloads, progress)
                _check_unchanged(chosen.stamps)
        else:
            with new_directory(destination) as folder:
                if to == "huggingface":
                    _write_huggingface(folder, chosen, payloads, most, progress)
                else:
                    _write_dcp(folder, chosen.tensors, payloads, progress)
                _check_unchanged(chosen.stamps)
    return losses(chosen.tensors)


# --- selection


def _whole(tensor: StoredTensor, name: str) -> ExportTensor:
    return ExportTensor(name, tensor.dtype, tensor.shape, (tensor,))


def _select_all(source: Source) -> Selection:
    """Select all of a file or a directory of Hugging Face; what is quantized there is known as such."""
    _refuse(source, source.other_tensors.keys())
    layouts = layouts_of(source.metadata, source.path)
    tensors = [
        AlreadyQuantized.of(tensor, name, layouts[name]) if name in layouts else _whole(tensor, name)
        for name, tensor in source.tensors.items()
    ]
    of_tensors = {KEY + name for name in layouts}
    remarks = {key: text for key, text in source.metadata.items() if key not in of_tensors}
    return Selection(tensors, [], source.stamps, remarks)


def _select_from_torch(source: Source, what: str) -> Selection:
    skeleton = read_torch_file(source.path).skeleton
    if what == "all" and codecs_of(skeleton.tree):
        raise CheckpointError(
            f"{source.path} has encoded optimizer state ({codecs_of(skeleton.tree)}), which is decoded only in an export of all "
            "of it as one torch file: say --to torch, and export that"
        )
    prefix, within = ("", skeleton) if what == "all" else _model_of(skeleton)
    names = {prefix + name for name, _ in within.leaves()}
    chosen = {name: tensor for name, tensor in source.tensors.items() if name in names}
    tensors = [_whole(tensor, name.removeprefix(prefix)) for name, tensor in chosen.items()]
    _refuse(source, names)
    return Selection(tensors, [name for name, _ in skeleton.leaves() if name not in chosen], source.stamps)


def _refuse(source: Source, names: Collection[str]) -> None:
    """Raise CheckpointError if some of what is selected are tensors without plain elements."""
    for name, made in source.other_tensors.items():
        if name in names:
            raise CheckpointError(
                f"{source.path}: {name} is a sparse, quantized or nested tensor, a lazy conjugate, or an object with tensors in "
                f"it, and not a plain tensor ({made}): it cannot be exported"
            )


def _model_of(skeleton: Skeleton) -> tuple[str, Skeleton]:
    """Return the model's prefix in a training state, and the model; "" and everything if everything is the model."""
    for key in MODEL_KEYS if isinstance(skeleton.tree, dict) else ():
        found = replace(skeleton, tree=skeleton.tree.get(key))
        if isinstance(found.tree, dict) and any(found.tensors()):
            return f"{key}.", found
    return "", skeleton


def _select_from_dcp(path: Path, what: str) -> Selection:
    directory = read_directory(path)
    if what == "all" and any(name.endswith(MARK) for name in directory.others):
        raise CheckpointError(
            f"{path} has encoded optimizer state, which an export of it does not decode: export the model alone, or load all by "
            "swapper.checkpoint.dcp.StorageReader, which gives fp32, and save that"
        )
    # A flat state dict may have names that begin like the model's entry in a training state: the paths tell them apart.
    within = {directory.within.get(name) for name in directory.tensors} if what == "model" else set()
    key = next((key for key in MODEL_KEYS if key in within), None)
    prefix = "" if key is None else f"{key}."
    chosen = {n: tensor for n, tensor in directory.tensors.items() if key is None or directory.within.get(n) == key}
    left_out = [name for name in [*directory.tensors, *directory.others] if name not in chosen]
    tensors = [_from_chunks(tensor, prefix) for tensor in chosen.values()]
    return Selection(tensors, left_out, directory.stamps)


def _from_chunks(tensor: ChunkedTensor, prefix: str) -> ExportTensor:
    name = tensor.name.removeprefix(prefix)
    if len(tensor.chunks) > 1 and not tensor.in_rows():
        return AssembledTensor.of(tensor, name)
    return ExportTensor(name, tensor.dtype, tensor.shape, tuple(chunk.stored for chunk in tensor.chunks))


def _check_unchanged(stamps: Mapping[Path, FileStamp]) -> None:
    for path, stamp in stamps.items():
        if FileStamp.of(path) != stamp:
            raise CheckpointError(f"{path} was changed while it was exported: export it again when nobody writes to it")


# --- targets


def _check_room(directory: Path, nbytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < nbytes + _RESERVE_BYTES:
        raise CheckpointError(f"{directory} has {free / 1e9:.2f} GB free, and the export takes {nbytes / 1e9:.2f} GB")


def _stream_into(path: Path, tensors: Sequence[ExportTensor], progress: Progress) -> StreamWriter:
    return StreamWriter(path, sum(tensor.nbytes for tensor in tensors), blocks=_EXPORT_BLOCKS, moved=progress)


def _write_file(path: Path, to: str, chosen: Selection, payloads: Payloads, progress: Progress) -> None:
    tensors = chosen.tensors
    with _stream_into(path, tensors, progress) as stream:
        if to == "torch":
            write_torch(stream, payloads, tensors)
        else:
            write_safetensors(stream, payloads, tensors, {**chosen.metadata, **metadata(tensors)})


def _write_huggingface(
    folder: Path, chosen: Selection, payloads: Payloads, shard_bytes: int, progress: Progress
) -> None:
    shards = _shards(chosen.tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        (folder / name).touch()
        with _stream_into(folder / name, shard, progress) as stream:
            write_safetensors(stream, payloads, shard, {**chosen.metadata, **metadata(shard)})
        weight_map |= {tensor.name: name for tensor in shard}
    if len(shards) > 1:
        total = chosen.nbytes
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: Sequence[ExportTensor], shard_bytes: int) -> list[list[ExportTensor]]:
    safetensors_header(tensors, {})  # refuses unsupported tensors before anything is written
    shards: list[list[ExportTensor]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def _write_dcp(folder: Path, tensors: Sequence[ExportTensor], payloads: Payloads, progress: Progress) -> None:
    from torch.distributed.checkpoint import metadata as described

    name = "__0_0.distcp"
    (folder / name).touch()
    with _stream_into(folder / name, tensors, progress) as stream:
        places = write_items(stream, payloads, tensors)
    entries: dict[str, Any] = {}
    storage = {}
    planner: dict[str, object] = {}
    for tensor in tensors:
        begin = torch.Size([0] * len(tensor.shape))
        size = torch.Size(tensor.shape)
        properties = described.TensorProperties(dtype=tensor.dtype)
        chunk = described.ChunkStorageMetadata(offsets=begin, sizes=size)
        entries[tensor.name] = described.TensorStorageMetadata(properties, size, [chunk])
        storage[described.MetadataIndex(tensor.name, begin)] = storage_info()(name, *places[tensor.name])
        planner[tensor.name] = (tensor.name,)
    whole = described.Metadata(entries, planner, storage, described.StorageMeta(), METADATA_VERSION)
    (folder / METADATA_NAME).write_bytes(pickle.dumps(whole))

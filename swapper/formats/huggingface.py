"""Reads a Hugging Face directory: one file, or shards listed by an index, in safetensors or .bin."""

from __future__ import annotations

from pathlib import Path

from swapper.errors import CheckpointError, IoError
from swapper.formats.sources import FileStamp, Source, open_file, parse_object, read_whole
from swapper.formats.stored import StoredTensor
from swapper.runtime import records

SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEX_SUFFIX = ".index.json"
SUFFIXES = (".safetensors", ".bin")
MAX_INDEX_BYTES = 100_000_000  # of a sane file; it is read whole


def read(path: Path) -> Source:
    """Return the locations of the model's tensors in directory `path`. Prefers safetensors to .bin files.

    Raises:
        CheckpointError: there is no model, shards are missing, or a file is not what it claims to be.
        IoError: something cannot be read.
    """
    for name in SINGLE:
        if (path / name).is_file():
            return _joined(path, [open_file(path / name)], None)
        if (path / (name + INDEX_SUFFIX)).is_file():
            return _sharded(path / (name + INDEX_SUFFIX))
    return _by_suffix(path)


def _by_suffix(path: Path) -> Source:
    """Accept other names, such as `diffusion_pytorch_model.safetensors`, if only one file qualifies."""
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise IoError("open", str(path), 0, 0, error.errno or 0) from error
    for suffix in SUFFIXES:
        indices = [name for name in names if name.endswith(suffix + INDEX_SUFFIX)]
        files = [name for name in names if name.endswith(suffix)]
        if len(indices) == 1:
            return _sharded(path / indices[0])
        if len(files) == 1 and not indices:
            return _joined(path, [open_file(path / files[0])], None)
        if files or indices:
            raise CheckpointError(
                f"{path} has several weight files ({', '.join([*indices, *files][:8])}) and no index that tells which belong "
                "together: name one of them"
            )
    raise CheckpointError(
        f"{path} has no weights: expected {', '.join(SINGLE)}, an index of shards ({SINGLE[0]}{INDEX_SUFFIX}), or one "
        "file whose name ends like these"
    )


def _sharded(index: Path) -> Source:
    """Return the shards that `index` names. Only the index maps tensors to files."""
    weight_map = _read_index(index)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names {len(shards)} shards, of which {len(missing)} are missing: {', '.join(missing[:8])}"
        )
    return _joined(index.parent, [open_file(index.parent / shard) for shard in shards], weight_map)


def _read_index(index: Path) -> dict[str, str]:
    weight_map = parse_object(str(index), read_whole(index, MAX_INDEX_BYTES)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    try:
        records.mapping(records.text, records.name)(weight_map)
    except ValueError as error:
        raise CheckpointError(f"{index} names a shard that is not a file in its directory: {error}") from error
    return weight_map


def _joined(path: Path, shards: list[Source], weight_map: dict[str, str] | None) -> Source:
    """Join all `shards` into one source. With a map, each tensor comes from the shard that the map names."""
    tensors: dict[str, StoredTensor] = {}
    stamps: dict[Path, FileStamp] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            if weight_map is None or weight_map.get(name) == shard.path.name:
                tensors[name] = tensor
        stamps.update(shard.stamps)
        metadata.update(shard.metadata)
    for name, shard_name in (weight_map or {}).items():
        if name not in tensors:
            raise CheckpointError(f"{path}: the index says that {name!r} is in {shard_name}, but it is not there")
    return Source(path, "huggingface", tensors, stamps, metadata)

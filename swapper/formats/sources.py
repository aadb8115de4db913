"""Describes a checkpoint's tensors on disk, in one form for every format.

A reader of a format (safetensors.py, torch_file.py, dcp_format.py) opens a file, trusts nothing in it, and returns a
`Source`: for each tensor its file, offset, size, dtype, shape and stride. It reads no payload byte. Users of a source
(inference, which streams from the files in place; export, which copies) know no format.

A source records size, time and inode of its files when their headers are read, so that a later change is detected.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from swapper.errors import CheckpointError, ConfigError, IoError
from swapper.formats.stored import ChunkedTensor, ConcatenatedFile, Extent, StoredTensor
from swapper.io.beneath import HOLLOW, is_hollow
from swapper.runtime import records

ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = b"\x80\x02"
GGUF_MAGIC = b"GGUF"
SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEX_SUFFIX = ".index.json"
SUFFIXES = (".safetensors", ".bin")
MAX_INDEX_BYTES = 100_000_000  # of a sane file; it is read whole
NESTED = ("model.", "state_dict.", "model_state_dict.", "module.", "_orig_mod.")
"""Prefixes of a model's names in a training checkpoint; also nested ("state_dict.model.")."""

NEW_TIME = (
    ". If only its time is new (`touch`): a model whose `swapper.loaded(model).verify()` was called before compares the bytes, and "
    "goes on"
)

Rename = Mapping[str, str] | Callable[[str], str | None] | None


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Identifies the content of a file: enough to detect that it was replaced or written to."""

    inode: int
    nbytes: int
    changed_ns: int

    @classmethod
    def of(cls, file: int | str | os.PathLike[str]) -> FileStamp:
        """Return the stamp of a path or an open descriptor. Raises IoError: there is none."""
        try:
            status = os.stat(file)  # noqa: PTH116  # a descriptor too
        except OSError as error:
            raise IoError("stat", str(file), 0, 0, error.errno or 0) from error
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file for small reads at random offsets; yield its descriptor. A pipe is refused, not waited for.

    Raises:
        CheckpointError: it is a pipe, a socket or a device.
        IoError: it cannot be opened, or is a directory.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise IoError("open", str(path), 0, 0, error.errno or 0, "correct the path") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IoError("open", str(path), 0, 0, errno.EISDIR, "name a file")
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{path} is a pipe, a socket or a device: name a file")
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        yield descriptor
    finally:
        os.close(descriptor)


def read_at(descriptor: int, path: Path, offset: int, nbytes: int) -> bytes:
    """Return bytes [offset, offset + nbytes) of an open file, or fewer at its end.

    Args:
        descriptor: of the file.
        path: for messages.
        offset, nbytes: of the range, in bytes.

    Raises:
        IoError: it cannot be read.
    """
    parts = []
    try:
        while nbytes > 0 and (part := os.pread(descriptor, nbytes, offset)):
            parts.append(part)
            offset, nbytes = offset + len(part), nbytes - len(part)
    except OSError as error:
        raise IoError("read", str(path), offset, nbytes, error.errno or 0) from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_whole(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file that must be small.

    Raises:
        CheckpointError: it has more than `max_bytes`, or is no regular file.
        IoError: it cannot be read.
    """
    with opened(path) as descriptor:
        nbytes = os.fstat(descriptor).st_size
        if nbytes > max_bytes:
            raise CheckpointError(f"{path} has {nbytes} bytes, more than such a file needs")
        return read_filled(descriptor, path, 0, nbytes)


def read_filled(descriptor: int, path: Path, offset: int, nbytes: int) -> bytes:
    """As `read_at`, for many bytes.

    Args: as of `read_at`.

    Raises:
        CheckpointError: the file has hardly any of them: a few can claim any number.
    """
    if is_hollow(descriptor, offset, nbytes):
        raise CheckpointError(f"{path}: of {nbytes} bytes at {offset} {HOLLOW}")
    return read_at(descriptor, path, offset, nbytes)


def is_plain_name(name: str) -> bool:
    """Return True if `name` can name a file in the same directory."""
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return name not in ("", ".", "..") and not {b"/"[0], 0} & set(encoded) and len(encoded) <= 255


@dataclass(frozen=True)
class Source:
    """A checkpoint's tensors by name.

    Attributes:
        kind: "safetensors", "torch", "huggingface" or "dcp", for messages.
        tensors: by name, in the file's order.
        stamps: of every file that a tensor lies in, taken when its header was read.
        metadata: the format's own remarks, text to text.
        joined: files in `tensors` that do not exist: their bytes are extents of others.
        other_tensors: what made them, by name, of tensors without plain elements (sparse ones, lazy conjugates), which are not
            read; not in `tensors`.
        grids: tensors in chunks along several dimensions, which no such file can hold; not in `tensors`.
    """

    path: Path
    kind: str
    tensors: Mapping[str, StoredTensor]
    stamps: dict[Path, FileStamp]
    metadata: Mapping[str, str]
    joined: Mapping[Path, ConcatenatedFile] = field(default_factory=dict)
    grids: Mapping[str, ChunkedTensor] = field(default_factory=dict)
    other_tensors: Mapping[str, str] = field(default_factory=dict)

    @property
    def everything(self) -> dict[str, StoredTensor | ChunkedTensor]:
        """All tensors by name: `tensors` and `grids`."""
        return {**self.tensors, **self.grids}

    def extents(self, path: Path, offset: int, nbytes: int) -> Iterator[tuple[int, Extent]]:
        """Yield the real extents of bytes [offset, offset + nbytes) of a tensor's file, and their places in it.

        Args:
            path: the file that the tensor's entry names; it may stand for several joined ones.
            offset, nbytes: of the range in it, in bytes.
        """
        if path in self.joined:
            return self.joined[path].extents(offset, nbytes)
        return iter([(0, Extent(path, offset, nbytes))] if nbytes else [])

    def nbytes_of(self, path: Path) -> int:
        """Return the size of a file that tensors name."""
        return self.joined[path].nbytes if path in self.joined else self.stamps[path].nbytes

    def check_unchanged(self, files: Iterable[Path] | None = None) -> None:
        """Raise CheckpointError if one of the files (all, if None) has changed since its header was read."""
        for path in self.stamps if files is None else files:
            try:
                now = FileStamp.of(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be checked any more ({error}): its weights are in use") from error
            if now != self.stamps[path]:
                is_alike = replace(now, changed_ns=self.stamps[path].changed_ns) == self.stamps[path]
                raise CheckpointError(
                    f"{path} was changed while its weights are in use (it had {self.stamps[path].nbytes} bytes, has "
                    f"{now.nbytes}): load the model again" + (NEW_TIME if is_alike else "")
                )


def open_source(path: str | os.PathLike[str], suffixes: Sequence[str] = SUFFIXES) -> Source:
    """Detect the format of `path` and return its tensors' locations.

    Args:
        path: a safetensors file, a torch checkpoint (a zip, as torch.save and swapper's snapshots are), a Hugging Face
            directory (safetensors or .bin, sharded or not) or an index of one, or a directory of torch.distributed.checkpoint.
        suffixes: of the files that are taken from a Hugging Face directory, the preferred one first.

    Raises:
        CheckpointError: it is none of these, or not what it claims to be.
        ConfigError: `path` is not a path.
        IoError: it cannot be read.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"a checkpoint is a path, not a {type(path).__name__}: data in memory needs no loading")
    target = Path(path).absolute()
    if target.is_dir():
        if (target / ".metadata").exists():
            return _read_by("dcp_format", target)
        return _read_huggingface(target, suffixes)
    if target.name.endswith(INDEX_SUFFIX):
        return _sharded(target)
    return open_file(target)


def open_file(path: Path) -> Source:
    """As `open_source`, for one file."""
    with opened(path) as descriptor:
        begin = read_at(descriptor, path, 0, 9)
    if begin[:4] == ZIP_MAGIC:
        return _read_by("torch_file", path)
    if begin[8:] == b"{":
        return _read_by("safetensors", path)
    if begin[:2] == PICKLE_MAGIC:
        raise CheckpointError(
            f"{path} is a torch checkpoint of the old kind, which is no zip and cannot be read in place: convert it by "
            "`torch.save(torch.load(path, weights_only=True), new_path)`"
        )
    if begin[:4] == GGUF_MAGIC:
        raise CheckpointError(f"{path} is a GGUF file, which is not supported: use the safetensors form of the model")
    raise CheckpointError(
        f"{path} is neither a safetensors file nor a torch checkpoint (it begins with {begin[:8].hex(' ')}): name "
        "such a file, or a directory of them"
    )


def _read_by(reader: str, path: Path) -> Source:
    """Call the reader: each is a module with a function `read(path) -> Source`, and imports this one."""
    module: Any = import_module(f"swapper.formats.{reader}")
    source: Source = module.read(path)
    return source


def parse_object(what: str, text: bytes) -> dict[str, object]:
    """Parse `text`, UTF-8, as a JSON object. `what` names it in errors.

    Raises:
        CheckpointError: it is not JSON, not an object, or has a duplicate key, on which readers would differ.
    """
    try:
        found = records.parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{what} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} is not a JSON object")
    return found


# --- a Hugging Face directory


def _read_huggingface(path: Path, suffixes: Sequence[str]) -> Source:
    """Read a directory with one file, or shards listed by an index. Prefers safetensors to .bin files."""
    for name in (name for name in SINGLE if name.endswith(tuple(suffixes))):
        if (path / name).is_file():
            return _joined(path, [open_file(path / name)], None)
        if (path / (name + INDEX_SUFFIX)).is_file():
            return _sharded(path / (name + INDEX_SUFFIX))
    return _by_suffix(path, suffixes)


def _by_suffix(path: Path, suffixes: Sequence[str]) -> Source:
    """Accept other names, such as `diffusion_pytorch_model.safetensors`, if only one file qualifies."""
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise IoError("open", str(path), 0, 0, error.errno or 0) from error
    for suffix in suffixes:
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
        f"file whose name ends like these (in {' or '.join(suffixes)})"
    )


def _sharded(index: Path) -> Source:
    """Return the shards that `index` names, in the order of their names."""
    weight_map = _read_index(index)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise CheckpointError(f"{index}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:8])}")
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
    """Join all `shards`, in order, into one source. Of a name in several the last counts, as transformers and others take it.

    With a map, each tensor must be in the shard that the map names.
    """
    tensors: dict[str, StoredTensor] = {}
    stamps: dict[Path, FileStamp] = {}
    metadata: dict[str, str] = {}
    others: dict[str, str] = {}
    for shard in shards:
        tensors.update(shard.tensors)
        stamps.update(shard.stamps)
        metadata.update(shard.metadata)
        others.update(shard.other_tensors)
    by_name = {shard.path.name: {*shard.tensors, *shard.other_tensors} for shard in shards}
    for name, shard_name in (weight_map or {}).items():
        if name not in by_name[shard_name]:
            raise CheckpointError(f"{path}: the index says that {name!r} is in {shard_name}, but it is not there")
    return Source(path, "huggingface", tensors, stamps, metadata, other_tensors=others)


# --- names


def renamed(source: Source, wanted: set[str], rename: Rename) -> dict[str, StoredTensor | ChunkedTensor]:
    """Return the source's tensors under the model's names: they differ by a prefix, or by the user's map.

    Args:
        source: of the tensors.
        wanted: names of the model.
        rename: the user's map; None: find the prefix.
    """
    tensors = source.everything
    if rename is None:
        prefixes = ("", *NESTED, *(outer + inner for outer in NESTED for inner in NESTED))
        if wanted <= tensors.keys():
            return dict(tensors)
        prefix = max(prefixes, key=lambda p: sum(p + name in tensors for name in wanted))  # the first of equals
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if not callable(rename) and not isinstance(rename, Mapping):
        raise ConfigError(f"rename={rename!r} must be a map from the checkpoint's names to the model's, or a function")
    found: dict[str, StoredTensor | ChunkedTensor] = {}
    for name, tensor in tensors.items():
        new = rename(name) if callable(rename) else rename.get(name, name)
        if new is None:
            continue
        if not isinstance(new, str):
            raise ConfigError(f"rename gives {name!r} the name {new!r}, which is not a string")
        if new in found:
            raise ConfigError(f"rename gives both {found[new].name!r} and {name!r} the name {new!r}")
        found[new] = tensor
    return found

"""Reads what training leaves as checkpoints, a run's own directory and DeepSpeed's; lists the content of any checkpoint.

Of a DeepSpeed ZeRO checkpoint (stages 1, 2, 3) the fp32 weights are read, without DeepSpeed, and no pickle is run.
Each rank has a file with its part of the fp32 master weights, flattened: in stages 1 and 2 a part of all parameters
of a group in sequence; in stage 3 the same fraction of every parameter. The model's own file has names and shapes, in
the same order. So a parameter is a sequence of ranges of the ranks' files, and is exported from there.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from swapper.checkpoint.encoded_state import STATE_CODEC, codecs_of
from swapper.checkpoint.writers import ExportTensor
from swapper.durability.commit import CommitRecord, name_of, read_commit, sections_of
from swapper.durability.directory import committed_runs
from swapper.durability.verify import at_rest
from swapper.errors import CheckpointError, IoError
from swapper.formats.dcp_format import METADATA_NAME, read_directory
from swapper.formats.pickle_reader import TensorView
from swapper.formats.sources import FileStamp, open_source
from swapper.formats.stored import StoredTensor, are_sizes
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


# --- DeepSpeed's ZeRO -------------------------------------------------------------------------------------------------

T = TypeVar("T")
LATEST = "latest"
OPTIMIZER_SUFFIX = "_optim_states.pt"
MODEL_SUFFIX = "_model_states.pt"


def find_zero(path: Path) -> Path | None:
    """Return the directory with the ranks' files, if `path` is one or has a file `latest` that names one."""
    if any(path.glob(f"*{OPTIMIZER_SUFFIX}")):
        return path
    latest = path / LATEST
    if latest.is_file() and latest.stat().st_size < 1000:
        name = latest.read_text(errors="replace").strip()
        if Path(name).name == name and name not in ("", ".", "..") and any((path / name).glob(f"*{OPTIMIZER_SUFFIX}")):
            return path / name
    return None


def read_zero(path: Path) -> tuple[list[ExportTensor], dict[Path, FileStamp]]:
    """Return the locations of the fp32 weights in the directory `path`, a result of `find_zero`, and its files' stamps.

    Raises:
        CheckpointError: files are missing or damaged, or the parts do not make up the parameters.
        IoError: something cannot be read.
    """
    ranks = [read_torch_file(file) for file in _in_order(path, OPTIMIZER_SUFFIX)]
    models = [read_torch_file(file) for file in _in_order(path, MODEL_SUFFIX)]
    if not models:
        raise CheckpointError(f"{path} has no *{MODEL_SUFFIX}: the names of the parameters are in it")
    try:
        tensors = _assemble(path, ranks, models)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise CheckpointError(f"{path} is no known ZeRO checkpoint ({type(error).__name__}: {error})") from error
    return tensors, {file.path: file.stamp for file in [*ranks, *models]}


def _in_order(path: Path, suffix: str) -> list[Path]:
    """Return the files of the ranks, in the order of their numbers."""
    try:
        found = [file for file in path.iterdir() if file.name.endswith(suffix)]
    except OSError as error:
        raise IoError("open", str(path), 0, 0, error.errno or 0) from error
    return sorted(found, key=lambda file: [int(number) for number in re.findall(r"\d+", file.name)])


class _Flat:
    """A sequence of flat tensors, addressed as one."""

    def __init__(self, tensors: Iterable[StoredTensor]) -> None:
        self._tensors = list(tensors)
        self.numel = sum(tensor.numel for tensor in self._tensors)
        if any(tensor.stride is not None or len(tensor.shape) != 1 for tensor in self._tensors):
            raise ValueError("the flat groups are not flat")

    def take(self, begin: int, count: int) -> list[StoredTensor]:
        """Return the ranges of files with elements [begin, begin + count)."""
        if begin + count > self.numel:
            raise ValueError(f"elements {begin} to {begin + count} of {self.numel} are wanted")
        parts = []
        for tensor in self._tensors:
            here = min(count, tensor.numel - begin)
            if here > 0:
                itemsize = tensor.dtype.itemsize
                offset = tensor.offset + begin * itemsize
                parts.append(StoredTensor(tensor.name, tensor.path, offset, here * itemsize, tensor.dtype, (here,)))
                count -= here
            begin = max(begin - tensor.numel, 0)
        return parts


def _assemble(path: Path, ranks: Sequence[TorchFile], models: Sequence[TorchFile]) -> list[ExportTensor]:
    states = [file.skeleton.tree["optimizer_state_dict"] for file in ranks]
    stage, world = states[0]["zero_stage"], states[0]["partition_count"]
    world = max(_all(int, world)) if isinstance(world, (list, tuple)) else world
    if world != len(ranks):
        raise CheckpointError(f"{path} has {len(ranks)} files *{OPTIMIZER_SUFFIX} of {world}")
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    groups = [[file.stored("", view) for view in state[key]] for file, state in zip(ranks, states, strict=True)]
    model = models[0].skeleton.tree
    found = _buffers(models[0], model) + _frozen(models, stage)
    found += _of_stage_3(groups, model["param_shapes"]) if stage == 3 else _of_stage_2(groups, model["param_shapes"])
    by_name = {tensor.name: tensor for tensor in found}
    for name, other in (model.get("shared_params") or {}).items():
        if isinstance(name, str) and isinstance(other, str) and other in by_name:
            one = by_name[other]
            by_name[name] = ExportTensor(name, one.dtype, one.shape, one.parts)
    return list(by_name.values())


def _of_stage_2(groups: Sequence[Sequence[StoredTensor]], shapes: Sequence[dict[str, Any]]) -> list[ExportTensor]:
    found = []
    _check_shapes(shapes)
    for number, group in enumerate(shapes):
        flat = _Flat(rank[number] for rank in groups)
        cursor = 0
        for name, shape in group.items():
            count = math.prod(shape)
            found.append(_tensor(name, shape, flat.take(cursor, count)))
            cursor += count
        if flat.numel - cursor > 4 * len(groups):  # it is padded for the collectives
            raise ValueError(f"group {number} has {flat.numel} elements, of which parameters take {cursor}")
    return found


def _of_stage_3(groups: Sequence[Sequence[StoredTensor]], shapes: Sequence[dict[str, Any]]) -> list[ExportTensor]:
    flats = [_Flat(rank) for rank in groups]
    _check_shapes(shapes)
    found = []
    cursor = 0
    for name, shape in [item for group in shapes for item in group.items()]:
        each = -(-math.prod(shape) // len(flats))
        found.append(_tensor(name, shape, [part for flat in flats for part in flat.take(cursor, each)]))
        cursor += each
    return found


def _frozen(models: Sequence[TorchFile], stage: int) -> list[ExportTensor]:
    """Return the frozen parameters of the model's files: whole, or in stage 3 in parts of the ranks."""
    shapes = models[0].skeleton.tree.get("frozen_param_shapes") or {}
    _check_shapes([shapes])
    found = []
    for name, shape in shapes.items():
        files = models if stage == 3 else models[:1]
        fragments = [(file, file.skeleton.tree["frozen_param_fragments"][name]) for file in files]
        stored = [file.stored(name, view) for file, view in fragments]
        flat = [StoredTensor(name, s.path, s.offset, s.nbytes, s.dtype, (s.numel,)) for s in stored if s.stride is None]
        if len(flat) != len(stored):
            raise ValueError(f"{name} is not contiguous")
        found.append(_tensor(name, shape, flat))
    return found


def _buffers(file: TorchFile, model: dict[str, Any]) -> list[ExportTensor]:
    names = set(_all(str, model["buffer_names"]))
    views = {name: view for name, view in model["module"].items() if name in names and isinstance(view, TensorView)}
    return [ExportTensor(n, v.dtype, v.shape, (file.stored(n, v),)) for n, v in views.items()]


def _all(kind: type[T], values: Sequence[Any]) -> Sequence[T]:
    """Return `values`. Raises ValueError: one is not of `kind`."""
    if not all(isinstance(value, kind) for value in values):
        raise ValueError(f"a value is not a {kind.__name__}")
    return values


def _check_shapes(shapes: Sequence[dict[str, object]]) -> None:
    """Raise ValueError unless these are groups of shapes by name, each name once."""
    names = _all(str, [name for group in _all(dict, shapes) for name in group])
    if len(set(names)) != len(names):
        raise ValueError("two parameters have the same name")
    if not all(are_sizes(shape) for group in shapes for shape in group.values()):
        raise ValueError("a parameter's shape is impossible")


def _tensor(name: str, shape: Iterable[int], parts: Sequence[StoredTensor]) -> ExportTensor:
    """Return the parameter of the first elements of `parts`; the rest is padding."""
    sizes = tuple(shape)
    wanted = math.prod(sizes)
    kept = []
    for part in parts:
        here = min(wanted, part.numel)
        if here:
            nbytes = here * part.dtype.itemsize
            kept.append(StoredTensor(name, part.path, part.offset, nbytes, part.dtype, (here,)))
            wanted -= here
    if wanted or len({part.dtype for part in parts}) > 1:
        raise ValueError(f"{name} of shape {sizes} lacks {wanted} elements, or has parts of several dtypes")
    return ExportTensor(name, parts[0].dtype, sizes, tuple(kept))

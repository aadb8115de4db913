"""Reads the fp32 weights of a DeepSpeed ZeRO checkpoint (stages 1, 2, 3), without DeepSpeed, and runs no pickles.

Each rank has a file with its part of the fp32 master weights, flattened: in stages 1 and 2 a part of all parameters of
a group in sequence; in stage 3 the same fraction of every parameter. The model's own file has names and shapes, in the
same order. So a parameter is a sequence of ranges of the ranks' files, and is exported from there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from swapper.checkpoint.writers import ExportTensor
from swapper.errors import CheckpointError, IoError
from swapper.formats.pickle_reader import TensorView
from swapper.formats.sources import FileStamp
from swapper.formats.stored import StoredTensor, are_sizes
from swapper.formats.torch_file import TorchFile, read_torch_file

T = TypeVar("T")
LATEST = "latest"
OPTIMIZER_SUFFIX = "_optim_states.pt"
MODEL_SUFFIX = "_model_states.pt"


def find(path: Path) -> Path | None:
    """Return the directory with the ranks' files, if `path` is one or has a file `latest` that names one."""
    if any(path.glob(f"*{OPTIMIZER_SUFFIX}")):
        return path
    latest = path / LATEST
    if latest.is_file() and latest.stat().st_size < 1000:
        name = latest.read_text(errors="replace").strip()
        if Path(name).name == name and name not in ("", ".", "..") and any((path / name).glob(f"*{OPTIMIZER_SUFFIX}")):
            return path / name
    return None


def read(path: Path) -> tuple[list[ExportTensor], dict[Path, FileStamp]]:
    """Return the locations of the fp32 weights in the directory `path`, a result of `find`, and its files' stamps.

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

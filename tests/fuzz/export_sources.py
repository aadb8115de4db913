"""Writes checkpoints with torch's writers, safetensors' and ours, and reads them with plain libraries, for exports.py."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.api import CheckpointException

import swapper
from fuzz.cases import Impossible, Program
from swapper.checkpoint.dcp import StorageWriter
from swapper.checkpoint.quantization import layouts_of
from swapper.formats.sources import open_source

Tensors = dict[str, torch.Tensor]

# --- tensors ----------------------------------------------------------------------------------------------------------

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    )
}
SHAPES: dict[str, tuple[int, ...]] = {
    "number": (),
    "one": (1,),
    "empty": (0,),
    "no rows": (0, 3),
    "no columns": (3, 0, 2),
    "row": (7,),
    "matrix": (13, 5),
    "sector": (64, 64),
    "many": (2, 3, 1, 2, 5),
    "large": (70, 1001),
}


def filled(shape: tuple[int, ...], dtype: torch.dtype, chance: random.Random) -> torch.Tensor:
    """Return a tensor of random bytes: all values, NaNs with all payloads."""
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return (torch.frombuffer(bytearray(chance.randbytes(count + 1)), dtype=torch.uint8)[:count] > 127).view(shape)
    return (
        torch.frombuffer(bytearray(chance.randbytes(count * dtype.itemsize + 16)), dtype=dtype)[:count]
        .clone()
        .view(shape)
    )


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.mT if tensor.dim() > 1 else tensor,
    "permuted": lambda tensor: tensor.permute(tuple(reversed(range(tensor.dim())))),
    "every second": lambda tensor: tensor[::2] if tensor.dim() else tensor,
    "part": lambda tensor: tensor[1:] if tensor.dim() else tensor,
    "columns": lambda tensor: tensor[..., 1:-1] if tensor.dim() else tensor,
    "expanded": lambda tensor: tensor.unsqueeze(0).expand(3, *tensor.shape),
    "broadcast": lambda tensor: tensor.reshape(-1)[:1].expand(5) if tensor.numel() else tensor,
    "windows": lambda tensor: tensor.reshape(-1).unfold(0, 3, 1) if tensor.numel() > 3 else tensor,
    "parameter": lambda tensor: nn.Parameter(tensor, requires_grad=tensor.is_floating_point()),
    "conjugate": lambda tensor: tensor.conj(),
    "imaginary": lambda tensor: tensor.imag if tensor.is_complex() else tensor,
    "negated": lambda tensor: tensor.conj().imag if tensor.is_complex() else tensor,
    "sparse": lambda tensor: tensor.float().to_sparse() if tensor.dim() else tensor,
}
LIKELY = {"plain": 8, "sparse": 0.3, "conjugate": 0.3, "negated": 0.3}
NAMES = [
    *("weight", "a.weight", "a.bias", "layers.0.weight", "layers.1.weight", "model.norm", "module.a", "state_dict.b"),
    *("a.b.c.d", "", " ", ".", "a.", ".a", "a/b", "../a", "ä", "\U0001f9ee", "x\ny", 'say "a"', "back\\slash", "data"),
    *("__metadata__", "0", "1.5", "optimizer.state.0.exp_avg", "step", "n" * 300, "a weight"),
]
OTHERS: dict[str, Any] = {
    "step": 12,
    "lr": 1e-3,
    "text": "ü",
    "history": [0.5, {"lr": 0.1}],
    "nothing": None,
    "empty": {},
    "set": {1, 2},
    "size": torch.Size([3, 4]),
    "dtype": torch.bfloat16,
    "ordered": OrderedDict(a=1),
    "bytes": bytearray(b"abc"),
    "large": 1 << 80,
    "optimizer": {
        "state": {0: {"exp_avg": torch.ones(5), "step": torch.tensor(3.0)}},
        "param_groups": [{"params": [0]}],
    },
    "nested": [torch.ones(2), (torch.zeros(3), [torch.arange(4)])],
}


def tensors_of(program: Program) -> Tensors:
    """Return the tensors of a program by name; some share a storage."""
    chance = random.Random(program["seed"])
    found: Tensors = {}
    bases: dict[tuple[str, str], torch.Tensor] = {}
    for name, dtype, shape, form, is_shared in program["tensors"]:
        fresh = filled(SHAPES[shape], DTYPES[dtype], chance)
        base = bases.setdefault((dtype, shape), fresh) if is_shared else fresh
        try:
            found[name] = FORMS[form](base)
        except RuntimeError as error:
            raise Impossible(str(error)) from error
    return found


# --- writers ----------------------------------------------------------------------------------------------------------


def whole(program: Program, tensors: Tensors) -> dict[str, Any]:
    """Return the state that is written: the model under its key, with other entries."""
    others = {name: OTHERS[name] for name in program["others"]}
    key = program["key"]
    state: dict[str, Any] = {key: tensors, **others} if key else {**others, **tensors}
    names = [name for name, _ in flat(state)]
    if len(set(names)) < len(names) or len(state) < len(others) + (1 if key else len(tensors)):
        raise Impossible("two of one name")
    return state


def by_torch(program: Program, tensors: Tensors, path: Path) -> None:
    torch.save(whole(program, tensors), path)


def by_swapper(program: Program, tensors: Tensors, path: Path) -> None:
    swapper.checkpoint.save(whole(program, tensors), path, durable=False)


def safetensors_alone(program: Program, tensors: Tensors, path: Path) -> None:
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, path, {"by": "me", "format": "pt"})


def shards(tensors: Tensors, path: Path, name: str, write: Callable[[Tensors, Path], None]) -> None:
    """Write several files and their index. `name` has the suffix of all."""
    path.mkdir()
    index: dict[str, str] = {}
    count, suffix = min(len(tensors), 3), Path(name).suffix
    for number in range(count):
        names = list(tensors)[number::count]
        index |= dict.fromkeys(names, f"part-{number}{suffix}")
        write({name: tensors[name] for name in names}, path / f"part-{number}{suffix}")
    (path / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def huggingface(program: Program, tensors: Tensors, path: Path) -> None:
    shards(tensors, path, "model.safetensors", lambda part, file: safetensors_alone(program, part, file))


def bin_shards(program: Program, tensors: Tensors, path: Path) -> None:
    shards(tensors, path, "pytorch_model.bin", lambda part, file: torch.save(part, file))


def bin_alone(program: Program, tensors: Tensors, path: Path) -> None:
    path.mkdir()
    torch.save(tensors, path / "pytorch_model.bin")


class Cutting(dcp.DefaultSavePlanner):
    """Writes each tensor in chunks, as several processes would that share it."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    def create_local_plan(self) -> planner.SavePlan:
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in self._parts(item)]
        self._chance.shuffle(items)
        self.plan = planner.SavePlan(items, planner_data=plan.planner_data)
        return self.plan

    def _parts(self, item: planner.WriteItem) -> Iterator[planner.WriteItem]:
        data = item.tensor_data
        is_sparse = data is not None and self.state_dict[item.index.fqn].layout is not torch.strided
        if data is None or is_sparse or not data.size.numel() or not data.size or self._chance.random() < 0.4:
            yield item
            return
        cuts = [self._edges(length) for length in data.size]
        boxes: list[list[tuple[int, int]]] = [[]]
        for edges in cuts:
            boxes = [[*box, (begin, end)] for box in boxes for begin, end in pairwise(edges)]
        for box in boxes:
            offsets, sizes = torch.Size(b for b, _ in box), torch.Size(e - b for b, e in box)
            chunk = described.ChunkStorageMetadata(offsets, sizes)
            index = described.MetadataIndex(item.index.fqn, offsets)
            yield planner.WriteItem(
                index,
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, data.properties, data.size),
            )

    def _edges(self, length: int) -> list[int]:
        return sorted({0, length, *(self._chance.randrange(length) for _ in range(self._chance.randint(0, 2)))})

    def resolve_data(self, write_item: planner.WriteItem) -> Any:
        if write_item.type is not planner.WriteItemType.SHARD:
            return super().resolve_data(write_item)
        chunk = write_item.tensor_data.chunk
        within = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        return self.state_dict[write_item.index.fqn].detach()[within]


def dcp_by(program: Program, tensors: Tensors, path: Path, writer: type) -> None:
    chance = random.Random(program["seed"])
    cutting = Cutting(chance) if program["piece"] else None
    threads = program["threads"]
    storage = writer(path, thread_count=threads, single_file_per_rank=threads != 2)
    dcp.save(whole(program, tensors), storage_writer=storage, planner=cutting, no_dist=True)


WRITERS: dict[str, Callable[[Program, Tensors, Path], None]] = {
    "torch": by_torch,
    "swapper": by_swapper,
    "safetensors": safetensors_alone,
    "huggingface": huggingface,
    "bin": bin_alone,
    "bin shards": bin_shards,
    "dcp": lambda program, tensors, path: dcp_by(program, tensors, path, dcp.FileSystemWriter),
    "dcp by swapper": lambda program, tensors, path: dcp_by(program, tensors, path, StorageWriter),
}
OURS = ("swapper", "dcp by swapper")
CANNOT = (
    *(RuntimeError, ValueError, TypeError, KeyError, OSError, safetensors.SafetensorError, CheckpointException),
    swapper.CheckpointError,
)
"""What says that a writer or a reader cannot do it."""
FLAT = ("safetensors", "huggingface", "bin", "bin shards")
"""Writers whose files have tensors alone."""

# --- what plain libraries read ----------------------------------------------------------------------------------------


def flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else None
    if items is None:
        yield name, tree
    else:
        for key, value in items:
            yield from flat(value, f"{name}.{key}" if name else str(key))


def content_of(path: Path) -> dict[str, Any]:
    """Return what plain libraries read, by path; of what is quantized, the values."""
    if path.is_file() and path.read_bytes()[:2] == b"PK":
        return dict(flat(torch.load(path, weights_only=True)))
    if (path / ".metadata").exists():
        entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        found = {
            n: torch.empty(e.size, dtype=e.properties.dtype) if hasattr(e, "size") else None for n, e in entries.items()
        }
        dcp.load(found, checkpoint_id=path, no_dist=True)
        return found
    if path.is_dir() and any(path.glob("*.bin")):
        return {name: tensor for file in path.glob("*.bin") for name, tensor in torch.load(file).items()}
    tensors: Tensors = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        tensors |= safetensors.torch.load_file(file)
    layouts = layouts_of(open_source(path).metadata, path)
    return {n: layouts[n].dequantise(t, layouts[n].torch_dtype) if n in layouts else t for n, t in tensors.items()}

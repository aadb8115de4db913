"""Writes checkpoints drawn from a seed, exports them from format to format, and compares what plain libraries read of each.

Usage: tools/fuzz exports [--minutes N] [--cases N] [--seed N] [--program JSON]

A program is a writer (torch's, safetensors', ours), tensors of any dtype, form and name, and what is done with the checkpoint:
exports, loads, inspections (export_sources.py has the first two). Each runs in a process of its own. Another byte, name,
dtype or shape, an error that is not a refusal of what a format lacks, a file that a refusal leaves behind, a crash or a hang
is a failure: it is made smaller, and printed as JSON that `--program` repeats.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from checkpoint.equality import assert_same
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import swapper
from fuzz.cases import Impossible, Kind, Program, equal, outcome, run
from fuzz.export_sources import (
    CANNOT,
    DTYPES,
    FLAT,
    FORMS,
    LIKELY,
    NAMES,
    OTHERS,
    OURS,
    SHAPES,
    WRITERS,
    Tensors,
    content_of,
    tensors_of,
)
from swapper.checkpoint import writers
from swapper.checkpoint.dcp import StorageReader
from swapper.checkpoint.exporting import FORMATS, MODEL_KEYS, export, select
from swapper.checkpoint.quantization import layouts_of
from swapper.errors import CheckpointError
from swapper.formats.safetensors import DTYPES as IN_SAFETENSORS
from swapper.formats.sources import open_source

PLAIN = {"writer": "torch", "key": "", "others": [], "piece": 0, "threads": 1}
"""What a smaller program has, where it fails so too."""


def assert_content(found: Mapping[str, Any], wanted: Mapping[str, torch.Tensor], name: str) -> None:
    missing, more = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    assert not missing and not more, f"{name}: lost {missing}, has {more} more"
    for key, tensor in wanted.items():
        assert equal(found[key], tensor), f"{name}: {key!r} is another one"


class Checkpoint:
    """A checkpoint, and what it has."""

    def __init__(self, program: Program, directory: Path) -> None:
        self.program = program
        self.directory = directory
        self.tensors = tensors_of(program)
        self.path = directory / "0"
        self.number = 0

    def fresh(self) -> Path:
        self.number += 1
        return self.directory / str(self.number)

    def run(self) -> None:
        self._write()
        piece = self.program["piece"] or writers.PIECE_ELEMENTS
        with patch.multiple(writers, PIECE_ELEMENTS=piece, BOX_BYTES=16 * piece):
            for number, (name, seed) in enumerate(self.program["steps"]):
                try:
                    STEPS[name](self, random.Random(seed))
                except BaseException as error:
                    error.args = (f"[{number} {name}] {error}", *error.args[1:])
                    raise

    def _write(self) -> None:
        kind = self.program["writer"]
        try:
            WRITERS[kind](self.program, self.tensors, self.path)
        except CANNOT as error:
            is_of_dcp = isinstance(error, CheckpointException)
            causes = [each for each, _ in error.failures.values()] if is_of_dcp else [error]
            if kind in OURS and not all(isinstance(cause, CheckpointError) for cause in causes):
                raise
            raise Impossible(f"{type(error).__name__}: {error}") from error
        try:
            content_of(self.path)
        except CANNOT as error:
            raise Impossible(f"{type(error).__name__}: {error}") from error

    @property
    def is_first(self) -> bool:
        return self.path.name == "0"

    @property
    def is_zip(self) -> bool:
        return self.path.is_file() and self.path.read_bytes()[:2] == b"PK"

    def content(self) -> Tensors:
        """Return its tensors, by path."""
        return {name: value for name, value in content_of(self.path).items() if isinstance(value, torch.Tensor)}

    def model(self) -> Tensors:
        """Return the tensors that an export of the model has, by the model's names."""
        return self.tensors if self.is_first and self.program["key"] else self.content()

    def export(self, to: str, **options: Any) -> Path | None:
        """Export it. Returns where to; None if that is refused, as it must be."""
        target = self.fresh()
        before = {path.name for path in self.directory.iterdir()}
        try:
            export(self.path, target, to, **options)
            return target
        except CheckpointError:
            if not self.is_refused(to):
                raise
        left = {path.name for path in self.directory.iterdir()} - before
        assert not left, f"a refusal left {left}"
        return None

    def is_refused(self, to: str) -> bool:
        """Return whether a format lacks something of it, or swapper says that it does not read it."""
        if self.is_first and any(
            t.layout is not torch.strided or t.is_conj() or t.is_neg() for t in self.tensors.values()
        ):
            return True
        has = self.content()
        is_lacking = any(
            tensor.dtype not in IN_SAFETENSORS.values() or name.endswith("__metadata__") for name, tensor in has.items()
        )
        return not has or (to in ("safetensors", "huggingface") and is_lacking)


# --- steps ------------------------------------------------------------------------------------------------------------

SHARD_BYTES = (1, 100, 10000, 10**9)


def to_format(checkpoint: Checkpoint, chance: random.Random) -> None:
    to = chance.choice(FORMATS)
    wanted = checkpoint.model()
    target = checkpoint.export(to, shard_bytes=chance.choice(SHARD_BYTES))
    if target is not None:
        assert_content(content_of(target), wanted, to)
        checkpoint.path = target


def quantized(checkpoint: Checkpoint, chance: random.Random) -> None:
    to, scheme = chance.choice(["safetensors", "huggingface"]), chance.choice(["int8", "int4"])
    wanted = checkpoint.model()
    target = checkpoint.export(to, quantize=scheme, shard_bytes=chance.choice(SHARD_BYTES))
    if target is not None:
        found, layouts = content_of(target), layouts_of(open_source(target).metadata, target)
        assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
            n: (t.dtype, t.shape) for n, t in wanted.items()
        }
        assert_content(*({n: t for n, t in of.items() if n not in layouts} for of in (found, wanted)), to)
        checkpoint.path = target


def all_of_it(checkpoint: Checkpoint, chance: random.Random) -> None:
    """Everything, as one torch file or flat."""
    to = chance.choice(FORMATS)
    target = checkpoint.export(to, what="all")
    if target is None:
        return
    if checkpoint.is_zip and to == "torch":
        assert_same(torch.load(target), torch.load(checkpoint.path))
    else:
        assert_content(content_of(target), checkpoint.content(), f"all as {to}")


def load(checkpoint: Checkpoint, chance: random.Random) -> None:
    if checkpoint.is_zip:
        found = swapper.checkpoint.load(checkpoint.path, mmap=chance.random() < 0.5, verify=chance.random() < 0.5)
        assert_same(found, torch.load(checkpoint.path))


def save_again(checkpoint: Checkpoint, chance: random.Random) -> None:
    """Load and save what a file has, by swapper and by torch."""
    if checkpoint.is_zip:
        loaded = swapper.checkpoint.load(checkpoint.path, mmap=chance.random() < 0.5)
        target = checkpoint.fresh()
        (swapper.checkpoint.save if chance.random() < 0.7 else torch.save)(loaded, target)
        assert_same(torch.load(target), torch.load(checkpoint.path))


def by_reader(checkpoint: Checkpoint, chance: random.Random) -> None:
    """A directory of torch.distributed.checkpoint by swapper's reader."""
    if (checkpoint.path / ".metadata").exists():
        wanted = content_of(checkpoint.path)
        found = {n: torch.empty_like(v) if isinstance(v, torch.Tensor) else None for n, v in wanted.items()}
        dcp.load(found, storage_reader=StorageReader(checkpoint.path), no_dist=True)
        assert_same(found, wanted)


def listed(checkpoint: Checkpoint, chance: random.Random) -> None:
    """What is chosen of everything, and inspected, is what is there."""
    content = checkpoint.content()
    try:
        chosen = select(checkpoint.path, "all")
    except CheckpointError:
        if not checkpoint.is_refused("torch"):
            raise
        return
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in chosen.tensors}
    assert found == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in content.items()}
    swapper.checkpoint.inspect(checkpoint.path)


def weights_of(tensors: Tensors) -> nn.Module:
    """Return a model on meta whose state dict has such tensors; of a name that is a module's and a weight's, nothing."""
    model = nn.Module()
    for name, tensor in tensors.items():
        *path, own = name.split(".")
        module = model
        for part in path:
            if part not in module._modules and part not in module._parameters:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        module.register_parameter(own, nn.Parameter(value, requires_grad=False))
    return model


def weights(checkpoint: Checkpoint, chance: random.Random) -> None:
    """Load it as a model's weights."""
    wanted = checkpoint.model()
    try:
        model = weights_of(wanted)
    except KeyError:  # names that no model has
        return
    try:
        swapper.load(model, checkpoint.path, host_memory=chance.choice(["8MiB", "64MiB"]))
    except CheckpointError:
        if not checkpoint.is_refused("torch"):
            raise
        return
    assert_content(model.state_dict(), wanted, "weights")
    swapper.loaded(model).unload()


STEPS: dict[str, Callable[[Checkpoint, random.Random], None]] = {
    "export": to_format,
    "quantized": quantized,
    "all": all_of_it,
    "load": load,
    "save": save_again,
    "reader": by_reader,
    "list": listed,
    "weights": weights,
}
WEIGHTS = [6, 1, 2, 2, 1, 2, 1, 2]


def draw(seed: str) -> Program:
    """Return the program of a seed."""
    chance = random.Random(seed)
    writer = chance.choice(list(WRITERS))
    names = chance.sample(NAMES, chance.choice([1, 2, 4, 8]))
    dtypes = (
        list(DTYPES)
        if chance.random() < 0.4
        else [name for name, dtype in DTYPES.items() if dtype in IN_SAFETENSORS.values()]
    )
    tensors = [
        [
            name,
            chance.choice(dtypes),
            chance.choice(list(SHAPES)),
            chance.choices(list(FORMS), [LIKELY.get(form, 1) for form in FORMS])[0],
            chance.random() < 0.3,
        ]
        for name in names
    ]
    is_flat = writer in FLAT
    return {
        "seed": chance.randrange(1 << 30),
        "writer": writer,
        "tensors": tensors,
        "key": "" if is_flat else chance.choice(["", "", *MODEL_KEYS]),
        "others": [] if is_flat else chance.sample(list(OTHERS), chance.choice([0, 0, 1, 3])),
        "piece": chance.choice([0, 0, 7, 64, 1000]),
        "threads": chance.choice([1, 1, 2, 5]),
        "steps": [
            [name, chance.randrange(1000)] for name in chance.choices(list(STEPS), WEIGHTS, k=chance.randint(1, 6))
        ],
    }


def run_case(program: Program, directory: Path) -> str | None:
    """Return what went wrong, None if nothing did; REFUSED and why, if what writes the checkpoint cannot do it."""
    return outcome(lambda: Checkpoint(program, directory).run(), ())


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with a part less."""
    for name in ("steps", "tensors", "others"):
        for number in range(len(program[name])):
            yield {**program, name: program[name][:number] + program[name][number + 1 :]}
    for number, (name, dtype, shape, form, is_shared) in enumerate(program["tensors"]):
        simple = ("weight", "float32", "row", "plain", False)
        for place, value in enumerate(simple):
            tensor = [name, dtype, shape, form, is_shared]
            if tensor[place] != value and (place or all(each[0] != value for each in program["tensors"])):
                tensor[place] = value
                yield {**program, "tensors": [*program["tensors"][:number], tensor, *program["tensors"][number + 1 :]]}
    yield from ({**program, name: value} for name, value in PLAIN.items() if program[name] != value)


EXPORTS = Kind("exports", __doc__ or "", draw, run_case, smaller)


if __name__ == "__main__":
    sys.exit(run(EXPORTS, sys.argv[1:]))

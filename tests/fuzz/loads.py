"""Calls models with their weights on the drive, and the same in memory, as programs drawn from a seed say: equal bit for bit.

Usage: tools/fuzz loads [--minutes N] [--cases N] [--seed N] [--program JSON]

A program is a model of the layers of program_layers.py, a file of its weights, options of `swapper.load`, and calls: forwards,
alone, in threads and by `map`, reads of weights, forwards that fail half-way, and loading again with another budget. Each program
runs in a process of its own (cases.py).
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from infer.host_device import ORDERS, HostDevice
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp

import swapper
from fuzz.cases import Impossible, Kind, Program, equal, outcome, run
from fuzz.program_layers import LAYERS, VOCABULARY, WRAPPERS, Model
from swapper.errors import BudgetError, UnsupportedError

PLAIN = {"file": "torch", "tied": False, "dtype": None, "device": None, "room": 1 << 24, "meta": True, "bf16": False}
"""What a smaller program has, where it fails so too."""
MODES = (torch.no_grad, torch.inference_mode)


class Broken(Exception):
    """A forward's own error."""


def save_torch(model: nn.Module, directory: Path) -> Path:
    torch.save(model.state_dict(), directory / "model.pt")
    return directory / "model.pt"


def save_safetensors(model: nn.Module, directory: Path) -> Path:
    values = {name: value.clone().contiguous() for name, value in model.state_dict().items()}
    save_file(values, directory / "model.safetensors")
    return directory / "model.safetensors"


def save_dcp(model: nn.Module, directory: Path) -> Path:
    dcp.save(model.state_dict(), checkpoint_id=directory / "dcp")
    return directory / "dcp"


FILES = {"torch": save_torch, "safetensors": save_safetensors, "dcp": save_dcp}


class Loads:
    """The two models of a program."""

    def __init__(self, program: Program, directory: Path) -> None:
        self.program, self.directory = program, directory
        self.plain = self.make()
        if program["bf16"]:
            self.plain.bfloat16()
        self.plain.requires_grad_(False)  # else torch multiplies transposed batches by another route
        if program["file"] == "safetensors":  # which keeps no strides
            for parameter in self.plain.parameters():
                parameter.data = parameter.data.contiguous()
        self.path = FILES[program["file"]](self.plain, directory)
        self.dtype = None if program["dtype"] is None else getattr(torch, program["dtype"])
        if self.dtype is not None:
            self.plain.to(self.dtype)
        self.device = None if program["device"] is None else HostDevice(program["device"])
        self.room = program["room"]
        self.model = self.load()

    def make(self) -> Model:
        torch.manual_seed(self.program["seed"])
        return Model(self.program["layers"], self.program["tied"]).eval()

    def load(self) -> nn.Module:
        """Return another model, loaded with the smallest budgets, each named once, and what the program has in addition."""
        there: dict[str, Any] = {"host_memory": 1, "dtype": self.dtype}
        if self.device is not None:
            there |= {"device": self.device, "device_memory": 1}
        while True:
            if self.program["meta"]:
                with swapper.without_weights():
                    model = self.make()
            else:
                model = self.make()
            if self.program["bf16"]:
                model.bfloat16()
            try:
                return swapper.load(model, self.path, **there)
            except BudgetError as error:
                assert there[error.option] == 1 and error.smallest_bytes, error
                there[error.option] = error.smallest_bytes + self.room

    def run(self) -> None:
        """Raises AssertionError where they differ."""
        for number, (name, seed) in enumerate(self.program["calls"]):
            try:
                CALLS[name](self, random.Random(seed))
            except BaseException as error:
                error.args = (f"[{number} {name}] {error}", *error.args[1:])
                raise
        self.end()

    @property
    def mixes_callers(self) -> bool:
        """Whether a forward draws numbers, which those of threads do in any order, or changes its module meanwhile.

        In plain torch too a layer that several threads compile at once may round otherwise.
        """
        mixing = ("dropped", "functional", "compiled")
        return any(kind in name for kind in mixing for name in self.program["layers"])

    def end(self) -> None:
        swapper.loaded(self.model).unload()

    def expected(self, value: torch.Tensor, seed: int, part: nn.Module | None = None) -> torch.Tensor:
        """Return the result of the model in memory, or of a part of it. Raises Impossible if it has none."""
        with torch.no_grad():
            torch.manual_seed(seed)
            try:
                return (self.plain if part is None else part)(value)
            except Exception as error:
                raise Impossible(f"{type(error).__name__}: {error}") from error


def tokens(chance: random.Random) -> torch.Tensor:
    shape = chance.choice([1, 1, 2, 4]), chance.choice([1, 3, 17])
    return torch.tensor([[chance.randrange(VOCABULARY) for _ in range(shape[1])] for _ in range(shape[0])])


def forward(loads: Loads, chance: random.Random) -> None:
    ids, seed, mode = tokens(chance), chance.randrange(1000), chance.choice(MODES)
    expected = loads.expected(ids, seed)
    with mode():
        torch.manual_seed(seed)
        actual = loads.model(ids)
    assert equal(actual, expected), "other results"


def part(loads: Loads, chance: random.Random) -> None:
    """Call a layer by itself."""
    number, seed = chance.randrange(len(loads.plain.layers)), chance.randrange(1000)
    dtype = loads.plain.embedding.weight.dtype
    value = torch.randn(2, 3, loads.plain.scale.numel(), generator=torch.Generator().manual_seed(seed)).to(dtype)
    expected = loads.expected(value.clone(), seed, loads.plain.layers[number])
    with torch.no_grad():
        torch.manual_seed(seed)
        actual = loads.model.layers[number](value.clone())
    assert equal(actual, expected), "other results of a layer"


def read(loads: Loads, chance: random.Random) -> None:
    """Look at some weights, in several ways."""
    theirs = dict(loads.plain.named_parameters())
    for name, parameter in chance.sample(list(loads.model.named_parameters()), min(3, len(theirs))):
        expected = theirs[name].detach()
        way = chance.choice(["equal", "sum", "item", "clone", "shape"])
        with torch.no_grad():
            if way == "equal":
                assert equal(parameter, expected), f"{name} has other values"
            elif way == "sum":
                assert equal(parameter.sum(), expected.sum()), f"{name} has another sum"
            elif way == "item" and expected.numel():
                assert parameter.flatten()[-1].item() == expected.flatten()[-1].item(), f"{name} has another last value"
            elif way == "clone":
                assert equal(parameter.clone(), expected), f"a clone of {name} has other values"
            else:
                assert (parameter.shape, parameter.dtype) == (expected.shape, expected.dtype), (
                    f"{name} is another tensor"
                )


def read_all(loads: Loads, chance: random.Random) -> None:
    """Compare the whole state_dict."""
    theirs = loads.plain.state_dict()
    mine = loads.model.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert equal(value, theirs[name]), f"{name} of state_dict has other values"


def fail(loads: Loads, chance: random.Random) -> None:
    """Have a forward fail in one of its modules, or after it."""

    def strike(*_: object) -> None:
        raise Broken

    module = chance.choice(list(loads.model.modules()))
    handle = (module.register_forward_pre_hook if chance.random() < 0.5 else module.register_forward_hook)(strike)
    ids, seed = tokens(chance), chance.randrange(1000)
    loads.expected(ids, seed)
    try:
        with torch.no_grad():
            torch.manual_seed(seed)
            loads.model(ids)
        assert module is not loads.model, "the error of a hook was lost"
    except Broken:
        pass
    finally:
        handle.remove()


def by_map(loads: Loads, chance: random.Random) -> None:
    batches = [tokens(chance) for _ in range(chance.randint(1, 4))]
    if loads.mixes_callers:
        return
    expected = [loads.expected(ids, 0) for ids in batches]
    with torch.no_grad():
        found = swapper.loaded(loads.model).map(loads.model, batches, at_once=chance.choice([None, 1, 2]))
    assert all(map(equal, found, expected)), "other results of map"


def in_threads(loads: Loads, chance: random.Random) -> None:
    batches = [tokens(chance) for _ in range(chance.randint(2, 4))]
    if loads.mixes_callers:
        return
    expected = [loads.expected(ids, 0) for ids in batches]
    found: dict[int, Any] = {}

    def work(number: int, ids: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                found[number] = loads.model(ids)
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=work, args=each) for each in enumerate(batches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in enumerate(expected):
        if isinstance(found[number], BaseException):
            raise found[number]
        assert equal(found[number], result), "other results in a thread"


def again(loads: Loads, chance: random.Random) -> None:
    """Unload, and load with another budget."""
    loads.end()
    loads.room = chance.choice(ROOMS)
    loads.model = loads.load()


def verify(loads: Loads, chance: random.Random) -> None:
    swapper.loaded(loads.model).verify()


CALLS: dict[str, Callable[[Loads, random.Random], None]] = {
    "forward": forward,
    "part": part,
    "read": read,
    "read all": read_all,
    "fail": fail,
    "map": by_map,
    "threads": in_threads,
    "again": again,
    "verify": verify,
}
WEIGHTS = [6, 2, 2, 1, 2, 1, 1, 1, 1]
ROOMS = [0, 0, 1 << 16, 1 << 20, 1 << 24]
UNUSABLE = ("max norm", "in two", "checkpoint", "reentrant")
"""Layers that change their weights in a forward, or that are for training."""


def draw(seed: str) -> Program:
    """Return the program of a seed."""
    chance = random.Random(seed)
    kinds, wrappers = ([name for name in of if name not in UNUSABLE] for of in (LAYERS, WRAPPERS))
    layers = []
    for _ in range(chance.choice([1, 3, 8, 16])):
        around = chance.choices(wrappers, k=chance.choice([0, 0, 0, 1, 1, 2]))
        layers.append("+".join([*around, chance.choice(kinds)]) if chance.random() < 0.92 else "again")
    names = ["forward", *chance.choices(list(CALLS), WEIGHTS, k=chance.randint(2, 8))]
    return {
        "seed": chance.randrange(1 << 30),
        "layers": layers,
        "tied": chance.random() < 0.3,
        "file": chance.choice(list(FILES)),
        "dtype": chance.choice([None, None, "bfloat16", "float32"]),
        "bf16": chance.random() < 0.3,
        "device": chance.choice([None, None, None, *ORDERS]),
        "meta": chance.random() < 0.7,
        "room": chance.choice(ROOMS),
        "calls": [[name, chance.randrange(1000)] for name in names],
    }


def run_case(program: Program, directory: Path) -> str | None:
    """Return what went wrong, None if nothing did; REFUSED and why, if swapper or what it is compared with cannot do it."""
    return outcome(lambda: Loads(program, directory).run(), (BudgetError, UnsupportedError))


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with a part less."""
    for name in ("calls", "layers"):
        for number in range(len(program[name])):
            yield {**program, name: program[name][:number] + program[name][number + 1 :]}
    for number, layer in enumerate(program["layers"]):
        for one in [layer.split("+", 1)[1]] if "+" in layer else ["linear"] if layer != "linear" else []:
            yield {**program, "layers": [*program["layers"][:number], one, *program["layers"][number + 1 :]]}
    yield from ({**program, name: value} for name, value in PLAIN.items() if program[name] != value)


LOADS = Kind("loads", __doc__ or "", draw, run_case, smaller)


if __name__ == "__main__":
    sys.exit(run(LOADS, sys.argv[1:]))

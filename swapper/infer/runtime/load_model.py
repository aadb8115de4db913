"""`load`: a model runs with its weights read from the user's files; `shared_memory`: several do, in one budget.

Finds out what fits where, and opens everything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from swapper.device.device import Device
from swapper.device.device_placement import DeviceBudget
from swapper.errors import ConfigError, StateError, UnsupportedError
from swapper.formats.sources import FileStamp, Rename, Source, open_source
from swapper.formats.stored import ConcatenatedFile
from swapper.infer.mapping.matching import Match, match
from swapper.infer.planning.fitting import fit, fit_on_device
from swapper.infer.planning.streaming_plan import build_streaming_plan
from swapper.infer.runtime.loaded_model import KEY, LoadedModel
from swapper.modules.models import Models
from swapper.options import parse_host_memory
from swapper.runtime.interrupts import defer_sigint


class SharedBudget:
    """What was loaded inside of one `shared_memory`: it is noted, and opened at the end, when it is known what has to share."""

    def __init__(self) -> None:
        self._loads: list[tuple[nn.Module, Source, Match, str]] = []

    def add(self, model: nn.Module, source: Source, matched: Match, backend: str) -> None:
        """
        Raises:
            StateError: a parameter belongs to a model that is here already.
        """
        known = {id(weight.parameter) for _, _, match, _ in self._loads for weight in match.weights}
        for weight in matched.weights:
            if id(weight.parameter) in known:
                raise StateError(f"parameter {weight.name} belongs to another model that shares this memory")
        self._loads.append((model, source, matched, backend))

    @property
    def is_empty(self) -> bool:
        return not self._loads

    def whole(self) -> tuple[nn.Module, Source, Match, str]:
        """Return all of it as one model, its source, what matches, and the I/O backend."""
        models: dict[str, nn.Module] = {}
        weights, buffers = [], []
        stamps: dict[Path, FileStamp] = {}
        joined: dict[Path, ConcatenatedFile] = {}
        for model, source, matched, _ in self._loads:
            name = type(model).__name__
            while name in models:
                name += "'"
            models[name] = model
            weights += [replace(weight, name=f"{name}.{weight.name}") for weight in matched.weights]
            buffers += matched.buffers
            stamps.update(source.stamps)
            joined.update(source.joined)
        first = self._loads[0][1]
        backends = {backend for *_, backend in self._loads}
        if len(backends) > 1:
            raise ConfigError(f"models that share memory have one backend, not {', '.join(sorted(backends))}")
        source = Source(first.path, first.kind, {}, stamps, {}, joined)
        return Models(models), source, Match(weights, buffers), backends.pop()


_room: ContextVar[SharedBudget | None] = ContextVar("room", default=None)


def load(
    model: nn.Module,
    source: str | os.PathLike[str] | Source,
    *,
    host_memory: int | str = "auto",
    device: str | torch.device | Device = "cpu",
    device_memory: int | str = "auto",
    strict: bool = True,
    dtype: torch.dtype | None = None,
    rename: Rename = None,
    backend: str = "auto",
) -> nn.Module:
    """Have `model` run with its weights read from `source` as they are needed, and return it.

    The files are read in place and never written. A forward brings each module's weights in before it runs, and reads ahead;
    what `host_memory` can hold stays. Outputs are those of the model in memory, bit for bit. Gradients do not flow.
    This runs a model whose weights stay in their file; `swapper.checkpoint.load` reads a file into memory, as torch.load does.

    Args:
        model: built on the meta device (better: `with swapper.without_weights():`) or on the CPU. On the meta device its
            parameters are replaced by new objects; tied ones stay tied.
        source: a safetensors file, a Hugging Face directory, a torch checkpoint, a swapper snapshot, or a directory of
            torch.distributed.checkpoint. It must stay as it is for as long as the model is used.
        host_memory: bytes, or "4GiB": everything that is held of the weights at one time. "auto": half of what is free.
        device: where its kernels run: "cpu", "cuda", "cuda:1", ... Inputs are to be there.
        device_memory: bytes, or "8GiB", of weights on the device at one time. What it can hold stays there; what `host_memory`
            can hold of the rest stays in host memory. "auto": half of what is free. Not for the CPU, which has one memory.
        strict: refuse missing and unexpected names. Otherwise what is missing keeps the model's own values.
        dtype: convert floating-point weights on the way in. None: they are used in the checkpoint's own dtype.
        rename: a map from the checkpoint's names to the model's, or a function that gives the model's name or None (leave out).
        backend: of the I/O engine.

    Raises:
        ConfigError: an option is not known, or they do not go together.
        CheckpointError: the source is not what it claims to be, or does not fit the model.
        BudgetError: `host_memory` or `device_memory` is too small; says the smallest that works.
        DeviceError: there is no such device, or it fails.
        UnsupportedError: the model cannot be loaded this way.
        StateError: the model is loaded or offloaded already.
        IoError: a file cannot be read.
    """
    opened = source if isinstance(source, Source) else open_source(source)
    budgets = Budgets.of(host_memory, device, device_memory)  # before anything that takes time
    matched = match(model, opened, strict=strict, dtype=dtype, rename=rename)
    return load_matched(model, opened, matched, budgets, backend)


def load_matched(model: nn.Module, source: Source, matched: Match, budgets: Budgets, backend: str) -> nn.Module:
    """As `load`, for whoever has found out by itself which parameter gets which tensors."""
    room = _room.get()
    if room is None:
        _open(model, source, matched, budgets, backend)
    elif budgets.is_host_memory_said:
        raise ConfigError("host_memory is said inside of shared_memory, which says it for all models")
    elif budgets.device is not None:
        raise UnsupportedError(
            "models that share memory run on the CPU: give each that runs on a device a budget of its own"
        )
    else:
        room.add(model, source, matched, backend)
    return model


@contextmanager
def shared_memory(host_memory: int | str = "auto") -> Iterator[None]:
    """Have the models that are loaded inside share `host_memory`; they can be used after its end.

        with swapper.shared_memory("8GiB"):
            draft = from_pretrained(AutoModelForCausalLM, "draft")
            target = swapper.load(target, "weights")

    Args:
        host_memory: bytes, or "8GiB", for all of them. None of them says its own.

    Raises:
        As swapper.load, at the end; then none of them is loaded.
        StateError: one is inside of another.
    """
    budget_bytes = parse_host_memory(host_memory)
    if _room.get() is not None:
        raise StateError("shared_memory is used inside of another: models share one budget")
    room = SharedBudget()
    token = _room.set(room)
    try:
        yield
    finally:
        _room.reset(token)
    if not room.is_empty:
        _open_room(room, budget_bytes)


def _open_room(room: SharedBudget, host_bytes: int) -> None:
    """Load what was noted in a `shared_memory`."""
    together, source, matched, backend = room.whole()
    opened = _open(together, source, matched, Budgets(host_bytes), backend)
    for model in together.children():
        model.__dict__[KEY] = opened


@dataclass(frozen=True, slots=True)
class Budgets:
    """What a model may take.

    Attributes:
        host_bytes: of host memory.
        device, device_bytes: where its kernels run, and of that memory; None: on the CPU.
        is_host_memory_said: the user said so.
    """

    host_bytes: int
    device: Device | None = None
    device_bytes: int = 0
    is_host_memory_said: bool = False

    @staticmethod
    def of(host_memory: int | str, device: str | torch.device | Device, device_memory: int | str) -> Budgets:
        """
        Raises:
            ConfigError: an option is wrong.
            DeviceError: there is no such device.
        """
        host_bytes, is_said = parse_host_memory(host_memory), host_memory != "auto"
        given = DeviceBudget.parse(device, device_memory)
        if given is None:
            return Budgets(host_bytes, is_host_memory_said=is_said)
        return Budgets(host_bytes, given.device, given.nbytes, is_said)


def _open(model: nn.Module, source: Source, matched: Match, budgets: Budgets, backend: str) -> LoadedModel:
    blueprint = build_streaming_plan(model, matched, source.joined.keys())
    if budgets.device is None:
        fitting = fit(blueprint, budgets.host_bytes)
    else:
        other_bytes = _other_bytes(model, matched)
        fitting = fit_on_device(blueprint, budgets.host_bytes, budgets.device_bytes, other_bytes, budgets.device)
    with torch.inference_mode(False), torch.no_grad(), defer_sigint:
        cache_bytes = fitting.blueprint.cache_bytes(budgets.host_bytes)
        opened = LoadedModel(model, source, fitting, matched.buffers, cache_bytes, backend, budgets.device)
        model.__dict__[KEY] = opened
    return opened


def _other_bytes(model: nn.Module, matched: Match) -> int:
    """Of what the checkpoint does not have and a device gets too: the model's own buffers and parameters."""
    loaded = {id(weight.parameter) for weight in matched.weights}
    filled = {(id(place.module), place.name) for place in matched.buffers}
    buffers = {
        id(buffer): buffer.nbytes
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and (id(module), name) not in filled
    }
    return sum(buffers.values()) + sum(p.nbytes for p in model.parameters() if id(p) not in loaded)

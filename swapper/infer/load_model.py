"""Loads a model whose weights stay in the user's files (`load`), or several in one budget (`shared_memory`)."""

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
from swapper.device.model_device import DeviceBudget
from swapper.errors import ConfigError, StateError, UnsupportedError
from swapper.formats.sources import FileStamp, Rename, Source, open_source
from swapper.formats.stored import ConcatenatedFile
from swapper.infer.loaded_model import KEY, LoadedModel
from swapper.infer.matching import Match, match
from swapper.infer.planning.infer_placement import fit, fit_on_device
from swapper.infer.planning.streaming_plan import build_streaming_plan
from swapper.modules.groups import Models
from swapper.options import parse_host_memory
from swapper.runtime.interrupts import defer_signals


class SharedBudget:
    """Collects the loads inside of one `shared_memory`: they are opened at its end, when all that share are known."""

    def __init__(self) -> None:
        self._loads: list[tuple[nn.Module, Source, Match, str]] = []

    def add(self, model: nn.Module, source: Source, matched: Match, backend: str) -> None:
        """Note a load.

        Raises:
            StateError: a parameter belongs to a model that was added before.
        """
        known = {id(weight.parameter) for _, _, match, _ in self._loads for weight in match.weights}
        for weight in matched.weights:
            if id(weight.parameter) in known:
                raise StateError(f"parameter {weight.name} belongs to another model that shares this memory")
        self._loads.append((model, source, matched, backend))

    def open(self, host_bytes: int) -> None:
        """Load all of them as one model, if there are any.

        Raises:
            ConfigError: their backends differ.
            As swapper.load.
        """
        if not self._loads:
            return
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
        opened = _open(Models(models), source, Match(weights, buffers), Budgets(host_bytes), backends.pop())
        for model in models.values():
            model.__dict__[KEY] = opened


_shared: ContextVar[SharedBudget | None] = ContextVar("shared", default=None)


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

    The files are read in place and never written. Before a module's forward its weights are read, and others are read
    ahead; weights that fit `host_memory` stay there. Outputs are those of the model in memory, bit for bit. Gradients do
    not flow. The weights stay in their file; `swapper.checkpoint.load` reads a file into memory, as torch.load does.

    Args:
        model: built on the meta device (better: `with swapper.without_weights():`) or on the CPU. On the meta device its
            parameters are replaced by new objects; tied ones stay tied.
        source: a safetensors file, a Hugging Face directory, a torch checkpoint, a swapper snapshot, or a directory of
            torch.distributed.checkpoint. It must not change while the model is used.
        host_memory: bytes, or "4GiB", of weights in host memory at once. "auto": half of the free memory.
        device: runs the kernels: "cpu", "cuda", "cuda:1", ... Inputs must be there.
        device_memory: bytes, or "8GiB", of weights on the device at once. Weights that fit stay there; of the others those
            that fit `host_memory` stay in host memory. "auto": half of the free memory. Not for the CPU.
        strict: refuse missing and unexpected names. Otherwise missing ones keep the model's own values.
        dtype: convert floating-point weights as they are read. None: the checkpoint's own dtype.
        rename: a map from the checkpoint's names to the model's, or a function that returns the model's name or None (leave out).
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
    """Load a model as `load` does, given the tensors of each parameter."""
    shared = _shared.get()
    if shared is None:
        _open(model, source, matched, budgets, backend)
    elif budgets.is_host_memory_given:
        raise ConfigError("host_memory is said inside of shared_memory, which says it for all models")
    elif budgets.device is not None:
        raise UnsupportedError("models that share memory run on the CPU: give each on a device a budget of its own")
    else:
        shared.add(model, source, matched, backend)
    return model


@contextmanager
def shared_memory(host_memory: int | str = "auto") -> Iterator[None]:
    """Have the models that are loaded inside share `host_memory`; they can be used after its end.

        with swapper.shared_memory("8GiB"):
            draft = from_pretrained(AutoModelForCausalLM, "draft")
            target = swapper.load(target, "weights")

    Args:
        host_memory: bytes, or "8GiB", for all of them. None of them may be given its own.

    Raises:
        As swapper.load, at the end; then none of them is loaded.
        StateError: one is inside of another.
    """
    budget_bytes = parse_host_memory(host_memory)
    if _shared.get() is not None:
        raise StateError("shared_memory is used inside of another: models share one budget")
    shared = SharedBudget()
    token = _shared.set(shared)
    try:
        yield
    finally:
        _shared.reset(token)
    shared.open(budget_bytes)


@dataclass(frozen=True, slots=True)
class Budgets:
    """The memory that a model may use.

    Attributes:
        host_bytes: of host memory.
        device: that runs its kernels, with the bytes of its memory; None on the CPU.
        is_host_memory_given: the user gave `host_memory`.
    """

    host_bytes: int
    device: DeviceBudget | None = None
    is_host_memory_given: bool = False

    @staticmethod
    def of(host_memory: int | str, device: str | torch.device | Device, device_memory: int | str) -> Budgets:
        """Parse the user's options.

        Raises:
            ConfigError: an option is wrong.
            DeviceError: there is no such device.
        """
        host_bytes = parse_host_memory(host_memory)
        return Budgets(host_bytes, DeviceBudget.parse(device, device_memory), host_memory != "auto")


def _open(model: nn.Module, source: Source, matched: Match, budgets: Budgets, backend: str) -> LoadedModel:
    plan = build_streaming_plan(model, matched, source.joined.keys())
    if budgets.device is None:
        device, fitting = None, fit(plan, budgets.host_bytes)
    else:
        device, other_bytes = budgets.device.device, _other_bytes(model, matched)
        fitting = fit_on_device(plan, budgets.host_bytes, budgets.device.nbytes, other_bytes, device)
    with torch.inference_mode(False), torch.no_grad(), defer_signals:
        cache_bytes = fitting.plan.cache_bytes(budgets.host_bytes)
        opened = LoadedModel(model, source, fitting, matched.buffers, cache_bytes, backend, device)
        model.__dict__[KEY] = opened
    return opened


def _other_bytes(model: nn.Module, matched: Match) -> int:
    """Return the bytes of the model's own buffers and parameters, which no checkpoint has and a device gets too."""
    loaded = {id(weight.parameter) for weight in matched.weights}
    filled = {(id(place.module), place.name) for place in matched.buffers}
    buffers = {
        id(buffer): buffer.nbytes
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and (id(module), name) not in filled
    }
    return sum(buffers.values()) + sum(p.nbytes for p in model.parameters() if id(p) not in loaded)

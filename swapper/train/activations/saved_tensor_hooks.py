"""Implements `swapper.offload_activations`: hooks that move the tensors that autograd saves, until backward.

A saved tensor is split into its storage, which saved_tensor_cache.py moves, and its view of it (offset, shape,
strides). So views of one storage are views of one storage again, and kernels of the backward get the original layout:
the gradients are plain torch's, bit for bit.

[Note: torch's check] Torch refuses a backward if a saved tensor was changed in place, but skips that check for tensors
with hooks. Here each saved tensor keeps its version counter, without its data, and the check is made when it is
restored, also for tensors that are not moved. So a storage may be written without a copy: a change meanwhile makes the
backward an error, as usual.

[Note: no cycles] A node's output that the node saves refers to the node. A kept tensor is detached from the graph, or a
graph that never runs backward would never be freed.
"""

from __future__ import annotations

import weakref
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from swapper.device.device import Device
from swapper.device.device_memory import LockedMemory
from swapper.errors import StateError, UnsupportedError
from swapper.io.engines import Engine, open_engine
from swapper.io.extents import SpillFile
from swapper.options import parse_choice
from swapper.runtime.sizes import parse_bytes
from swapper.tensors.torch_private import backward_task, is_transformed, not_traced, without_torch_functions
from swapper.train.activations.device_activations import DeviceStored, DeviceTensorCache
from swapper.train.activations.saved_tensor_cache import ActivationCounters, SavedTensorCache, Stored
from swapper.train.session.session_slot import SessionSlot
from swapper.train.session.training_session import TrainingSession

DESTINATIONS = ("auto", "host", "nvme")
STORAGE_DIVISOR = 8
"""A view of less than 1/STORAGE_DIVISOR of its storage is not moved: the rest is likely a data set. A choice."""
_NO_HOOKS = "support saved tensor hooks"  # of torch's message


class Kept:
    """A saved tensor that stays where it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        is_leaf = tensor.is_leaf and tensor.requires_grad
        self._tensor = tensor if is_leaf else tensor.detach()  # see [Note: no cycles]
        self._version = tensor._version

    @not_traced
    def restore(self) -> torch.Tensor:
        _check_version(self._tensor, self._version, self._tensor)
        return self._tensor


class View:
    """A saved tensor whose storage is elsewhere."""

    def __init__(self, tensor: torch.Tensor, stored: Stored | DeviceStored) -> None:
        self._stored = stored
        self.dtype, self.shape, self._strides = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()
        self._version = tensor._version
        self._counter = tensor.detach()
        self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # the version counter stays
        self._is_used = False
        stored.uses_left += 1

    @not_traced
    def restore(self) -> torch.Tensor:
        _check_version(self._counter, self._version, self)
        whole = self._stored.bytes()
        if not self._is_used:
            self._is_used = True
            self._stored.uses_left -= 1
        offset = whole.storage_offset() // self.dtype.itemsize + self._offset
        return torch.empty(0, dtype=self.dtype, device=whole.device).set_(
            whole.untyped_storage(), offset, self.shape, self._strides
        )


class offload_activations:  # used as a function, like torch.no_grad
    """A context around a forward, and its backward: large tensors that autograd saves wait for backward elsewhere.

    CPU tensors wait on the drive, those on an accelerator in page-locked host memory, with the excess on the drive.
    Gradients are plain torch's, bit for bit. Enter the same object in every step: it keeps its file and its memory, and
    predicts the amount from the step before. Each storage is moved once, however often it and views of it are saved.
    Not moved are parameters, buffers and tensors that share memory with those of the manager's model, leaves that
    require gradients, tensors of storages below `min_bytes`, sparse and quantized tensors, subclasses, and tensors that
    a backward saves (double backward, recomputation by checkpointing). Torch's check for changes in place works.

    Args:
        manager: of the drive's directory, with or without an offloaded model.
        to: "auto" keeps in memory what fits in half of `host_memory`, the newest, and writes the others; "nvme" writes
            all; "host" writes nothing: tensors of an accelerator are moved as far as they fit `host_memory`, CPU
            tensors are not moved.
        host_memory: maximum bytes of saved storages in host memory, in addition to the manager's budget, in bytes or as
            "1GiB": resident ones, those being written, and those read back. The one that an operation uses may be
            extra. Up to 32 MiB more are the engine's, for memory that needs staging. Tensors that the forward itself
            still uses do not count. For an accelerator it is allocated and page-locked once, as a whole.
        device_memory: maximum bytes of saved storages on an accelerator, in addition to the one in use: the newest
            stay, and older ones wait there for their copy. A lower value saves memory; below what the link can copy in
            time, the device waits.
        min_bytes: smaller storages are not moved.

    Attributes:
        counters: of moved tensors and bytes.

    Raises:
        ConfigError: an option is unknown.
        StateError: the manager is closed.
        IoError: while saving or in backward: the drive is full, a transfer failed. You can repeat such a forward or
            backward; no gradient is ever computed with bytes that were not written and read whole.
        BudgetError: in backward: the accelerator has no memory left.
        DeviceError: the accelerator failed.
    """

    def __init__(
        self,
        manager: Any,
        *,
        to: str = "auto",
        host_memory: int | str = "256MiB",
        device_memory: int | str = "256MiB",
        min_bytes: int | str = "1MiB",
    ) -> None:
        self._owner = ActivationOwner(manager)
        parse_choice(to, "to", DESTINATIONS)
        limit_bytes = self._limit_bytes = parse_bytes(host_memory, "host_memory")
        self._device_bytes = parse_bytes(device_memory, "device_memory")
        self._min_bytes = parse_bytes(min_bytes, "min_bytes")
        keep_bytes = {"auto": limit_bytes // 2, "nvme": 0, "host": None}[to]
        self._cache = SavedTensorCache(
            SpillFile(self._owner.directory), self._owner.find_engine, limit_bytes, keep_bytes
        )
        self._devices: dict[torch.device, Device] = {}
        self._device_caches: dict[torch.device, DeviceTensorCache] = {}
        self._locked: LockedMemory | None = None
        self._known: weakref.WeakValueDictionary[tuple[int, int], Stored | DeviceStored] = weakref.WeakValueDictionary()
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []

    @property
    def counters(self) -> ActivationCounters:
        return self._cache.counters

    def __enter__(self) -> offload_activations:
        self._owner.check_usable()
        self._cache.begin()
        for cache in self._device_caches.values():
            cache.begin()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, methodcaller("restore"))
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        self._hooks.pop().__exit__(kind, error, traceback)
        for cache in self._device_caches.values():
            cache.end()
        if isinstance(error, RuntimeError) and _NO_HOOKS in str(error):
            raise UnsupportedError(
                "torch.func.grad, vjp, jacrev and hessian cannot run inside swapper.offload_activations: torch refuses hooks of "
                "saved tensors there. Call them outside of the context, or use torch.autograd.grad"
            ) from error

    # --- the hooks ----------------------------------------------------------------------------------------------------

    @not_traced
    def _pack(self, tensor: torch.Tensor) -> Kept | View:
        if not self._is_movable(tensor):
            self.counters.left_alone += 1
            return Kept(tensor)
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version)
        stored = self._known.get(key)
        if stored is None:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            cache = self._device_cache(tensor.device) if self._is_on_accelerator(tensor) else self._cache
            stored = cache.keep(whole)
            stored.origin = StorageWeakRef(storage)  # nobody else gets its address
            self._known[key] = stored
        self.counters.saved += 1
        return View(tensor, stored)

    def _is_on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu" or tensor.device in self._devices

    def _device_cache(self, where: torch.device) -> DeviceTensorCache:
        cache = self._device_caches.get(where)
        if cache is None:
            device = self._devices.setdefault(where, Device(where))
            if self._locked is None:
                self._locked = LockedMemory(device, self._limit_bytes)
            cache = DeviceTensorCache(device, self._cache, self._locked, self._device_bytes)
            self._device_caches[where] = cache
        return cache

    def _is_movable(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.device.type in ("meta", "mps") or not (self._cache.writes or self._is_on_accelerator(tensor)):
            return False
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
            return False
        if (tensor.is_leaf and tensor.requires_grad) or isinstance(tensor._base, nn.Parameter):
            return False
        if is_transformed(tensor) or backward_task() != -1:
            return False
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < self._min_bytes or not storage.resizable() or storage._cdata in self._owner.storages_of_model():
            return False
        return tensor.nbytes * STORAGE_DIVISOR >= nbytes


def _check_version(counter: torch.Tensor, expected: int, seen: torch.Tensor | View) -> None:
    """See [Note: torch's check]."""
    if counter._version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{seen.dtype} {list(seen.shape)}] is at version {counter._version}; expected version {expected} instead. Hint: "
            "enable anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )


class ActivationOwner:
    """The manager of saved activations: has the directory and the engine, and knows the offloaded model.

    Args:
        manager: with or without an offloaded model.

    Raises:
        StateError: it cannot be used.
    """

    def __init__(self, manager: Any) -> None:
        current: SessionSlot = manager.current
        current.check_usable()
        self.directory: Path = current.directory.path
        self._current = weakref.ref(current)
        self._own_engine: Engine | None = None
        self._run: weakref.ref[TrainingSession] | None = None
        self._of_model: frozenset[int] = frozenset()

    def check_usable(self) -> None:
        """Raise StateError if the manager cannot be used."""
        current = self._current()
        if current is None:
            raise StateError("offload_activations outlived its manager: make both again")
        current.check_usable()

    def find_engine(self) -> Engine:
        """Return the engine of the manager's run, or its own if nothing was offloaded. Raises StateError."""
        current = self._current()
        if current is None:
            raise StateError("the manager is gone, and activations of this graph are on its drive: run backward before")
        current.check_usable()
        if current.run is not None and current.run.engine is not None:
            return current.run.engine
        if self._own_engine is None:
            self._own_engine = open_engine([self.directory], backend=current.backend)
        return self._own_engine

    def storages_of_model(self) -> frozenset[int]:
        """Return the storages of the manager's model, in memory or cold, by address."""
        current = self._current()
        run = None if current is None else current.run
        if run is None or not run.has_model:
            return frozenset()
        if self._run is None or self._run() is not run:
            model = run.model.model.module
            with without_torch_functions():
                tensors = [*model.parameters(), *model.buffers()]
                self._of_model = frozenset(t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided)
            self._run = weakref.ref(run)
        return self._of_model

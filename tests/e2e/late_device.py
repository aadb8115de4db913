"""A device of host memory for saved activations: tensors of the CPU count as its own, and its copies run as late as they may.

As tests/infer/host_device.py, and for both directions: what a copy is to fill has poison until it has run, and memory that is let
go before the copy from it or into it has run is noticed.
"""

from __future__ import annotations

from typing import Any

import torch
from infer.host_device import POISON, HostDevice
from torch.multiprocessing.reductions import StorageWeakRef

from swapper.device.device import OUT_OF_MEMORY


class LateDevice(HostDevice):
    """With all tensors of the CPU on it.

    Args:
        order: one of infer.host_device.ORDERS.
        capacity_bytes: for what is brought back at one time; more is out of memory.
    """

    def __init__(self, order: str = "late", capacity_bytes: int = 1 << 30) -> None:
        super().__init__(order, capacity_bytes)
        self.brought: list[tuple[StorageWeakRef, int]] = []  # by `empty`: storage, bytes
        self.streams: list[Any] = []
        self.is_over = False  # copies that are still to be made are forgotten

    def empty(self, nbytes: int) -> torch.Tensor:
        self.brought = [entry for entry in self.brought if not entry[0].expired()]
        if sum(size for _, size in self.brought) + nbytes > self.module.capacity_bytes:
            raise OUT_OF_MEMORY("out of memory, as asked for")
        memory = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.module.current.tick()
        self.brought.append((StorageWeakRef(memory.untyped_storage()), nbytes))
        return memory

    def new_stream(self) -> Any:
        self.streams.append(super().new_stream())
        return self.streams[-1]

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self.module.check()
        compute = self.module.current
        assert stream.knows((compute, compute.clock[compute])), "a copy that does not wait for earlier kernels"
        target.fill_(POISON)
        there, here = _Weak(target), _Weak(source)

        def run() -> None:
            if not self.is_over:
                there.tensor().copy_(here.tensor())

        stream.add(run)
        if self.is_immediate:
            stream.run(len(stream.operations))


class _Weak:
    """A run of bytes that this does not keep."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._offset, self._nbytes = tensor.storage_offset(), tensor.numel()

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None and storage.nbytes() > 0, "memory was released before the copy of it was over"
        return torch.empty(0, dtype=torch.uint8).set_(storage, self._offset, (self._nbytes,), (1,))

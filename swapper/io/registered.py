"""Registers host memory with CUDA, so that a copy between it and a device is a single transfer by the device.

CUDA copies memory that only the kernel has locked once more, into its own locked memory, at a fraction of the speed.
Memory is registered once and for long, never for a transfer: an arena in slabs, by threads, behind those that populate
it. So nobody waits for it, and memory that is not registered yet is copied all the same, more slowly.

[Note: slabs] CUDA refuses a copy across the border of two registrations. So a slab is of whole units (frames, slots),
and copies of runs without units are cut there.

[Note: own threads] CUDA keeps the error of a refused registration for the next call of the same thread. So these
threads make no other call of the device. When Python exits, such threads no longer run; starting one or joining one
would hang (before 3.12) or raise. Anything still registered by then is unregistered by the exiting thread.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from swapper.errors import IoError

logger = logging.getLogger("swapper.io")

SLAB_BYTES = 256 << 20  # a choice
THREADS = 2  # a choice

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices


class Registrar(Protocol):
    """Registers host memory with a device: CUDA, or a `swapper.device.device.Device`."""

    @property
    def can_register(self) -> bool: ...
    def register(self, address: int, nbytes: int) -> str:
        """Return "", or the reason of a refusal."""

    def unregister(self, address: int) -> None: ...
    def synchronize(self) -> None:
        """Wait until all copies are done."""


class Memory(Protocol):
    """The part of an arena (`swapper._C.Arena`) that is needed here."""

    @property
    def address(self) -> int: ...
    def wait_populated(self, nbytes: int, /) -> None: ...


class CudaRegistrar:
    """CUDA's own registration, which is for all of its devices; ROCm's is the same.

    Args:
        device: made current for the calls: a thread begins with the first device, and its calls would allocate memory
            there. None for that one.
        module: torch's for CUDA.
    """

    def __init__(self, device: torch.device | None = None, module: Any = torch.cuda) -> None:
        self._device = device
        self._module = module

    @property
    def can_register(self) -> bool:
        return bool(self._module.is_available())

    def register(self, address: int, nbytes: int) -> str:
        with self._module.device(self._device):
            status = int(self._module.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        return "" if status == 0 else f"CUDA does not register {nbytes} bytes of host memory: error {status}"

    def unregister(self, address: int) -> None:
        with self._module.device(self._device):
            status = int(self._module.cudart().cudaHostUnregister(address))
        if status != 0:
            logger.warning("CUDA does not end the registration of host memory: error %d", status)

    def synchronize(self) -> None:
        self._module.synchronize(self._device)


def slabs(offset: int, nbytes: int, unit_bytes: int) -> list[tuple[int, int]]:
    """Cut [offset, offset + nbytes) into slabs of whole units, as (offset, bytes) each; pure. See [Note: slabs]."""
    step = max(SLAB_BYTES // unit_bytes, 1) * unit_bytes
    return [(offset + at, min(step, nbytes - at)) for at in range(0, nbytes, step)]


class Registration:
    """Owns the registrations of one arena, until `close`.

    Args:
        registrar: the device's.
        memory: the arena.
        parts: of the arena, as `slabs` returns them.
    """

    def __init__(self, registrar: Registrar, memory: Memory, parts: Sequence[tuple[int, int]]) -> None:
        self._registrar = registrar
        self._memory = memory
        self._addresses: list[int] = []  # registered ones
        finalizer = weakref.finalize(
            self, _forget, registrar, self._addresses, memory
        )  # for an owner that nobody closes
        finalizer.atexit = False
        self._lock = threading.Lock()
        self._reason = "" if registrar.can_register else f"torch cannot register memory with {registrar}"
        self._is_closing = False
        self._left = iter(parts)
        count = min(THREADS, len(parts)) if registrar.can_register else 0
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def describe(self) -> str:
        """Return "registered", or the reason why some of it is not."""
        with self._lock:
            return self._reason or "registered"

    def wait(self) -> None:
        """Wait until all of it is registered or refused."""
        if sys.is_finalizing():  # see [Note: own threads]
            return
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Unregister the memory. Requires that no copy is in flight."""
        self._is_closing = True
        self.wait()
        _unregister(self._registrar, self._addresses)

    def _work(self) -> None:
        for offset, nbytes in self._next():
            try:
                self._memory.wait_populated(offset + nbytes)
                reason = self._registrar.register(self._memory.address + offset, nbytes)
            except (IoError, RuntimeError) as error:
                reason = str(error)
            with self._lock:
                if not reason:
                    self._addresses.append(self._memory.address + offset)
                    continue
                if not self._reason:
                    logger.warning("%s; copies to and from devices will be slow", reason)
                self._reason = self._reason or reason

    def _next(self) -> Iterator[tuple[int, int]]:
        while not self._is_closing:
            with self._lock:
                part = next(self._left, None)
            if part is None:
                return
            yield part


def _forget(registrar: Registrar, addresses: list[int], memory: Memory) -> None:
    """`memory` is passed in order to keep it alive until now."""
    with contextlib.suppress(RuntimeError):  # a failed device copies nothing
        if addresses:
            registrar.synchronize()
    with contextlib.suppress(RuntimeError):
        _unregister(registrar, addresses)


def _unregister(registrar: Registrar, addresses: list[int]) -> None:
    """See [Note: own threads]."""

    def work() -> None:
        for address in addresses:
            with contextlib.suppress(RuntimeError):
                registrar.unregister(address)

    if sys.is_finalizing():
        work()
    elif addresses:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join()
    addresses.clear()

"""Registers host memory with CUDA, so that a copy between it and a device is a single transfer by the device.

CUDA copies memory that only the kernel has locked once more, into its own locked memory, at a fraction of the speed.
Memory is registered once and for long, never for a transfer: an arena in slabs, by a thread, behind those that populate
it. So nobody waits for it, and memory that is not registered yet is copied all the same, more slowly.

[Note: slabs] Some kernels refuse to lock more than 2 GiB in one call (Linux 6.11 to 6.13), some drivers 512 GiB, and a
call takes some 0.1 s a GiB under the driver's locks. So no call is for more than a slab, except for a unit that is larger.
CUDA refuses a copy across the border of two registrations: a slab is of whole units (frames, slots), and a copy of several
units is cut there (`Device.copy`).

[Note: one at a time] While the driver locks memory, the program's calls of the device wait. So one thread registers all
memory of the process, a slab at a time, and as long as it took it leaves the driver alone. Memory that somebody waits for
comes first, without pauses.

[Note: own threads] CUDA keeps the error of a refused registration for the next call of the same thread. So these
threads make no other call of the device. When Python exits, such threads no longer run; starting one or joining one
would hang (before 3.12) or raise. Anything still registered by then is unregistered by the exiting thread.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from swapper import _C
from swapper.runtime.process import after_fork_in_child

logger = logging.getLogger("swapper.io")

SLAB_BYTES = 256 << 20  # a choice

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices


class Registrar(Protocol):
    """Registers host memory with a device: CUDA, or a `swapper.device.device.Device`."""

    @property
    def can_register(self) -> bool: ...
    def register(self, address: int, nbytes: int) -> str:
        """Return "", or the reason of a refusal."""

    def unregister(self, address: int) -> None: ...
    def expect(self, address: int, nbytes: int) -> None:
        """Be told of memory that will be registered, before any of an arena is."""

    def synchronize(self) -> None:
        """Wait until all copies are done."""


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

    def expect(self, address: int, nbytes: int) -> None:
        """Copies of its users are of whole units."""

    def synchronize(self) -> None:
        self._module.synchronize(self._device)


def slabs(offset: int, nbytes: int, unit_bytes: int) -> list[tuple[int, int]]:
    """Cut [offset, offset + nbytes) into slabs of whole units, as (offset, bytes) each; pure. See [Note: slabs].

    Args:
        offset, nbytes: of the range, in bytes.
        unit_bytes: of what is not cut.
    """
    step = max(SLAB_BYTES // unit_bytes, 1) * unit_bytes
    return [(offset + at, min(step, nbytes - at)) for at in range(0, nbytes, step)]


class _Worker:
    """Owns the thread that registers, as long as there is something to register. See [Note: one at a time].

    Attributes:
        changed: guards all that is not registered yet; notified when a slab is done, and when somebody waits.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._pending: list[Registration] = []
        self._thread: threading.Thread | None = None

    def add(self, registration: Registration) -> None:
        with self.changed:
            self._pending.append(registration)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="swapper-register", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while (registration := self._next()) is not None:
            seconds = registration.register_one()
            with self.changed:
                registration.is_busy = False
                del registration  # its owner may drop it
                self._drop_done()
                self.changed.notify_all()
                self.changed.wait_for(lambda: any(one.is_awaited for one in self._pending), seconds)

    def _next(self) -> Registration | None:
        with self.changed:
            self._drop_done()
            if not self._pending:
                self._thread = None
                return None
            found = next((one for one in self._pending if one.is_awaited), self._pending[0])
            found.is_busy = True
            return found

    def _drop_done(self) -> None:
        self._pending = [one for one in self._pending if one.parts]


_worker = _Worker()


def _forget_worker() -> None:
    global _worker
    _worker = _Worker()


after_fork_in_child(_forget_worker)


class Registration:
    """Owns the registrations of one arena, until `close`.

    Args:
        registrar: the device's.
        memory: the arena.
        parts: of the arena, as `slabs` returns them.

    Attributes:
        parts: those that are still to be registered.
        is_busy: one of them is being registered.
        is_awaited: somebody waits for all of them.
    """

    def __init__(self, registrar: Registrar, memory: _C.Arena, parts: Sequence[tuple[int, int]]) -> None:
        self._registrar = registrar
        self._memory = memory
        self._addresses: list[int] = []  # registered ones
        finalizer = weakref.finalize(
            self, _forget, registrar, self._addresses, memory
        )  # for an owner that nobody closes
        finalizer.atexit = False
        self._lock = threading.Lock()
        self._registered_bytes = 0
        self._reason = "" if registrar.can_register else f"torch cannot register memory with {registrar}"
        self.parts = deque(parts if registrar.can_register else ())
        self.is_busy = self.is_awaited = False
        for offset, nbytes in parts:
            registrar.expect(memory.address + offset, nbytes)
        self._worker = _worker
        if self.parts:
            self._worker.add(self)

    def describe(self) -> str:
        """Return "registered", or the reason why some of it is not."""
        with self._lock:
            return self._reason or "registered"

    @property
    def registered_bytes(self) -> int:
        """How much of it is registered by now."""
        with self._lock:
            return self._registered_bytes

    def wait(self) -> None:
        """Wait until all of it is registered or refused. The rest is registered without pauses."""
        if sys.is_finalizing() or self._worker is not _worker:  # see [Note: own threads]; a forked child has none
            return
        changed = self._worker.changed
        with changed:
            self.is_awaited = True
            changed.notify_all()
            changed.wait_for(lambda: not self.parts and not self.is_busy)

    def close(self) -> None:
        """Unregister the memory. Requires that no copy is in flight."""
        self.parts.clear()
        self.wait()
        _unregister(self._registrar, self._addresses)

    def register_one(self) -> float:
        """Register the first of `parts`, by the worker. Return how long the driver took, in seconds."""
        seconds = 0.0
        try:
            offset, nbytes = self.parts.popleft()
        except IndexError:  # closed meanwhile
            return seconds
        try:
            self._memory.wait_populated(offset + nbytes)
            began_s = time.monotonic()
            reason = self._registrar.register(self._memory.address + offset, nbytes)
            seconds = time.monotonic() - began_s
        except Exception as error:  # others' memory is still to be registered
            reason = str(error) or repr(error)
        with self._lock:
            if not reason:
                self._addresses.append(self._memory.address + offset)
                self._registered_bytes += nbytes
            else:
                if not self._reason:
                    logger.warning("%s; copies to and from devices will be slow", reason)
                self._reason = self._reason or reason
        return seconds


def _forget(registrar: Registrar, addresses: list[int], memory: _C.Arena) -> None:
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

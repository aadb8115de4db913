"""Saved activations on the simulated drive: the real cache, and what autograd would hold of it, checked after every request.

Memory is that of real tensors here, since the cache takes and lets go of it: the engine's addresses are theirs. What the cache
leaves to its callers is random too: when content arrives, what is used again, what Python's garbage collector forgets in between.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from e2e.late_device import LateDevice
from infer.host_device import ORDERS
from simulated_engine import Arena, Engine, Faults, File, SimulationError, Ticket

from swapper.device.device_memory import LockedMemory
from swapper.errors import IoError
from swapper.io.extents import SpillFile
from swapper.paging.residency import Residency
from swapper.train.activations.device_activations import DeviceStored, DeviceTensorCache
from swapper.train.activations.saved_tensor_cache import SavedTensorCache, Stored

SIZES = (1, 512, 4096, 5000, 8192, 12288)
POISON = 0xEF


class ProcessMemory(Arena):
    """All memory of this process, at its own addresses."""

    def __init__(self) -> None:
        super().__init__(0, 0)

    def at(self, address: int, nbytes: int) -> memoryview:
        return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


class KeepingEngine(Engine):
    """Keeps the memory of a transfer until it is over, as the real one does."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept: list[torch.Tensor] = []

    def read(self, *arguments: Any, keep: torch.Tensor, **options: Any) -> Ticket:  # type: ignore[override]
        self._kept.append(keep)
        return super().read(*arguments, **options)

    def write(self, *arguments: Any, keep: torch.Tensor, **options: Any) -> Ticket:  # type: ignore[override]
        self._kept.append(keep)
        return super().write(*arguments, **options)

    def _end(self, ticket: Ticket) -> None:
        super()._end(ticket)
        addresses = {other.address for other in self.open}
        self._kept = [memory for memory in self._kept if memory.data_ptr() in addresses]


class SimulatedSpillFile(SpillFile):
    """Its places are real; the file is bytes, on a drive that may be full."""

    def __init__(self, engine: Engine, faults: Faults) -> None:
        super().__init__(Path("simulated"))
        self._file = File("activations", 0)
        self._file.allocate = self._allocate
        self._engine, self._faults = engine, faults

    def _allocate(self, nbytes: int) -> None:
        if self._faults.strike("write", "activations", -1):
            self._engine.errors.append(IoError("allocate", "activations", 0, nbytes, errno.ENOSPC))
            raise self._engine.errors[-1]
        self._file.bytes.extend(b"\xee" * (nbytes - len(self._file.bytes)))

    def has(self, offset: int | None, content: bytes) -> bool:
        return offset is not None and self._file.bytes[offset : offset + len(content)] == content


class Late:
    """Memory whose content comes at some moment."""

    def __init__(self, memory: torch.Tensor, content: bytes, random: Random) -> None:
        self._memory: torch.Tensor | None = memory
        self._content, self._random = content, random

    @property
    def has_come(self) -> bool:
        return self._memory is None

    @property
    def done(self) -> bool:
        if self._random.random() < 0.3:
            self.wait()
        return self.has_come

    def wait(self) -> None:
        if self._memory is not None:
            fill(self._memory, self._content)
            self._memory = None


class Saved:
    """A storage as autograd has it: what refers to it, and what it must be."""

    def __init__(self, stored: Stored | DeviceStored, content: bytes) -> None:
        self.stored = stored
        self.content = content
        self.is_used = False
        stored.uses_left += 1

    @property
    def below(self) -> Stored | None:
        """What the cache of host memory has of it."""
        return self.stored if isinstance(self.stored, Stored) else self.stored.below


class ActivationRun:
    """One cache, or that of a device over it, and all around.

    Args:
        seed: decides everything that happens.
        fault_rate: chance that a transfer fails.
        on_device: storages are a device's, whose copies run late.
        cache_class: the cache of host memory.
    """

    def __init__(
        self,
        seed: int,
        fault_rate: float = 0.0,
        on_device: bool = False,
        cache_class: type[SavedTensorCache] = SavedTensorCache,
    ) -> None:
        self.random = Random(seed)
        self.faults = Faults(self.random, fault_rate)
        eagerness = self.random.choice([0.0, 0.05, 0.3, 0.7, 0.97])
        self.engine = KeepingEngine(
            ProcessMemory(), self.random, self.faults, eagerness, self.random.choice([0.0, 0.4])
        )
        self.limit_bytes = self.random.choice([1, 8192, 20_000, 60_000])
        keep_bytes = self.random.choice([0, self.limit_bytes // 2, self.limit_bytes, None])
        self.file = SimulatedSpillFile(self.engine, self.faults)
        self.cache = cache_class(self.file, lambda: self.engine, self.limit_bytes, keep_bytes)
        self.saved: list[Saved] = []
        self.in_use: list[tuple[torch.Tensor, bytes]] = []  # by operations
        self._device: LateDevice | None = None
        if on_device:
            self._device = LateDevice(self.random.choice(ORDERS))
            self._locked = LockedMemory(self._device, self.limit_bytes)
            self._device_limit_bytes = self.random.choice([1, 8192, 20_000])
            self._device_cache = DeviceTensorCache(self._device, self.cache, self._locked, self._device_limit_bytes)

    # --- requests -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.cache.begin()
        if self._device is not None:
            self._device_cache.begin()
        self.check()

    def save(self) -> Saved | None:
        """None where the drive has failed, or where there is no room and nothing is written."""
        content = self.random.randbytes(self.random.choice(SIZES))
        self.end_operations()
        if self._device is not None:
            stored = self._attempt(lambda: self._device_cache.keep(self._made(content)))
        else:
            stored = self._attempt(lambda: self._keep(content))
        if stored is not None:
            self.saved.append(Saved(stored, content))
        self.check()
        return None if stored is None else self.saved[-1]

    def use(self, saved: Saved) -> bool:
        """Whether its bytes could be had. They are what was saved."""
        self.end_operations()
        below = saved.below
        memory = self._attempt(saved.stored.bytes)
        if memory is None:
            self.check()
            return False
        if below is saved.stored and below is not None and below.error is not None:
            raise SimulationError("a write has failed, and whoever needs the storage was not told")
        if has_arrived(saved.stored):
            self.in_use.append((memory, saved.content))
        if not saved.is_used:
            saved.is_used = True
            saved.stored.uses_left -= 1
        del memory
        self.check()
        return True

    def forget(self, saved: Saved) -> None:
        self.saved.remove(saved)

    def end_operations(self) -> None:
        """Operations have used their memory, mostly."""
        while self.in_use and self.random.random() < 0.8:
            self.in_use.pop(0)

    def finish(self) -> None:
        """Nobody wants anything any more: nothing is left."""
        self.in_use.clear()
        self.saved.clear()
        self.begin()
        while self.engine.tick():
            pass
        if self._device is not None:
            for copies in (self._device_cache._going_down, self._device_cache._going_up):
                while self._device_cache._end_oldest(copies):
                    pass
            if self._device_cache._held_bytes or self._device_cache._live or self._device_cache._here:
                raise SimulationError("the device's cache remembers what is over")
        self.begin()
        cache = self.cache
        if cache._live or cache._here or cache._moving or cache._restored or cache._ending:
            raise SimulationError("the cache remembers what is over")
        if cache.counters.held_bytes or cache._here_bytes or self.file._extents.used_bytes:
            raise SimulationError("memory or a place of the file was not given back")
        if self._device is not None and self._locked.used_bytes:
            raise SimulationError("page-locked memory was not given back")

    # --- what must hold --------------------------------------------------------------------------------------------

    def check(self) -> None:
        for memory, content in self.in_use:
            if bytes_of(memory) != content:
                raise SimulationError("memory that an operation uses was changed, or is not what was saved")
        for saved in self.saved:
            if saved.below is not None:
                self._check_place(saved.below, saved.content)
        live = [stored for stored in (reference() for reference in self.cache._live.values()) if stored is not None]
        held_bytes = sum(stored.nbytes for stored in live if stored.memory is not None)
        stuck_bytes = sum(stored.nbytes for stored in live if stored.error is not None)
        gone_bytes = sum(r.nbytes for r in (*self.cache.forgotten, *self.cache._ending) if r.memory is not None)
        counted_bytes = self.cache.counters.held_bytes
        if held_bytes + gone_bytes != counted_bytes:
            raise SimulationError(f"{held_bytes} + {gone_bytes} bytes are held, and {counted_bytes} are counted")
        if self.cache.writes and held_bytes > self.limit_bytes + max(SIZES) + stuck_bytes:
            raise SimulationError(f"{held_bytes} bytes are held, of at most {self.limit_bytes} and one in use")
        if self._device is not None:
            self._check_device()

    def _check_device(self) -> None:
        cache = self._device_cache
        live = [stored for stored in (reference() for reference in cache._live.values()) if stored is not None]
        held_bytes = sum(stored.nbytes for stored in live if stored.memory is not None)
        if held_bytes + sum(remains.held_bytes for remains in cache.forgotten) != cache._held_bytes:
            raise SimulationError(f"{held_bytes} bytes are held on the device, and {cache._held_bytes} are counted")
        if self.cache.writes and held_bytes > self._device_limit_bytes + max(SIZES):
            raise SimulationError(f"{held_bytes} bytes are on the device, of at most {self._device_limit_bytes}")

    def _check_place(self, stored: Stored, content: bytes) -> None:
        residency, memory = stored.residency, stored.memory
        if (memory is None) != (residency is Residency.COLD):
            raise SimulationError(f"{residency.name} with memory {memory is not None}")
        if (stored.ticket is None) == (residency in (Residency.READING, Residency.WRITING)):
            raise SimulationError(f"{residency.name} with ticket {stored.ticket}")
        if residency in (Residency.COLD, Residency.READING, Residency.CLEAN) and not self.file.has(
            stored.offset, content
        ):
            raise SimulationError(f"{residency.name}, and the file has something else")
        is_there = memory is not None and residency is not Residency.READING and has_arrived(stored)
        if is_there and bytes_of(memory) != content:
            raise SimulationError(f"{residency.name}, and memory has something else")

    # ----------------------------------------------------------------------------------------------------------------

    def _attempt(self, request: Callable[[], Any]) -> Any:
        """Return what the request gives; None where it ends with an error of the drive's."""
        self.engine.begin_request()
        try:
            return request()
        except IoError as error:
            if str(error) not in {str(known) for known in self.engine.errors}:
                raise SimulationError(f"an error of nothing: {error}") from error
            error.__traceback__ = None  # the engine has it still, and it has everything
            return None

    def _keep(self, content: bytes) -> Stored | None:
        if not self.cache.writes and not self.cache.make_room(len(content)):
            return None
        memory = torch.empty(len(content), dtype=torch.uint8)
        if self.random.random() < 0.6:
            fill(memory, content)
            return self.cache.keep(memory)
        memory.fill_(POISON)
        return self.cache.keep(memory, Late(memory, content, self.random))

    def _made(self, content: bytes) -> torch.Tensor:
        assert self._device is not None
        memory = self._device.empty(len(content))
        fill(memory, content)
        return memory


def has_arrived(stored: Stored | DeviceStored) -> bool:
    arrival: Any = stored.arrival if isinstance(stored, Stored) else None
    if arrival is None or isinstance(arrival, Late):
        return arrival is None or arrival.has_come
    return bool(arrival.event.stream.done >= arrival.event.end)  # without a look that makes time pass


def fill(memory: torch.Tensor, content: bytes) -> None:
    memory.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def bytes_of(memory: torch.Tensor) -> bytes:
    return memory.numpy().tobytes()


# --- programs ---------------------------------------------------------------------------------------------------------


def train(run: ActivationRun) -> ActivationRun:
    """Forward and backward, over and over: of micro-batches one after the other or together."""
    random = run.random
    for _ in range(random.randint(2, 4)):
        graphs = [_forward(run) for _ in range(random.choice([1, 1, 2]))]
        random.shuffle(graphs)
        while graphs:
            _backward(run, graphs.pop())
    run.finish()
    return run


def _forward(run: ActivationRun) -> list[Saved]:
    run.begin()
    made = [run.save() for _ in range(run.random.randint(1, 12))]
    return [saved for saved in made if saved is not None]


def _backward(run: ActivationRun, graph: list[Saved]) -> None:
    """Once, or twice where the graph is retained; some graphs are never run backward."""
    for _ in range(run.random.choice([0, 1, 1, 1, 1, 1, 2])):
        for saved in reversed(graph):
            use_again(run, saved)
            if run.random.random() < 0.1:
                run.engine.tick()
    for saved in reversed(graph):
        run.forget(saved)


def use_again(run: ActivationRun, saved: Saved) -> None:
    """Use it, again after a read that failed: of its drive somebody takes care. What could not be written is lost."""
    for _ in range(60):
        if run.use(saved) or (saved.below is not None and saved.below.error is not None):
            return
        run.faults.repair()
        run.faults.rate *= 0.9
    raise SimulationError("a storage can never be read, however often the drive is repaired")


def wander(run: ActivationRun) -> ActivationRun:
    """Ask for one thing after the other, whatever comes to mind."""
    random = run.random
    for _ in range(80):
        dice = random.random()
        if dice < 0.4 or not run.saved:
            run.save()
        elif dice < 0.75:
            run.use(random.choice(run.saved))
        elif dice < 0.92:
            run.forget(random.choice(run.saved))
        elif dice < 0.95:
            run.begin()
        elif dice < 0.97:
            run.faults.repair()
        else:
            for _ in range(random.randint(1, 5)):
                run.engine.tick()
    run.faults.rate = 0.0
    run.faults.repair()
    run.finish()
    return run

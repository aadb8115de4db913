"""A device made of host memory, with streams that run as late as they may, and that notices who did not wait.

What the product does with a device goes through `swapper.device.device.Device`. Here its copies are queued and run when somebody
waits for an event behind them (*late*), at once, or at chance; kernels are torch's own on the CPU and run at once. So a kernel that
is not made to wait reads poison, and a frame that is used again before its event has its copy see other bytes. What a late copy
cannot show, memory that is filled while kernels before it may still use it, is shown by clocks: each stream knows how far the
others have come, as it learns it from events.

Copies the other way: until one has run its target is poison, its source must be alive and as it was, and it must be queued behind
what compute had queued by then.

The user may have several streams: `new_compute_stream` makes one, `module.stream` has it be the current one, and `use` says that a
kernel on it uses a tensor. Then what fills it must be known to that stream, and whoever fills it anew or gives its memory back must
know of the kernel. Memory goes back to the stream that took it, as with torch's allocator, whatever stream is current.
"""

from __future__ import annotations

import random
import threading
import weakref
import zlib
from collections import Counter
from contextlib import contextmanager, nullcontext

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from swapper.device.device import Device

POISON = 0xEF
BYTES_PER_S = 1e9
ORDERS = ("at once", "late", "by chance 1", "by chance 2")


class Stream:
    """Operations in order. Kernels of the CPU run at once, so `is_compute` waits for what it is told to wait for."""

    def __init__(self, is_compute=False, device=None):
        self.is_compute = is_compute
        self.queued_bytes = 0  # of its copies
        self.operations = []
        self.done = 0
        self.clock = Counter()

    def tick(self):
        self.clock[self] += 1
        return (self, self.clock[self])

    def knows(self, moment):
        stream, tick = moment
        return self.clock[stream] >= tick

    def add(self, operation):
        self.operations.append(operation)
        if self.is_compute:
            self.run(len(self.operations))

    def run(self, end):
        while self.done < end:
            operation, self.operations[self.done] = self.operations[self.done], None
            self.done += 1
            operation()

    def wait_event(self, event):
        for stream, tick in event.clock.items():
            self.clock[stream] = max(self.clock[stream], tick)
        self.add(event.synchronize)


class Event:
    """Its clock is that of copies alone, and of BYTES_PER_S."""

    def __init__(self, module, is_timed):
        self.module, self.is_timed = module, is_timed
        module.check()

    def record(self, stream):
        stream.tick()
        self.queued_bytes = stream.queued_bytes
        self.stream, self.end, self.clock = stream, len(stream.operations), Counter(stream.clock)

    def query(self):
        if self.module.chance is not None and self.module.chance.random() < 0.5:
            self.synchronize()
        self.module.check()
        return self.stream.done >= self.end

    def synchronize(self):
        self.module.check()
        self.stream.run(self.end)

    def elapsed_time(self, later):
        """In milliseconds, as torch has it."""
        assert self.is_timed and later.is_timed and self.stream is later.stream
        assert later.stream.done >= later.end, "the time of a copy that is not over"
        return (later.queued_bytes - self.queued_bytes) / BYTES_PER_S * 1000


class Module:
    """In place of torch.cuda."""

    def __init__(self, order, capacity_bytes):
        self.chance = random.Random(order) if order.startswith("by chance") else None
        self.capacity_bytes = capacity_bytes
        self.compute = self.current = Stream(is_compute=True)
        self.used_bytes = self.peak_bytes = 0
        self.failures = 0  # of the user's own operations to find memory
        self.times_emptied = 0
        self.is_lost = False

    def Stream(self, device=None):
        return Stream()

    def Event(self, blocking=False, enable_timing=False):
        return Event(self, enable_timing)

    def check(self):
        if self.is_lost:
            raise RuntimeError("device-side assert triggered, as asked for")

    def current_stream(self, device):
        return self.current

    @contextmanager
    def stream(self, stream):
        """What is queued in it are kernels, also where the product made the stream."""
        stream.is_compute = True
        stream.run(len(stream.operations))
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def mem_get_info(self, device):
        return self.capacity_bytes - self.used_bytes, self.capacity_bytes

    def memory_reserved(self, device):
        return self.used_bytes

    memory_allocated = memory_reserved

    def max_memory_allocated(self, device):
        return self.peak_bytes

    def memory_stats_as_nested_dict(self, device):
        return {"num_ooms": self.failures}

    def empty_cache(self):
        self.times_emptied += 1


class HostDevice(Device):
    """Storages in host memory.

    Args:
        order: one of ORDERS.
        capacity_bytes: more than this in storages is out of memory.
    """

    def __init__(self, order="late", capacity_bytes=1 << 30):
        super().__init__(torch.device("cpu"), Module(order, capacity_bytes))
        self.is_immediate = order == "at once"
        self.peak_bytes = 0
        self.taken = {}  # by storage: the moment it was allocated
        self.filled = {}  # by storage: the moments of copies into it
        self.used = {}  # by storage: the moments of kernels that `use` told of
        self.sources = []  # of the copies that are being queued
        self.coming = []  # host memory that copies are to fill: its begin and end, and the moment

    @property
    def module(self):
        return self._module

    @property
    def used_bytes(self):
        return self._module.used_bytes

    def empty(self, nbytes):
        if self._module.used_bytes + nbytes > self._module.capacity_bytes:
            raise torch.OutOfMemoryError("out of memory, as asked for")
        return super().empty(nbytes)

    def synchronize(self):
        pass

    def new_compute_stream(self):
        return Stream(is_compute=True)

    def use(self, tensor):
        """A kernel is queued on the current stream that uses a tensor of a storage."""
        stream, key = self._module.current, tensor.untyped_storage()._cdata
        known = [self.taken[key], *self.filled.get(key, [])]
        assert all(map(stream.knows, known)), "a kernel that does not wait for what it uses"
        self.used.setdefault(key, []).append(stream.tick())

    def resize(self, storage, nbytes):
        stream, key = self._module.current, storage._cdata
        if nbytes == 0:
            owner, _ = taken = self.taken.pop(key, (stream, 0))
            late = [moment for moment in self.filled.pop(key, []) if not owner.knows(moment)]
            assert not late, "memory is given back while a copy into it may still run"
            assert all(map(owner.knows, self.used.pop(key, []))), "memory is given back while a kernel may still use it"
            if taken[1]:
                self._module.used_bytes -= storage.nbytes()
            storage.resize_(0)
            return
        if self._module.used_bytes + nbytes > self._module.capacity_bytes:
            raise torch.OutOfMemoryError("out of memory, as asked for")
        storage.resize_(nbytes)
        torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,)).fill_(POISON)
        self._module.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._module.used_bytes)
        self._module.peak_bytes = max(self._module.peak_bytes, self._module.used_bytes)
        self.taken[key] = stream.tick()

    def current_stream(self):
        """Whoever asks may have queued kernels since."""
        stream = super().current_stream()
        stream.tick()
        return stream

    def _copying(self, stream):
        return nullcontext()  # to enter a stream means kernels, here

    def copy(self, pieces, stream):
        self.sources = [source for _, source in pieces]  # which a copy may be cut from
        try:
            return super().copy(pieces, stream)
        finally:
            self.sources = []

    def _copy(self, target, source, stream):
        stream.queued_bytes += source.numel()
        key = target.untyped_storage()._cdata
        if key not in self.taken:
            self.copy_to_host(target, source, stream)
            return
        kernels = [self.taken[key], *self.used.get(key, [])]
        assert all(map(stream.knows, kernels)), "a copy into memory that earlier kernels may still use"
        self.filled.setdefault(key, []).append(stream.tick())
        coming = [moment for begin, end, moment in self.coming if begin < end_of(source) and source.data_ptr() < end]
        assert all(map(stream.knows, coming)), "a copy of what may not have come down yet"
        content = None if coming else zlib.crc32(source.numpy())
        weak, begin, nbytes = StorageWeakRef(target.untyped_storage()), target.storage_offset(), target.numel()

        def run():
            is_same = content is None or zlib.crc32(source.numpy()) == content
            assert is_same, "a frame was used again before its copy was over"
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            assert storage is not None, "memory is gone before the copy into it was over"
            torch.empty(0, dtype=torch.uint8).set_(storage, begin, (nbytes,), (1,)).copy_(source)

        stream.add(run)
        if self.is_immediate:
            stream.run(len(stream.operations))

    def copy_to_host(self, target, source, stream):
        wholes = (one for one in self.sources if one.data_ptr() <= source.data_ptr() < end_of(one))
        whole = next(wholes, source)
        begin, nbytes = source.data_ptr() - whole.data_ptr(), source.numel()
        compute, alive, content = self._module.current, weakref.ref(whole), checksum(source)
        assert source.untyped_storage().nbytes(), "a copy of memory that is not there"
        key = source.untyped_storage()._cdata
        assert stream.clock[compute] >= compute.clock[compute], "a copy that does not wait for the kernels before it"
        assert all(map(stream.knows, self.used.get(key, []))), (
            "a copy that does not wait for a kernel that changed its source"
        )
        target.fill_(POISON)
        self.coming.append(coming := (target.data_ptr(), end_of(target), stream.tick()))

        def run():
            self.coming.remove(coming)
            whole = alive()
            is_there = whole is not None and whole.untyped_storage().nbytes()
            assert is_there, "memory was released before its copy was over"
            source = whole[begin : begin + nbytes]
            assert checksum(source) == content, "memory was changed before its copy was over"
            target.copy_(source)

        stream.add(run)
        if self.is_immediate:
            stream.run(len(stream.operations))


def end_of(tensor):
    return tensor.data_ptr() + tensor.nbytes


def checksum(tensor):
    return zlib.crc32(tensor.clone().numpy())  # numpy() has a storage not be resized any more


class Registering(HostDevice):
    """Notes what is registered, and refuses what it is told to."""

    can_register = True

    def __init__(self, refused=frozenset()):
        super().__init__()
        self.registered = {}
        self.threads = set()
        self.refused = refused

    def register(self, address, nbytes):
        self.threads.add(threading.current_thread())
        if address in self.refused:
            return "error 2"
        self.registered[address] = nbytes
        return ""

    def unregister(self, address):
        del self.registered[address]

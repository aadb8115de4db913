"""Weights in a device's memory, those that stay there, and host memory that is registered with the device."""

from __future__ import annotations

import threading
import time
import types
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from infer.host_device import HostDevice, Registering, Stream

from swapper import _C
from swapper.device.device import RANGES, Device
from swapper.device.device_memory import DEVICE_ALIGNMENT_BYTES, DeviceStorage, Span, place_in_storage, spans_of_page
from swapper.device.model_device import place_on_device
from swapper.device.tier import DeviceTier
from swapper.errors import BudgetError, IoError
from swapper.infer.planning.infer_placement import Demand, place
from swapper.io.handle import deepnvme
from swapper.io.registered import SLAB_BYTES, CudaRegistrar, Registration, slabs
from swapper.io.staging import SLOT_BYTES, SLOTS, Staging
from swapper.io.tensor_bytes import SECTOR_BYTES
from swapper.runtime.counters import Counters

SIZES = st.lists(st.integers(0, 20_000), min_size=1, max_size=12)


@given(SIZES)
def test_tensors_are_aligned_and_apart(sizes):
    offsets, nbytes = place_in_storage(sizes)
    assert all(offset % DEVICE_ALIGNMENT_BYTES == 0 for offset in offsets)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(end <= begin for end, begin in zip(ends, offsets[1:], strict=False))
    assert ends[-1] <= nbytes


@given(SIZES, st.integers(1, 8), st.data())
def test_pages_bring_every_byte_to_its_place_once(sizes, page_sectors, data):
    gaps = [data.draw(st.integers(0, 3000)) for _ in sizes]
    begins = [sum(sizes[:i]) + sum(gaps[: i + 1]) for i in range(len(sizes))]
    offsets, nbytes = place_in_storage(sizes)
    run = torch.randint(0, 256, (begins[-1] + sizes[-1] + 100,), dtype=torch.uint8)
    spans = [Span(*span) for span in zip(begins, sizes, offsets, strict=True)]
    storage, times = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    page_bytes = page_sectors * SECTOR_BYTES
    for at in range(0, len(run), page_bytes):
        page = run[at : at + page_bytes]
        for span in spans_of_page(spans, at, len(page)):
            storage[span.target : span.target + span.nbytes] = page[span.begin : span.begin + span.nbytes]
            times[span.target : span.target + span.nbytes] += 1
    for begin, size, offset in zip(begins, sizes, offsets, strict=True):
        assert torch.equal(storage[offset : offset + size], run[begin : begin + size])
        assert (times[offset : offset + size] == 1).all()


def test_neighbors_on_both_sides_are_one_copy():
    sizes, page = [1024, 4096, 512, 100, 512], 8192
    offsets, _ = place_in_storage(sizes)
    begins = [64, 1088, 5184, 5696, 5796]  # behind the fourth the device has a gap
    spans = [Span(*span) for span in zip(begins, sizes, offsets, strict=True)]
    assert spans_of_page(spans, 0, page) == (Span(64, 5732, 0), Span(5796, 512, offsets[4]))
    assert spans_of_page(spans, 0, 4096) == (Span(64, 4032, 0),)


@pytest.mark.whole
@pytest.mark.parametrize("switch", ["1", "0", None])
def test_profilers_see_ranges_if_they_are_asked_for(monkeypatch, switch):
    seen, module = [], HostDevice().module
    module.nvtx = types.SimpleNamespace(range=lambda name: (seen.append(name), nullcontext())[1])
    monkeypatch.delenv(RANGES, raising=False)
    if switch is not None:
        monkeypatch.setenv(RANGES, switch)
    device = Device(torch.device("cpu"), module)
    with device.range("lease", "blocks.0"):
        pass
    assert seen == (["swapper: lease blocks.0"] if switch == "1" else [])


def test_a_thread_that_waits_for_an_event_sleeps_and_events_of_copies_are_timed():
    made = []
    module = types.SimpleNamespace(Event=lambda **options: (made.append(options), HostDevice().module.Event())[1])
    device = Device(torch.device("cuda", 0), module)
    for is_timed in (False, True):
        device.record(Stream(), is_timed)
    assert made == [{"enable_timing": is_timed, "blocking": True} for is_timed in (False, True)]


def test_looking_for_free_memory_takes_a_small_part_of_the_time(monkeypatch):
    device, looks = HostDevice(), []

    def slow(where):
        looks.append(where)
        began = time.thread_time()
        while time.thread_time() < began + 0.02:  # so the next one is a second later
            pass
        return 1 << 40, 1 << 40

    monkeypatch.setattr(device.module, "mem_get_info", slow)
    tier = DeviceTier(device, None, 1 << 20, Counters())
    for _ in range(100):
        tier.keep_free_memory()
    assert len(looks) == 1
    monkeypatch.setattr(tier, "_next_check_s", 0.0)
    tier.keep_free_memory()
    assert len(looks) == 2


IMAGES = st.lists(st.integers(1, 1000), min_size=1, max_size=30).map(
    lambda sizes: {n: 1000 * s for n, s in enumerate(sizes)}
)


@given(IMAGES, st.integers(1, 40_000_000))
def test_what_stays_and_what_streams_fit_the_device(images, budget):
    units = [(n,) for n in images]
    names = [str(n) for n in images]
    try:
        placed = place_on_device(budget, 5000, images, units, names, "cuda")
    except BudgetError as refusal:
        least = int(str(refusal).split("(")[1].split(" bytes")[0])
        assert least > budget
        assert least == 5000 + max(images.values())
        assert place_on_device(least, 5000, images, units, names, "cuda").resident_set <= images.keys()
        return
    kept = sum(images[group] for group in placed.resident_set)
    streamed = [nbytes for group, nbytes in images.items() if group not in placed.resident_set]
    assert kept + max(streamed, default=0) <= placed.image_bytes == budget - 5000
    assert (not streamed) == (sum(images.values()) <= budget - 5000)


def test_what_stays_is_spread_evenly():
    images = dict.fromkeys(range(64), 1 << 20)
    units = [(n,) for n in images]
    resident_set = place_on_device(40 << 20, 0, images, units, ["unit"] * 64, "cuda").resident_set
    assert 28 <= len(resident_set) <= 36
    eighths = [len(resident_set & set(range(begin, begin + 8))) for begin in range(0, 64, 8)]
    assert max(eighths) - min(eighths) <= 1


@given(st.lists(st.integers(1, 200), min_size=1, max_size=20), st.integers(1, 60_000))
def test_pages_that_go_on_to_a_device_always_find_a_frame(sizes, budget_sectors):
    groups = [[size * SECTOR_BYTES * 16] for size in sizes]
    try:
        placement = place(budget_sectors * SECTOR_BYTES, 0, Demand(groups, (), held=6), ["unit"])
    except BudgetError:
        return
    pages = [-(-group[0] // placement.page_bytes) for group in groups]
    kept = sum(max(count - placement.streamed, 0) for count in pages)
    assert placement.frame_count >= kept + 6 + 2
    assert placement.pool_bytes <= budget_sectors * SECTOR_BYTES


def test_a_storage_keeps_its_tensors_while_its_memory_comes_and_goes():
    device = HostDevice("late")
    storage = DeviceStorage(device, 1024)
    view = storage.memory[512:1024].view(torch.float32)
    storage.free()
    assert device.used_bytes == 0
    stream = device.new_stream()
    for value in (1.0, 2.0):
        storage.allocate()
        storage.fill([(512, torch.full((128,), value).view(torch.uint8))], stream)
        storage.all_is_queued()
        version = view._version
        storage.wait_on_current_stream()
        assert (view == value).all()
        assert view._version == version
        storage.free()
    assert device.used_bytes == 0


class Memory:
    address = 1 << 30

    def __init__(self, most=None):
        self.most = most
        self.taken = []

    def wait_populated(self, nbytes):
        if self.most is not None and nbytes > self.most:
            raise IoError("take", "", 0, nbytes, 12)
        self.taken.append(nbytes)


@pytest.mark.whole
@pytest.mark.parametrize("frame_bytes", [1 << 20, 3 << 20, SLAB_BYTES + 4096])
def test_all_frames_are_registered_and_none_lies_in_two_slabs(frame_bytes):
    device, offset, count = Registering(), 8192, 1000
    registration = Registration(device, Memory(), slabs(offset, count * frame_bytes, frame_bytes))
    registration.wait()
    assert registration.describe() == "registered"
    registered = sorted(device.registered.items())
    assert registered[0][0] == Memory.address + offset
    assert sum(nbytes for _, nbytes in registered) == count * frame_bytes
    assert all(a + nbytes == b for (a, nbytes), (b, _) in pairwise(registered))
    assert all(nbytes % frame_bytes == 0 for _, nbytes in registered)
    assert threading.current_thread() not in device.threads
    registration.close()
    assert device.registered == {}


def test_a_refused_registration_is_told_and_the_rest_goes_on():
    frame = SLAB_BYTES // 2
    device = Registering(refused={Memory.address + 2 * frame})
    registration = Registration(device, Memory(), slabs(0, 8 * frame, frame))
    registration.wait()
    assert len(device.registered) == 3
    assert "error 2" in registration.describe()
    registration.close()
    assert device.registered == {}


def test_memory_that_the_system_refuses_is_not_registered():
    device = Registering()
    registration = Registration(device, Memory(most=SLAB_BYTES), slabs(0, 3 * SLAB_BYTES, SLAB_BYTES))
    registration.wait()
    assert list(device.registered.values()) == [SLAB_BYTES]
    assert "take" in registration.describe()
    registration.close()


DEVICE = torch.device("cuda:1")


class Cuda:
    """In place of torch.cuda, with CUDA's runtime as torch binds it; `refused` registrations get an error."""

    def __init__(self, refused=frozenset(), foreign=frozenset()):
        self.refused, self.foreign = refused, foreign
        self.registered = {}
        self.threads = set()
        self.current = threading.local()

    def is_available(self):
        return True

    def cudart(self):
        assert getattr(self.current, "device", None) == DEVICE, "the first device would take memory"
        return self

    @contextmanager
    def device(self, device):
        self.current.device = device
        yield
        del self.current.device

    def synchronize(self, device):
        assert device == DEVICE

    def cudaHostRegister(self, address, nbytes, flags):
        self.threads.add(threading.current_thread())
        assert flags == 1, "registered for one device only"
        if address in self.refused:
            return 712
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        self.threads.add(threading.current_thread())
        return 713 if self.registered.pop(address, None) is None or address in self.foreign else 0


def test_what_cuda_refuses_is_told_by_its_number_and_no_error_stays_in_the_users_thread(caplog):
    runtime = Cuda(refused={Memory.address + SLAB_BYTES}, foreign={Memory.address})
    registration = Registration(CudaRegistrar(DEVICE, runtime), Memory(), slabs(0, 3 * SLAB_BYTES, 4096))
    registration.wait()
    assert registration.describe() == f"CUDA does not register {SLAB_BYTES} bytes of host memory: error 712"
    assert len(runtime.registered) == 2
    registration.close()
    assert runtime.registered == {}
    assert threading.current_thread() not in runtime.threads
    assert "error 712; copies to and from devices will be slow" in caplog.text
    assert "does not end the registration of host memory: error 713" in caplog.text


def test_what_nobody_closes_is_forgotten_with_its_owner():
    runtime = Cuda()
    registration = Registration(CudaRegistrar(DEVICE, runtime), Memory(), slabs(0, SLAB_BYTES, 4096))
    registration.wait()
    assert len(runtime.registered) == 1
    del registration
    assert runtime.registered == {}


def test_what_is_still_registered_when_python_ends_is_given_back_and_does_not_hang(run_python):
    """Of a handle in a traceback, say: threads that Python no longer runs are neither begun nor waited for."""
    ended = run_python(
        f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from device.test_device_memory import DEVICE, SLAB_BYTES, Cuda, CudaRegistrar, Memory, Registration, slabs

        class Holder:  # as a handle: it closes what it has when Python lets go of it
            def __init__(self, registration): self.registration = registration
            def __del__(self): self.registration.close()

        class Told(Cuda):
            def cudaHostUnregister(self, address, *, write=os.write):
                write(1, b"given back ")
                return super().cudaHostUnregister(address)

        registration = Registration(CudaRegistrar(DEVICE, Told()), Memory(), slabs(0, 2 * SLAB_BYTES, 4096))
        registration.wait()
        cycle = [Holder(registration)]
        cycle.append(cycle)
        del registration, cycle  # collected when Python ends
        """
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "given back given back ", "")


def test_python_ends_while_the_driver_locks_a_slab(run_python):
    """The thread that asked for it is left alone; what was registered before is given back."""
    ended = run_python(
        f"""
        import os, sys, threading
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from device.test_device_memory import DEVICE, SLAB_BYTES, Cuda, CudaRegistrar, Memory, Registration, slabs

        locking = threading.Event()

        class Locking(Cuda):
            def cudaHostRegister(self, address, nbytes, flags):
                if self.registered:
                    locking.set()
                    threading.Event().wait()
                return super().cudaHostRegister(address, nbytes, flags)

            def cudaHostUnregister(self, address, *, write=os.write):
                write(1, b"given back ")
                return super().cudaHostUnregister(address)

        class Holder:
            def __init__(self, registration): self.registration = registration
            def __del__(self): self.registration.close()

        cycle = [Holder(Registration(CudaRegistrar(DEVICE, Locking()), Memory(), slabs(0, 3 * SLAB_BYTES, 4096)))]
        cycle.append(cycle)
        locking.wait()
        del cycle  # collected when Python ends
        """
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "given back ", "")


def test_a_handles_slots_are_registered_once_and_forgotten_when_it_closes(tmp_path):
    runtime, engine = Cuda(), _C.Engine(backend="threads")
    staging = Staging(lambda device: CudaRegistrar(DEVICE, runtime), device_type="cpu")
    file = _C.File(str(tmp_path / "x"), create=True)

    def move(offset, address, nbytes):
        yield engine.write(file, offset, address, nbytes)

    matrix = torch.arange(12, dtype=torch.uint8).view(3, 4)
    for _ in range(2):
        staging.begin("write", matrix.t(), 0, "x", move).wait()
        assert list(runtime.registered.values()) == [SLOTS * SLOT_BYTES]
    staging.close()
    assert runtime.registered == {}
    assert (tmp_path / "x").read_bytes() == bytes(matrix.t().flatten().tolist())


def test_a_locked_tensor_of_deepnvme_is_registered_as_a_whole_until_its_last_view_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Cuda()
    monkeypatch.setattr(deepnvme, "registrar_in_use", lambda: CudaRegistrar(DEVICE, runtime))
    tensor = deepnvme.new_locked_tensor(SLAB_BYTES // 4 + 1, torch.float32, must_lock=False)
    view, address = tensor[5:], tensor.data_ptr()
    assert runtime.registered == {address: SLAB_BYTES + 4}
    deepnvme.free_locked(tensor.data_ptr())
    del tensor
    assert runtime.registered and view.sum() == 0
    del view
    assert runtime.registered == {}


class Copying(Device):
    """Notes the pieces of copies, as addresses of their ends on both sides."""

    def __init__(self):
        super().__init__(torch.device("cpu"), Cuda())
        self.pieces = []

    def _copying(self, stream):
        return nullcontext()

    def record(self, stream, is_timed=False):
        return None

    def _copy(self, target, source, stream):
        self.pieces.append(tuple((memory.data_ptr(), memory.data_ptr() + memory.nbytes) for memory in (target, source)))
        target.copy_(source)


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 400)), max_size=4), st.integers(0, 99), st.integers(1, 200)
)
def test_no_copy_crosses_the_border_of_registered_memory(registered, begin, nbytes):
    device, host, there = Copying(), torch.arange(800).to(torch.uint8), torch.zeros(200, dtype=torch.uint8)
    for offset, size in registered:
        device.expect(host.data_ptr() + offset, size)
    borders = {host.data_ptr() + at for offset, size in registered for at in (offset, offset + size)}
    device.copy([(there[:nbytes], host[begin : begin + nbytes])], None)  # up
    assert torch.equal(there[:nbytes], host[begin : begin + nbytes])
    ups = [source for _, source in device.pieces]
    device.copy([(host[begin : begin + nbytes], there[:nbytes])], None)  # down
    downs = [target for target, _ in device.pieces[len(ups) :]]
    for pieces in (ups, downs):
        assert not [border for border in borders for first, last in pieces if first < border < last]
        assert len(pieces) == 1 + len(
            {b for b in borders if host.data_ptr() + begin < b < host.data_ptr() + begin + nbytes}
        )


@pytest.mark.whole
@pytest.mark.parametrize("nbytes", [1 << 20, 3 * SLAB_BYTES - 4096])
def test_memory_without_units_is_registered_in_slabs(nbytes):
    device = Registering()
    registration = Registration(device, Memory(), slabs(0, nbytes, 512))
    registration.wait()
    assert registration.registered_bytes == nbytes == sum(device.registered.values())
    assert all(size <= SLAB_BYTES for size in device.registered.values())
    assert len(device.threads) == 1
    registration.close()


@given(st.integers(0, 1 << 40), st.integers(1, 200), st.sampled_from([4096, 5 << 20, SLAB_BYTES, SLAB_BYTES + 4096]))
def test_slabs_hold_whole_units_and_all_of_them(offset, count, unit_bytes):
    parts = slabs(offset, count * unit_bytes, unit_bytes)
    assert parts[0][0] == offset and sum(nbytes for _, nbytes in parts) == count * unit_bytes
    assert all(begin + nbytes == after for (begin, nbytes), (after, _) in pairwise(parts))
    assert all(nbytes % unit_bytes == 0 for _, nbytes in parts)
    assert all(nbytes <= max(SLAB_BYTES, unit_bytes) for _, nbytes in parts)


class Gated(Registering):
    """Notes the order, and lets the first one end once the second registration is waited for."""

    def __init__(self):
        super().__init__()
        self.order = []
        self.at_first = None

    def register(self, address, nbytes):
        self.order.append(address)
        if self.at_first is not None:
            act, self.at_first = self.at_first, None
            act()
        return super().register(address, nbytes)


def test_one_thread_registers_all_memory_and_begins_with_what_is_waited_for():
    device, begun, both = Gated(), threading.Event(), threading.Event()
    others = [Memory(), Memory()]
    others[1].address = Memory.address + (1 << 40)

    def wait_for_second():
        begun.set()
        assert both.wait(60)
        waiting = threading.Thread(target=second.wait)
        waiting.start()
        with second._worker.changed:
            assert second._worker.changed.wait_for(lambda: second.is_awaited, 60)

    device.at_first = wait_for_second
    first = Registration(device, others[0], slabs(0, 4 * SLAB_BYTES, SLAB_BYTES))
    assert begun.wait(60)
    second = Registration(device, others[1], slabs(0, 2 * SLAB_BYTES, SLAB_BYTES))
    both.set()
    second.wait()
    assert second.registered_bytes == 2 * SLAB_BYTES
    first.wait()
    assert len(device.threads) == 1
    mine, theirs = ([one.address + at * SLAB_BYTES for at in range(4)] for one in others)
    assert device.order == [mine[0], *theirs[:2], *mine[1:]]
    for registration in (first, second):
        registration.close()
    assert device.registered == {}


def test_what_is_closed_before_its_turn_is_not_registered():
    device, begun, closed = Gated(), threading.Event(), threading.Event()
    device.at_first = lambda: (begun.set(), closed.wait(60))
    first = Registration(device, Memory(), slabs(0, 2 * SLAB_BYTES, SLAB_BYTES))
    other = Memory()
    other.address = Memory.address + (1 << 40)
    second = Registration(device, other, slabs(0, 2 * SLAB_BYTES, SLAB_BYTES))
    assert begun.wait(60)
    second.close()
    closed.set()
    first.wait()
    assert sorted(device.registered) == [Memory.address, Memory.address + SLAB_BYTES]
    first.close()

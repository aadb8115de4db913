"""A matrix larger than the device's budget: a part is copied while the kernel of the one before runs, and each wait is needed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import swapper
from infer import test_row_partitioned as wide
from infer.host_device import ORDERS, HostDevice, Registering
from swapper.device.copies import NewCopies
from swapper.infer.weight_rows import PARTS_IN_MEMORY, RowPrefetcher

MIB = 1 << 20
ARGUMENTS = (32_768, True, torch.bfloat16)
"""A matrix of 16 MiB, in eight parts."""
IDS = torch.arange(8).view(1, 8)


def loaded_on(tmp_path, device):
    reference = wide.make(*ARGUMENTS)
    wide.save(reference, tmp_path / "model")
    model = swapper.load(
        wide.empty(*ARGUMENTS), tmp_path / "model", host_memory="12MiB", device=device, device_memory="6MiB"
    )
    loaded = swapper.loaded(model)
    assert loaded._cut_bytes == reference.head.weight.nbytes
    return reference, model, loaded


@pytest.mark.parametrize("order", ORDERS)
def test_outputs_are_those_of_the_whole_matrix(tmp_path, order):
    reference, model, loaded = loaded_on(tmp_path, HostDevice(order))
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(IDS), reference(IDS))
    assert loaded.counters.uploaded_bytes >= 3 * reference.head.weight.nbytes
    loaded.unload()


def test_its_memory_is_registered_and_counted(tmp_path):
    device = Registering()
    _, model, loaded = loaded_on(tmp_path, device)
    slots = loaded._operators[id(model.head.weight), F.linear].parts._slots
    loaded._streaming.host_side.wait()
    assert device.registered[slots.data_ptr()] == slots.nbytes
    assert loaded.counters.registered_bytes == sum(device.registered.values())
    loaded.unload()


def test_a_part_is_sent_before_the_kernel_of_the_one_before(tmp_path, monkeypatch):
    _, model, loaded = loaded_on(tmp_path, HostDevice("late"))
    events, send, linear = [], NewCopies.send, torch.nn.functional.linear
    monkeypatch.setattr(NewCopies, "send", lambda *args: (events.append("copy"), send(*args))[1])
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: (events.append("kernel"), linear(*args))[1])
    request = RowPrefetcher._request

    def all_read(self, wanted):
        request(self, wanted)
        loaded._streaming.engine.drain()

    monkeypatch.setattr(RowPrefetcher, "_request", all_read)
    with torch.no_grad():
        model(IDS)
    events.remove("copy")  # of the embedding's rows
    parts = events.count("copy")
    assert parts > PARTS_IN_MEMORY
    of_head = events[events.index("copy") :]
    assert of_head == ["copy", *["copy", "kernel"] * (parts - 1), "kernel"]
    loaded.unload()


def no_wait(self):
    """The oldest part, for kernels that do not wait for it."""
    part = self._reading[0]
    part.wait()
    copy = self._send(self._copies, part)
    return part.matrices(copy.memory, copy.offsets)


def test_a_kernel_that_does_not_wait_for_its_part_is_noticed(tmp_path, monkeypatch):
    reference, model, loaded = loaded_on(tmp_path, HostDevice("late"))
    monkeypatch.setattr(RowPrefetcher, "_matrices", no_wait)
    with torch.no_grad():
        assert not torch.equal(model(IDS), reference(IDS))
    loaded.unload()


def test_a_slot_that_is_read_into_before_its_copy_is_over_is_noticed(tmp_path, monkeypatch):
    _, model, loaded = loaded_on(tmp_path, HostDevice("late"))
    copies, send = loaded._on_device.copies, RowPrefetcher._send

    def forgetful(self, *args):
        copy = send(self, *args)
        self._copied.clear()
        return copy

    monkeypatch.setattr(RowPrefetcher, "_matrices", no_wait)  # so that no kernel makes a copy run
    monkeypatch.setattr(RowPrefetcher, "_send", forgetful)
    with torch.no_grad():
        model(IDS)
    with pytest.raises(AssertionError, match="memory was changed before its copy was over"):
        copies.finish()
    copies._stream.done = len(copies._stream.operations)
    loaded.unload()

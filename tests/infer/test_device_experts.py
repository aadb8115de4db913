"""Experts on a device: the last used ones stay there, others are copied without a wait, and each wait is needed."""

from __future__ import annotations

import pytest
import torch

import swapper
from infer import test_experts as mixture
from infer.host_device import ORDERS, HostDevice
from swapper.infer.experts import DeviceExperts

MIB = 1 << 20
ALL_EXPERTS = 3 * mixture.EXPERTS * mixture.ONE_EXPERT


def loaded_on(tmp_path, device, budget, host="15MiB"):
    reference, path = mixture.saved(tmp_path)
    model = swapper.load(mixture.empty(), path, host_memory=host, device=device, device_memory=budget)
    return reference, model, swapper.loaded(model)


@pytest.mark.parametrize("order", ORDERS)
def test_results_are_those_of_the_whole_model(tmp_path, order):
    reference, model, loaded = loaded_on(tmp_path, HostDevice(order), 10 * MIB)
    with torch.no_grad():
        for chosen in ((0, 1), (1, 2, 7), (3, 0), tuple(range(mixture.EXPERTS)), (0, 1)):
            batch = mixture.rows(*chosen)
            assert torch.equal(model(*batch), reference(*batch))
    loaded.unload()


def test_those_used_last_stay_there_within_the_budget_and_are_neither_read_nor_copied_again(tmp_path):
    device = HostDevice("late")
    budget = 12 * MIB
    reference, model, loaded = loaded_on(tmp_path, device, budget, host="6MiB")
    there = loaded._experts.there
    with torch.no_grad():
        batch = mixture.rows(2)  # three experts, of one MiB each
        model(*batch)
        loaded._streaming.engine.drain()
        read, copied = loaded.counters.bytes_read, loaded.counters.uploaded_bytes
        for _ in range(3):
            assert torch.equal(model(*batch), reference(*batch))
        loaded._streaming.engine.drain()
        assert (loaded.counters.bytes_read, loaded.counters.uploaded_bytes) == (read, copied)
        for number in range(mixture.EXPERTS):
            model(*mixture.rows(number))
            assert 0 < there._used_bytes <= budget - loaded._on_device.tier._used_bytes
        model(*batch)
        assert loaded.counters.uploaded_bytes > copied + mixture.ONE_EXPERT
        assert loaded.counters.uploaded_bytes > ALL_EXPERTS
    loaded.unload()


def test_a_kernel_that_does_not_wait_for_its_expert_is_noticed(tmp_path, monkeypatch):
    device = HostDevice("late")
    reference, model, loaded = loaded_on(tmp_path, device, 10 * MIB)
    send = DeviceExperts.send

    def without_event(self, key, recipe, sources):
        send(self, key, recipe, sources)
        self._entries[key].users.add(device.module.current)

    monkeypatch.setattr(DeviceExperts, "send", without_event)
    with torch.no_grad():
        batch = mixture.rows(1)
        assert not torch.equal(model(*batch), reference(*batch))
    loaded.unload()


def test_a_change_of_one_is_refused_and_undone(tmp_path):
    reference, model, loaded = loaded_on(tmp_path, HostDevice("at once"), 10 * MIB)
    batch = mixture.rows(1)
    with torch.no_grad():
        model(*batch)
        handle = model.layers[0].experts[1].up.register_forward_pre_hook(lambda module, _: module.weight.add_(1))
        with pytest.raises(swapper.StateError, match="changed"):
            model(*batch), model(*batch)
        handle.remove()
        assert torch.equal(model(*batch), reference(*batch))
    loaded.unload()


def test_a_device_without_memory_drops_those_that_are_not_in_use(tmp_path):
    device = HostDevice("late")
    reference, model, loaded = loaded_on(tmp_path, device, 12 * MIB)
    empty, refused = device.empty, []

    def short(nbytes):
        if loaded._experts.there._used_bytes > 2 * MIB:
            refused.append(nbytes)
            raise torch.OutOfMemoryError("as asked for")
        return empty(nbytes)

    device.empty = short
    with torch.no_grad():
        for number in range(mixture.EXPERTS):
            batch = mixture.rows(number)
            assert torch.equal(model(*batch), reference(*batch))
    assert refused
    loaded.unload()

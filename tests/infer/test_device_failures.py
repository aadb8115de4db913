"""A model on a device: memory that runs out, errors, lost devices and files, and what is left when it is unloaded or forgotten."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch

import swapper
from infer.device_models import HOST, MIB, check, load, run
from infer.host_device import Registering
from infer.small import make, on_meta
from swapper.device.tier import DeviceTier


def test_a_device_that_runs_out_of_memory_has_what_stays_given_up(saved, device, opened):
    """Something else on the device has taken what the budget counted on."""
    reference = make()
    model = load(saved(reference), device, opened, budget=12 * MIB)
    run(model)
    run(model)
    assert device.used_bytes > 6 * MIB
    device.module.capacity_bytes = 4 * MIB
    assert torch.equal(run(model), run(reference))
    assert torch.equal(run(model), run(reference))
    assert device.used_bytes <= 4 * MIB
    check(model)


def test_out_of_memory_in_the_middle_of_a_pass_is_tried_once_more(saved, device, opened, monkeypatch):
    monkeypatch.setattr(DeviceTier, "keep_free_memory", lambda self: None)
    reference = make()
    model = load(saved(reference), device, opened, budget=12 * MIB)
    run(model)
    run(model)
    device.module.capacity_bytes = 4 * MIB
    assert torch.equal(run(model), run(reference))
    assert 1 <= device.module.times_emptied <= 3
    device.module.capacity_bytes = MIB // 2  # nothing helps
    with pytest.raises(
        swapper.BudgetError, match=r"has no .* left for .*after everything that is not in use was given up"
    ):
        run(model)
    device.module.capacity_bytes = 1 << 30
    assert torch.equal(run(model), run(reference))
    check(model)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_a_forward_leaves_nothing_behind(saved, device, opened, error):
    def stop(*_):
        raise error

    reference = make()
    model = load(saved(reference), device, opened)
    for module in (model.layers[3], list(model.layers[0].modules())[-1], model.head):
        handle = module.register_forward_pre_hook(stop)
        for _ in range(2):
            with pytest.raises(error):
                run(model)
        handle.remove()
        assert torch.equal(run(model), run(reference))
    check(model)


def test_a_pass_that_is_abandoned_leaves_nothing_behind(saved, device, opened):
    def stop(*_):
        raise KeyboardInterrupt

    reference = make()
    model = load(saved(reference), device, opened)
    handle = model.layers[3].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        run(model)
    handle.remove()
    swapper.loaded(model)._hooks.drop_stale()  # as the next call does
    check(model)
    assert torch.equal(run(model), run(reference))


def test_a_file_that_ends_in_the_middle_of_a_pass(saved, device, opened):
    path = saved(make())
    model = load(path, device, opened)
    model.layers[0].register_forward_pre_hook(lambda *_: os.truncate(path, 8 * MIB))
    with pytest.raises(swapper.IoError, match="end of"):
        run(model)
    check(model)
    with pytest.raises(swapper.CheckpointError, match="changed"):
        run(model)


@pytest.mark.parametrize("budget", [4 * MIB, 12 * MIB])
def test_a_device_that_is_lost_is_named_and_nothing_hangs(saved, device, opened, budget):
    """As after a failed assertion in a kernel: every call of CUDA's fails from then on."""
    path = saved(make())
    model = load(path, device, opened, budget=budget)
    loaded = swapper.loaded(model)
    run(model)
    model.layers[2].register_forward_pre_hook(lambda *_: setattr(device.module, "is_lost", True))
    for _ in range(2):
        with pytest.raises(swapper.DeviceError, match=r"cpu failed at .*as asked for.*new process"):
            run(model)
    loaded._on_device.tier.finish()
    loaded._streaming.pager.check()
    loaded.unload()
    assert all(p.is_meta for p in model.parameters())
    again = swapper.load(on_meta(), path, host_memory=HOST)
    assert torch.equal(run(again), run(make()))
    swapper.loaded(again).unload()


def test_unloading_gives_everything_back(saved, device, opened):
    reference = make()
    model = load(saved(reference), device, opened, budget=12 * MIB)
    run(model)
    storages = [weakref.ref(image.storage) for image in swapper.loaded(model)._on_device.tier._images]
    gc.collect()
    gc.disable()
    try:
        swapper.loaded(model).unload()
        assert all(storage() is None or not storage().is_allocated for storage in storages)
    finally:
        gc.enable()
    assert all(p.is_meta for p in model.parameters())
    again = swapper.load(model, saved(reference), host_memory=HOST, device=device, device_memory=4 * MIB)
    opened.append(again)
    assert torch.equal(run(again), run(reference))


def test_a_model_that_is_forgotten_goes_with_what_it_had(saved):
    device = Registering()
    model = load(saved(make()), device, [])
    run(model)
    swapper.loaded(model)._streaming.host_side.wait()
    assert device.registered
    ghost = weakref.ref(model)
    del model
    gc.collect()
    assert ghost() is None
    assert device.registered == {}

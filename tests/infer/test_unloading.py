"""Unloading a model of which people still have something, or while others are in its forward."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import swapper
from infer.small import BUDGET, descriptors, on_meta, run


def test_unloading_gives_files_hooks_and_memory_back(path, reference):
    run(swapper.load(on_meta(), path, host_memory=BUDGET))
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("swapper-arena")
    model = swapper.load(on_meta(), path, host_memory=BUDGET)
    assert torch.equal(run(model), run(reference))
    with swapper.loaded(model) as loaded:
        assert descriptors() > 0
        assert loaded.counters.bytes_read > 0
    assert descriptors() == 0
    assert Path("/proc/self/maps").read_text().count("swapper-arena") == maps
    assert all(p.is_meta for p in model.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    with pytest.raises(swapper.StateError, match=r"not loaded by swapper\.load"):
        swapper.loaded(model)
    assert torch.equal(run(swapper.load(model, path, host_memory=BUDGET)), run(reference))


def test_what_was_read_is_counted_to_the_end(path):
    model = swapper.load(on_meta(), path, host_memory=BUDGET)
    loaded = swapper.loaded(model)
    run(model)
    loaded.unload()  # nobody had asked before
    assert loaded.counters.bytes_read > 0


def test_a_model_that_is_forgotten_goes_with_all_that_it_had(path):
    model = swapper.load(on_meta(), path, host_memory=BUDGET)
    run(model)
    ghost = weakref.ref(model)
    del model
    gc.collect()
    assert ghost() is None
    assert descriptors() == 0


@pytest.mark.parametrize("budget", [BUDGET, "1GiB"])
def test_what_people_have_of_a_model_outlives_its_unloading(path, reference, budget):
    """Weights that stay in memory are plain ones: their memory must not go while somebody has a tensor of it."""
    run(swapper.load(on_meta(), path, host_memory=budget))
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("swapper-arena")
    model = swapper.load(on_meta(), path, host_memory=budget)
    run(model)
    run(model)
    named = dict(model.named_parameters())
    settled = {name: p for name, p in named.items() if type(p) is nn.Parameter}
    assert len(settled) == len(named) if budget == "1GiB" else 0 < len(settled) < len(named)
    heads = {name: p[:1] for name, p in settled.items()}
    swapper.loaded(model).unload()
    del model, named
    gc.collect()
    for name, value in reference.named_parameters():
        if name in settled:
            assert torch.equal(settled[name], value)
            assert torch.equal(heads[name], value[:1])
    settled.clear()
    heads.clear()
    gc.collect()
    assert Path("/proc/self/maps").read_text().count("swapper-arena") == maps


def test_unloading_waits_for_the_forward_of_another_thread(path, reference):
    model = swapper.load(on_meta(), path, host_memory=BUDGET)
    loaded = swapper.loaded(model)
    inside, go_on, outputs = threading.Event(), threading.Event(), []

    def stop(*_):
        inside.set()
        assert go_on.wait(60)

    hook = model.layers[1].register_forward_hook(stop)
    runs = threading.Thread(target=lambda: outputs.append(run(model)))
    runs.start()
    assert inside.wait(60)
    unloads = threading.Thread(target=loaded.unload)
    unloads.start()
    unloads.join(0.2)
    assert unloads.is_alive()
    hook.remove()
    go_on.set()
    runs.join()
    unloads.join()
    assert torch.equal(outputs[0], run(reference))
    assert descriptors() == 0


def test_unloading_from_inside_of_a_forward_is_refused(path, reference):
    model = swapper.load(on_meta(), path, host_memory=BUDGET)
    loaded = swapper.loaded(model)
    hook = model.layers[1].register_forward_hook(lambda *_: loaded.unload())
    with pytest.raises(swapper.StateError, match="inside of the model's forward"):
        run(model)
    with pytest.raises(swapper.StateError, match="inside of the model's forward"):
        loaded.map(lambda _: loaded.unload(), [1, 2])
    hook.remove()
    assert torch.equal(run(model), run(reference))
    loaded.unload()


@pytest.mark.parametrize("budget", [BUDGET, "1GiB"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_with_what_to_do_instead(path, reference, budget, duplicate):
    model = swapper.load(on_meta(), path, host_memory=budget)
    run(model)
    with pytest.raises(swapper.SwapperError, match="state_dict"):
        duplicate(model)
    assert torch.equal(run(model), run(reference))
    swapper.loaded(model).unload()

"""A model on a device: what is refused, with the remedy."""

from __future__ import annotations

import pytest
import torch

import swapper
from infer.device_models import load, run
from infer.small import CONFIG, make, on_meta


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_named(saved):
    with pytest.raises(swapper.DeviceError, match=r"device='cuda'.*device='cpu'"):
        swapper.load(on_meta(), saved(make()), device="cuda")


@pytest.mark.whole
@pytest.mark.parametrize("device", ["banana", "meta", 1.5])
def test_what_is_no_device_is_refused(saved, device):
    with pytest.raises(swapper.ConfigError, match="device="):
        swapper.load(on_meta(), saved(make()), device=device)


def test_device_memory_without_a_device_is_refused(saved):
    with pytest.raises(swapper.ConfigError, match="device_memory"):
        swapper.load(on_meta(), saved(make()), device_memory="1GiB")


@pytest.mark.whole
def test_models_that_share_memory_run_on_the_cpu(saved, device):
    path = saved(make())
    with pytest.raises(swapper.UnsupportedError, match="share memory run on the CPU"):
        with swapper.shared_memory("8MiB"):
            swapper.load(on_meta(), path, device=device)


def test_an_input_on_another_device_is_named(saved, device, opened):
    model = load(saved(make()), device, opened)
    with pytest.raises(swapper.DeviceError, match="an input is on meta"):
        run(model, torch.empty(1, 4, dtype=torch.long, device="meta"))


def test_moving_is_refused(saved, device, opened):
    model = load(saved(make()), device, opened)
    with pytest.raises(swapper.StateError, match="cannot be moved"):
        model.half()
    assert CONFIG.layers == 6

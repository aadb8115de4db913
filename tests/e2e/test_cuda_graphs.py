"""CUDA graphs of code that uses a group are refused by name, where its memory on the device is another one at each use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e.device_twins import MIB, SMALL, MakeTwins, on_device
from e2e.models import Net, tokens, train_step

__all__ = ["on_device"]


def batch() -> torch.Tensor:
    torch.manual_seed(0)
    return tokens()


def assert_refused(model: nn.Module) -> None:
    with pytest.raises(swapper.UnsupportedError, match=r"record CUDA graphs.*reduce-overhead"):
        model(batch())


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_recording_compiled_code_with_streamed_groups_is_refused(on_device: MakeTwins, mode: str) -> None:
    pair = on_device()
    plain = pair.swapped(batch())
    assert_refused(torch.compile(pair.swapped, mode=mode))
    assert torch.equal(pair.swapped(batch()), plain)  # nothing is left of the refused pass
    pair.swapped.compile(mode=mode)
    assert_refused(pair.swapped)


def test_other_ways_to_ask_for_graphs_are_refused_and_other_compilers_are_not(on_device: MakeTwins) -> None:
    pair = on_device()
    assert_refused(torch.compile(pair.swapped, options={"triton.cudagraphs": True}))
    assert_refused(torch.compile(pair.swapped, backend="cudagraphs"))
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert_refused(torch.compile(pair.swapped))
    compiled = torch.compile(pair.swapped, backend="eager")
    assert torch.equal(compiled(batch()), pair.swapped(batch()))


def test_recording_compiled_code_of_a_model_for_inference_is_refused(tmp_path: Path) -> None:
    plain = Net()
    torch.save(plain.state_dict(), tmp_path / "model.pt")
    options = {"host_memory": "8MiB", "device": HostDevice(), "device_memory": SMALL}
    with torch.no_grad(), swapper.loaded(swapper.load(Net(), tmp_path / "model.pt", **options)) as loaded:
        model = loaded._model()
        expected = model(batch())
        assert_refused(torch.compile(model, mode="reduce-overhead"))
        assert_refused(torch.compile(model, options={"triton.cudagraphs": True}))
        assert torch.equal(model(batch()), expected) and torch.equal(expected, plain(batch()))


def test_groups_that_stay_on_the_device_keep_their_addresses(
    on_device: MakeTwins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", lambda self, module, inputs: module.forward)
    pair = on_device(device_memory=64 * MIB, params="device")
    compiled = torch.compile(pair.swapped, mode="reduce-overhead")
    seen = []
    for _ in range(2):
        compiled(batch()).sum().backward()
        with pair.manager.gather(pair.swapped):
            seen.append([parameter.data_ptr() for parameter in pair.swapped.parameters()])
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("budget", [SMALL, 64 * MIB])
def test_capturing_a_forward_is_refused(tmp_path: Path, budget: int) -> None:
    device = HostDevice()
    with swapper.SwapManager(tmp_path, host_memory="8MiB") as manager:
        model = Net()
        model, _ = manager.offload(model, torch.optim.AdamW(model.parameters()), device=device, device_memory=budget)
        expected = model(batch())
        device.module.is_current_stream_capturing = lambda: True
        with pytest.raises(swapper.UnsupportedError, match=r"a CUDA graph is being captured.*make_graphed_callables"):
            model(batch())
        del device.module.is_current_stream_capturing
        assert torch.equal(model(batch()), expected)


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_capturing_a_step_is_refused_and_it_can_be_taken_then(on_device: MakeTwins, update: str) -> None:
    pair = on_device(device=(device := HostDevice()), device_memory=64 * MIB, params="device", update=update)
    pair.train(train_step, steps=1)
    device.module.is_current_stream_capturing = lambda: True
    with pytest.raises(swapper.UnsupportedError, match=r"a CUDA graph is being captured"):
        train_step(pair.swapped, pair.optimizer)
    del device.module.is_current_stream_capturing
    pair.optimizer.zero_grad()
    pair.train(train_step, steps=2)
    pair.finish(paged=False)

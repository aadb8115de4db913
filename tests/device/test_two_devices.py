"""Two devices in one process: each with a model, one model over both, and one that is not the current one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two devices"),
]
MIB = 1 << 20
WIDTH = 256
DEVICES = ("cuda:0", "cuda:1")


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def step(model: nn.Module, optimizer: Any, device: str, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    loss = model(torch.randn(16, WIDTH, generator=generator).to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


@pytest.mark.whole
@pytest.mark.parametrize("update_on", ["cpu", "device"])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_models_on_two_devices_train_by_turns_as_each_alone(tmp_path: Path, update: str, update_on: str) -> None:
    def offloaded(name: str, device: str) -> tuple[swapper.SwapManager, nn.Module, Any]:
        (tmp_path / name).mkdir()
        manager = swapper.SwapManager(tmp_path / name, host_memory=64 * MIB)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options: dict[str, Any] = {"params": "nvme", "optimizer_state": "nvme", "gradients": "host", "update": update}
        model, optimizer = manager.offload(
            model, optimizer, device=device, device_memory=16 * MIB,
            accelerator=swapper.Accelerator(update_on=update_on), **options,
        )  # fmt: skip
        return manager, model, optimizer

    alone = offloaded("alone", "cuda:0")
    expected = [step(alone[1], alone[2], "cuda:0", number) for number in range(4)]
    alone[0].close()
    runs = {device: offloaded(device[-1], device) for device in DEVICES}
    found: dict[str, list[float]] = {device: [] for device in runs}
    for number in range(4):
        for device, (_, model, optimizer) in runs.items():
            with torch.cuda.device(device):
                found[device].append(step(model, optimizer, device, number))
    for manager, model, _ in runs.values():
        with manager.gather(model):
            where = {parameter.device for parameter in model.parameters()}
        manager.close()
        assert len(where) == 1
    assert found == dict.fromkeys(runs, expected)


def test_a_model_trains_on_a_device_that_is_not_the_current_one(tmp_path: Path) -> None:
    losses = []
    for current in (0, 1):
        (tmp_path / str(current)).mkdir()
        with torch.cuda.device(current), swapper.SwapManager(tmp_path / str(current), host_memory=64 * MIB) as manager:
            model = make()
            original = torch.optim.AdamW(model.parameters(), lr=1e-3)
            there = swapper.Accelerator(update_on="device")
            model, optimizer = manager.offload(
                model, original, device="cuda:1", device_memory=16 * MIB, accelerator=there
            )
            losses.append([step(model, optimizer, "cuda:1", number) for number in range(3)])
    assert losses[0] == losses[1]


def test_models_loaded_to_two_devices_compute_by_turns_as_in_memory(tmp_path: Path) -> None:
    torch.save(make().state_dict(), tmp_path / "model.pt")
    options: dict[str, Any] = {"host_memory": 16 * MIB, "device_memory": MIB}  # of one and a half
    models = {device: swapper.load(make(), tmp_path / "model.pt", device=device, **options) for device in DEVICES}
    with torch.no_grad():
        for number in range(6):
            value = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number))
            for device, model in models.items():
                assert torch.equal(model(value.to(device)), make().to(device)(value.to(device)))
    for model in models.values():
        loaded = swapper.loaded(model)
        assert loaded.counters.uploaded_bytes > 3 * MIB and loaded.counters.upload_s > 0
        loaded.unload()


def test_activations_of_a_model_over_both_are_saved_of_each(tmp_path: Path) -> None:
    """Autograd has a thread for each device."""
    halves = [make().to(device) for device in DEVICES]

    def gradients() -> list[torch.Tensor]:
        value = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(0))
        for device, half in zip(DEVICES, halves, strict=True):
            half.zero_grad()
            value = half(value.to(device)).sin()
        value.square().mean().backward()
        return [
            parameter.grad.clone() for half in halves for parameter in half.parameters() if parameter.grad is not None
        ]

    expected = gradients()
    with swapper.SwapManager(tmp_path, host_memory=64 * MIB) as manager:
        activations = swapper.offload_activations(manager, to="auto", host_memory=32 * MIB, device_memory=8 * MIB)
        for _ in range(3):
            with activations:
                found = gradients()
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert len(found) == len(expected) == 24 and activations.counters.up_bytes > 32 * MIB

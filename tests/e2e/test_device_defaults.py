"""`offload(..., device=...)` chooses by itself where updates are, what stays, and how much of the device's memory it uses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e.device_twins import MIB, MakeTwins, on_device
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import Twins
from swapper.errors import UnsupportedError
from swapper.runtime.process import rng_states, set_rng_states
from swapper.train.planning import request

__all__ = ["on_device"]


def said(caplog: pytest.LogCaptureFixture, start: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(start)]


def test_updates_are_on_the_device_and_one_line_says_what_was_chosen(
    on_device: MakeTwins, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "swapper"):
        pair = on_device(device=HostDevice("late"), device_memory="auto", params="auto", optimizer_state="auto")
    assert pair.manager.current.run.plan.request.updates_there
    (line,) = said(caplog, "offload: device: ")
    for part in (
        "of parameters",
        "of gradients",
        "of optimizer state stay",
        "half of what is free",
        "on the device, in",
    ):
        assert part in line
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@pytest.mark.usefixtures("stand_in")
def test_the_default_of_an_accelerator_asks_for_nothing_on_a_cpu(tmp_path: Path) -> None:
    model = Net()
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        given = torch.optim.AdamW(model.parameters())
        plan = manager.plan(model, given, accelerator=swapper.Accelerator())
        assert not plan.request.updates_there
        with pytest.raises(swapper.ConfigError, match="update_on='device' needs a device"):
            manager.plan(model, given, accelerator=swapper.Accelerator(update_on="device"))


@pytest.mark.whole
@pytest.mark.parametrize(
    "options, refused",
    [
        ({}, False),
        ({"update_on": "auto"}, False),
        ({"update_on": "device"}, True),
        ({"optimizer_state": "device"}, True),
    ],
)
def test_where_the_device_cannot_decode_state_the_default_is_the_cpu(
    on_device: MakeTwins, monkeypatch: Any, caplog: pytest.LogCaptureFixture, options: dict[str, Any], refused: bool
) -> None:
    def missing(name: str) -> None:
        raise UnsupportedError("kernels need Triton")

    monkeypatch.setattr(request, "uses_kernel", lambda device: True)
    monkeypatch.setattr(request, "kernel", missing)
    given = {"device_memory": 16 * MIB, "budget": 64 * MIB, "state_codec": "8bit", "wait": True, **options}
    pair = on_device(Net().to(torch.bfloat16), master=True, **given)
    if refused:
        with pytest.raises(UnsupportedError, match="kernels need Triton"):
            pair.plan()
        return
    with caplog.at_level(logging.INFO, "swapper"):
        assert not pair.plan().request.updates_there
    (line,) = said(caplog, "updates are on the CPU")
    assert "kernels need Triton" in line


# --- device_memory ----------------------------------------------------------------------------------------------------


class Llama(nn.Module):
    """The parameters of a Llama of 1.24 G, on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)]
        self.embedding = nn.Embedding(128256, 2048, device="meta", dtype=torch.bfloat16)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(b, a, bias=False, device="meta", dtype=torch.bfloat16) for a, b in shapes)
            for _ in range(16)
        )


@pytest.mark.parametrize("codec", ["exact", "8bit"])
def test_the_smallest_device_memory_is_what_the_largest_parameter_needs(tmp_path: Path, codec: str) -> None:
    model = Llama()
    embedding_bytes = model.embedding.weight.nbytes
    with swapper.SwapManager(tmp_path, host_memory="64GiB") as manager:
        given = torch.optim.AdamW(model.parameters())
        options: dict[str, Any] = {"master_weights": torch.float32, "state_codec": codec}
        options["device"] = HostDevice("late", capacity_bytes=8 << 30)
        with pytest.raises(swapper.BudgetError) as caught:
            manager.plan(model, given, device_memory="256MiB", **options)
        smallest = caught.value.smallest_bytes
        assert smallest is not None and smallest < 2 * embedding_bytes + 160 * MIB  # with its gradient on its way
        manager.plan(model, given, device_memory=smallest + 64 * MIB, **options)


def fill(device: HostDevice, nbytes: int) -> None:
    """The user's own tensors take this much, at the peak."""
    module = device.module
    module.peak_bytes = max(module.peak_bytes, module.used_bytes + nbytes)


def filled_step(device: HostDevice, nbytes: int) -> Any:
    def step(model: Any, optimizer: Any) -> torch.Tensor:
        loss = loss_of(model, tokens())
        fill(device, nbytes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def auto_pair(on_device: MakeTwins, device: HostDevice) -> Twins:
    return on_device(
        Net(depth=12), device=device, device_memory="auto", params="host", optimizer_state="host", gradients="host"
    )


@pytest.mark.parametrize("needed", [0, 600 * MIB])
def test_from_the_second_step_on_what_steps_leave_of_the_memory_is_used(
    on_device: MakeTwins, monkeypatch: Any, caplog: pytest.LogCaptureFixture, needed: int
) -> None:
    monkeypatch.setattr("swapper.train.groups.memory_use.MIN_FREE_BYTES", 0)
    monkeypatch.setattr("swapper.device.tier.MIN_FREE_BYTES", 0)
    device = HostDevice("late", 9 * MIB)
    pair = auto_pair(on_device, device)
    step = filled_step(device, needed)
    with caplog.at_level(logging.INFO, "swapper"):
        pair.train(step, steps=1)
        assert not said(caplog, "cpu: device_memory")
        pair.train(step, steps=3)
    (line,) = said(caplog, "cpu: device_memory")
    assert ("less" if needed else "more") in line
    images = pair.manager.current.run.placed.processor._images
    assert (
        not any(image.stays for image in images) if needed else sum(image.stays for image in images) > len(images) / 2
    )
    assert device.peak_bytes <= 9 * MIB or needed
    pair.finish(paged=False)


class Failing(Net):
    """One of its operations finds no memory once, as asked: in a forward, or in a backward."""

    device: HostDevice | None = None
    when = "forward"

    def forward(self, *inputs: Any) -> Any:
        value = super().forward(*inputs)
        if self.device is not None and self.when == "forward":
            self.fail()
        if self.device is not None:
            value.register_hook(lambda _: self.fail() if self.device is not None else None)
        return value

    def fail(self) -> None:
        assert self.device is not None
        self.device.module.failures += 1
        self.device = None
        raise torch.OutOfMemoryError("Tried to allocate")


class OnlyOnTheCpu(torch.optim.SGD):
    """Refuses the first call, which is of a tensor on the device: nothing else tells it from one of the CPU here."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        type(self).calls += 1
        if self.calls == 1:
            raise NotImplementedError("no kernel for this device")
        super().step(closure)


def only_on_the_cpu(parameters: Any) -> torch.optim.Optimizer:
    return OnlyOnTheCpu(parameters, lr=0.1)


def test_an_optimizer_that_cannot_run_there_updates_on_the_cpu_or_is_refused_by_name(
    on_device: MakeTwins, caplog: pytest.LogCaptureFixture
) -> None:
    given = on_device(Net(), only_on_the_cpu, update_on="device", budget=64 * MIB, wait=True)
    named = r"OnlyOnTheCpu updates tensors of the CPU, and not of .*no kernel.*'cpu'"
    OnlyOnTheCpu.calls = 0
    with pytest.raises(swapper.UnsupportedError, match=named):
        given.offload()
    given.close()
    OnlyOnTheCpu.calls = 0
    with caplog.at_level(logging.INFO, "swapper"):
        pair = on_device(Net(), only_on_the_cpu, budget=64 * MIB)
    (line,) = said(caplog, "updates are on the CPU, since")
    assert "no kernel for this device" in line
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_more_memory_than_the_device_has_is_refused(on_device: MakeTwins) -> None:
    with pytest.raises(swapper.ConfigError, match=r"device_memory='2GiB' is more than cpu has, 1.0 GiB: leave it out"):
        on_device(device=HostDevice(capacity_bytes=1 << 30), device_memory="2GiB", budget=64 * MIB)


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_a_pass_that_found_no_memory_is_taken_again_with_less_for_images(
    on_device: MakeTwins, caplog: pytest.LogCaptureFixture, when: str, update: str
) -> None:
    device = HostDevice("late")
    pair = on_device(
        Failing(depth=8), device=device, device_memory=12 * MIB, params="host", gradients="host", update=update
    )
    pair.train(train_step, steps=2)
    pair.swapped.when, pair.swapped.device = when, device
    state = rng_states()
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(pair.swapped, tokens()).backward()
    pair.optimizer.zero_grad()
    set_rng_states(state)
    before = device.used_bytes
    with caplog.at_level(logging.INFO, "swapper"):
        pair.train(train_step, steps=3)
    (line,) = said(caplog, "cpu ran out of memory")
    assert "taken again" in line
    assert device.used_bytes < before
    pair.finish(paged=False)

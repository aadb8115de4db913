"""Updates on a device, copies of their slices, and kernels of passes overlap: clocks of the streams show it.

A moment is known to a stream if what it runs from then on comes behind it. Two things that do not know each other may
run at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

from e2e.device_twins import MIB, MakeTwins, on_device
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import Twins
from swapper.device.copies import Downloads
from swapper.device.model_device import PAGES_ON_THEIR_WAY
from swapper.train.gradients.device_grads import DeviceGradients
from swapper.train.groups.train_device import TrainingDevice
from swapper.train.optimizer.optimizer_proxy import OptimizerProxy

__all__ = ["on_device"]

UPDATES = ("step", "deferred", "backward")
Moment = tuple[Any, int]


@dataclass
class Seen:
    """Clocks of a step.

    Attributes:
        uploads: of each slice, what its copy up comes behind.
        updates: of each slice, the moment of its last kernel.
        layers: what kernels of each layer come behind.
    """

    uploads: list[Any] = field(default_factory=list)
    updates: list[Moment] = field(default_factory=list)
    layers: list[Any] = field(default_factory=list)


def known(clock: Any, moment: Moment) -> bool:
    return bool(clock[moment[0]] >= moment[1])


@contextmanager
def watching(pair: Twins, device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    seen = Seen()
    bring_up, update = TrainingDevice.bring_up, OptimizerProxy.update

    def note_upload(self: TrainingDevice, *of: Any) -> None:
        bring_up(self, *of)
        seen.uploads.append(self._slices.clock.copy())

    def note_update(self: OptimizerProxy, *of: Any) -> None:
        update(self, *of)
        seen.updates.append(device.module.current.tick())

    def note_layer(*_: Any) -> None:
        seen.layers.append(device.module.compute.clock.copy())

    handles = [
        handle
        for block in pair.swapped.blocks
        for handle in (block.register_forward_hook(note_layer), block.register_full_backward_hook(note_layer))
    ]
    with monkeypatch.context() as patch:
        patch.setattr(TrainingDevice, "bring_up", note_upload)
        patch.setattr(OptimizerProxy, "update", note_update)
        yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("gradients", ["host", "device"])
@pytest.mark.parametrize("update", UPDATES)
def test_a_slice_goes_up_while_the_one_before_is_updated_and_passes_wait_for_neither(
    on_device: MakeTwins, monkeypatch: pytest.MonkeyPatch, update: str, gradients: str
) -> None:
    device = HostDevice("at once")
    pair = on_device(
        Net(depth=6), device=device, update=update, update_on="device", gradients=gradients, optimizer_state="nvme",
        device_memory=64 * MIB,
    )  # fmt: skip
    pair.train(train_step, steps=2)
    with watching(pair, device, monkeypatch) as seen:
        pair.train(train_step, steps=1)
    assert len(seen.uploads) == len(seen.updates) > 6
    for upload, before in zip(seen.uploads[1:], seen.updates, strict=False):
        assert not known(upload, before), "a slice that goes up behind the update of the one before"
    for third, upload in zip(seen.updates, seen.uploads[3:], strict=False):
        assert known(upload, third), "memory that is filled again while an update uses it"
    assert len(seen.layers) == 12
    waits = [sum(known(layer, moment) for moment in seen.updates) for layer in seen.layers]
    if update == "deferred":  # a layer waits for its own parameters, which are updated where they are
        assert waits == sorted(waits) and waits[0] < len(seen.updates) / 4 and waits[4] < len(seen.updates)
    else:
        assert not any(waits), "a pass that waits for an update"
    pair.assert_same_parameters()


class Paced(HostDevice):
    """What is queued when a layer begins is done when the next one does; counts who waits for what is not."""

    def __init__(self) -> None:
        super().__init__("late")
        self.streams: list[Any] = []
        self.waits = 0

    def new_stream(self) -> Any:
        self.streams.append(super().new_stream())
        return self.streams[-1]

    def layer_begins(self, *_: Any) -> None:
        for stream in self.streams:
            stream.run(len(stream.operations))

    def wait_for(self, event: Any) -> None:
        self.waits += not self.has_passed(event)
        super().wait_for(event)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("backwards", [1, 3])
def test_python_waits_for_no_copy_and_no_kernel_in_a_micro_batch(
    on_device: MakeTwins, update: str, backwards: int
) -> None:
    device = Paced()
    pair = on_device(
        Net(depth=6), device=device, update=update, update_on="device", params="host", optimizer_state="host",
        gradients="host", device_memory=64 * MIB,
    )  # fmt: skip
    layers = [layer for layer in pair.swapped.children() if not isinstance(layer, nn.ModuleList)]
    for layer in (*layers, *pair.swapped.blocks):
        layer.register_forward_pre_hook(device.layer_begins, prepend=True)
        layer.register_forward_hook(lambda *of: of[2].register_hook(device.layer_begins) and None, prepend=True)

    def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
        before = device.waits
        for number in range(backwards):
            if number < backwards - 1:
                with pair.manager.accumulate():
                    loss_of(model, tokens()).backward()
            else:
                loss = loss_of(model, tokens())
                loss.backward()
        waits.append(device.waits - before)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    waits: list[int] = []
    pair.train(step, steps=4)
    first_updates = 1 if update == "deferred" else 0  # which a forward needs at once
    assert max(waits) <= first_updates, waits
    pair.finish(paged=False)


@pytest.mark.parametrize("room_bytes", [0, 8 * MIB])
def test_gradients_on_nvme_wait_for_kernels_no_earlier_than_frames_are_short(
    on_device: MakeTwins, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    pair = on_device(
        Net(depth=8),
        params="nvme",
        optimizer_state="nvme",
        gradients="nvme",
        device_memory=8 * MIB,
        room_bytes=room_bytes,
    )
    most, waits, lease, wait = [0], [0], DeviceGradients._lease, Downloads.wait_for_oldest

    def note_lease(self: DeviceGradients, *of: Any) -> None:
        before = waits[0]
        lease(self, *of)
        assert waits[0] == before or self._pages_leased >= self._on_device.max_pages
        most[0] = max(most[0], self._pages_leased)

    def note_wait(self: Downloads) -> None:
        waits[0] += 1
        wait(self)

    monkeypatch.setattr(DeviceGradients, "_lease", note_lease)
    monkeypatch.setattr(Downloads, "wait_for_oldest", note_wait)
    pair.train(train_step, steps=2)
    pair.assert_same_parameters()
    assert most[0] <= pair.manager.current.run.placed.processor.max_pages
    assert most[0] > PAGES_ON_THEIR_WAY or not room_bytes

"""A model's part of an accelerator keeps its promises in training and in inference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from e2e.device_twins import lose, short_of_memory
from infer.host_device import BYTES_PER_S, HostDevice
from model_users import MIB, USERS, WIDTH, User, make

import swapper
from swapper.device.model_device import ModelDevice


@pytest.fixture(params=[name for name in USERS if name.endswith("on a device")])
def user(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[User]:
    made = USERS[request.param](tmp_path)
    yield made
    made.close()


def part_of(user: User) -> tuple[ModelDevice, HostDevice]:
    assert user.part is not None
    return user.part, user.part.device


def assert_as_in_memory(user: User) -> None:
    with torch.no_grad():
        expected = make()(torch.ones(2, WIDTH))
    for actual, wanted in zip(user.run(), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_it_computes_as_in_memory_within_its_bytes_and_gives_them_back(user: User) -> None:
    """But what stayed on the device: a loaded model's weights there can be used after `unload`."""
    part, device = part_of(user)
    for _ in range(3):
        assert_as_in_memory(user)
    assert 0 < device.peak_bytes <= user.device_bytes
    stays = sum(copy.storage.nbytes for copy in part.tier._images if copy.stays)
    user.close()
    assert device.used_bytes <= stays < device.peak_bytes


def test_an_outdated_copy_is_filled_again(user: User) -> None:
    part, _ = part_of(user)
    assert_as_in_memory(user)
    before = user.resources.counters.uploaded_bytes
    for copy in part.tier._images:
        part.tier.invalidate(copy)
    assert_as_in_memory(user)
    assert user.resources.counters.uploaded_bytes - before >= sum(copy.storage.nbytes for copy in part.tier._images)


def test_the_time_of_all_copies_is_counted_by_the_devices_clock(user: User) -> None:
    for _ in range(3):
        assert_as_in_memory(user)
    counters = user.resources.counters
    user.close()
    assert counters.upload_s == pytest.approx(counters.uploaded_bytes / BYTES_PER_S) and counters.uploaded_bytes > 0


def test_on_a_device_that_is_short_what_stays_is_evicted_and_copied_for_each_use(user: User) -> None:
    _, device = part_of(user)
    assert_as_in_memory(user)
    with short_of_memory(device, 4 * MIB):
        for _ in range(2):
            assert_as_in_memory(user)
        assert device.used_bytes <= 4 * MIB


def test_of_a_device_that_failed_everything_is_closed(user: User, tmp_path: Path) -> None:
    _, device = part_of(user)
    assert_as_in_memory(user)
    lose(device)
    with pytest.raises(swapper.DeviceError):
        user.run()
    user.close()
    assert user.resources.engine is None
    device.module.is_lost = False

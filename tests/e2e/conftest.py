"""Shared by the end-to-end tests: twins that are closed at the end, and the check that nothing leaks."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e.leaks import engine_of_the_process, watch_for_leaks
from e2e.models import Net
from e2e.twins import Twins
from swapper.durability.publication import Publication

__all__ = ["engine_of_the_process", "watch_for_leaks"]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=devices.IS_REAL)
def on_a_real_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models and batches are made on it, of tests that train there: others name no device. What looks into the device of
    host memory is skipped."""
    monkeypatch.setattr(HostDevice, "__init__", lambda *_, **options: pytest.skip(devices.STAND_IN_ONLY))
    trains_there = {"device_of_tests", "Twins"} & vars(request.module).keys()
    if trains_there or {"twins", "place"} & {*request.fixturenames}:
        torch.set_default_device(devices.NAME)
    yield
    torch.set_default_device(None)


@pytest.fixture
def stand_in() -> None:
    """The test looks into the device of host memory that it is given."""
    if devices.IS_REAL:
        pytest.skip(devices.STAND_IN_ONLY)


@pytest.fixture
def gradients_that_stay() -> dict[str, str]:
    """Options with which gradients have data for the user's own code: on a device they leave by default."""
    return {"gradients": "device"} if devices.NAME else {}


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[Callable[..., Twins]]:
    """Makes twins in directories of their own."""
    made: list[Twins] = []

    def make(model: nn.Module, *arguments: Any, **options: Any) -> Twins:
        directory = tmp_path / f"run-{len(made)}"
        directory.mkdir()
        made.append(Twins(directory, model, *arguments, **options))
        return made[-1]

    yield make
    while made:  # pytest keeps `make`, and so this list, until the test's very end
        made.pop().close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[swapper.SwapManager]:
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as made:
        yield made


@pytest.fixture
def backward(twins: Callable[..., Twins]) -> Callable[..., Twins]:
    """Makes twins that are updated during backward."""

    def make(model: nn.Module | None = None, *arguments: Any, **options: Any) -> Twins:
        return twins(model or Net(), *arguments, update="backward", **options)

    return make


@pytest.fixture
def second_drive(tmp_path: Path) -> Iterator[Path]:
    """A directory on another filesystem than the first, where there is one: its transfers have an engine of their own."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        memory = tmp_path
    with tempfile.TemporaryDirectory(prefix="swapper-test-", dir=memory) as directory:
        yield Path(directory)


@pytest.fixture
def may_publish(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, snapshots are captured, and none is published."""
    event, publish = threading.Event(), Publication._run

    def wait_and_publish(publication: Publication) -> None:
        event.wait()
        publish(publication)

    monkeypatch.setattr(Publication, "_run", wait_and_publish)
    return event

"""Few calls lead from a user's line to arithmetic, or to pages: docs/internals.md lists them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import devices
import pytest
import torch
from infer.small import BUDGET, make, on_meta, run
from safetensors.torch import save_file
from torch.optim import SGD, AdamW

import swapper
from e2e.device_twins import on_device
from e2e.models import Net, train_step
from e2e.several import SeveralTwins, by_turns, several
from e2e.twins import Twins
from swapper.paging.pager import Pager

__all__ = ["on_device", "several"]

MAX_CALLS = 10
PACKAGE = Path(swapper.__file__).parent
TESTS = Path(__file__).parents[1]
INTERNALS = (TESTS.parent / "docs" / "internals.md").read_text()
LISTED = INTERNALS.partition("**The calls**")[2].partition("\n\n")[0]

found: list[list[CodeType]] = []
"""Of each time that was noted: what runs, from the innermost call up to the user's line, which is in a test."""


def note(frame: FrameType | None) -> None:
    codes = []
    while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(TESTS):
        codes.append(frame.f_code)
        frame = frame.f_back
    found.append(codes)


def ours(codes: list[CodeType]) -> list[str]:
    """Return the names of swapper's own, the outermost first. The models of `bench` are a user's."""
    paths = [(code.co_name, Path(code.co_filename)) for code in codes[::-1]]
    return [name for name, path in paths if path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "bench")]


class Noting(AdamW):
    """Notes the frames when torch's own `step` runs, just before its arithmetic."""

    def _init_group(self, *arguments: Any, **named: Any) -> Any:
        note(sys._getframe(1))
        return super()._init_group(*arguments, **named)


def noting(parameters: Any) -> AdamW:
    return Noting(parameters, lr=1e-3)


def noting_and_sgd(parameters: Any, number: int) -> Any:
    return noting(parameters) if number == 0 else SGD(parameters, lr=1e-2)


def calls_of(pair: Twins) -> list[list[CodeType]]:
    """Return the calls of each run of the swapped one's optimizer in two steps."""
    found.clear()
    pair.train(train_step, steps=2)
    pair.finish(paged=False)
    return [codes for codes in found if ours(codes)]


def assert_few(calls: list[list[CodeType]]) -> None:
    """Of calls that begin at torch, or at `optimizer.step()`: `finish_update` may come from anywhere."""
    assert calls
    for names in [ours(codes) for codes in calls]:
        assert len(names) <= MAX_CALLS, names
        if "finish_update" not in names:
            assert [name for name in names if f"`{name}`" not in LISTED and f".{name}`" not in LISTED] == []


def test_a_step_makes_ten_calls_to_arithmetic_torchs_wrappers_included(twins: Callable[..., Twins]) -> None:
    calls = calls_of(twins(Net(depth=4), noting))
    assert_few(calls)
    for codes in calls:
        assert len(codes) <= MAX_CALLS, [code.co_name for code in codes]


@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_so_does_an_update_at_another_time(twins: Callable[..., Twins], update: str) -> None:
    assert_few(calls_of(twins(Net(depth=4), noting, update=update)))


@pytest.mark.parametrize("update", ["step", "deferred"])
def test_so_do_several_optimizers(several: Callable[..., SeveralTwins], update: str) -> None:
    assert_few(calls_of(several(Net(depth=4), by_turns(noting_and_sgd), update=update)))


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_so_does_an_update_on_a_device(on_device: Callable[..., Twins], update: str) -> None:
    pair = on_device(Net(depth=4), noting, update=update, update_on="device", device_memory=8 << 20)
    assert_few(calls_of(pair))


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> list[list[CodeType]]:
    """Notes the frames of each lease from here on."""
    lease = Pager.lease
    found.clear()

    def noted(self: Pager, *arguments: Any, **options: Any) -> Any:
        note(sys._getframe(1))
        return lease(self, *arguments, **options)

    monkeypatch.setattr(Pager, "lease", noted)
    return found


@devices.without_device("a forward leases the pages of a device's images, by one call more")
def test_a_forward_makes_as_few_calls_to_its_pages(twins: Callable[..., Twins], leases: list[list[CodeType]]) -> None:
    pair = twins(Net(depth=4))
    leases.clear()
    pair.swapped(torch.zeros(1, 4, dtype=torch.long))
    assert_few(leases)


def test_so_does_a_pass_of_inference(tmp_path: Path, leases: list[list[CodeType]]) -> None:
    save_file(make().state_dict(), tmp_path / "model.safetensors")
    model = on_meta()
    loaded = swapper.load(model, tmp_path / "model.safetensors", host_memory=BUDGET)
    leases.clear()
    run(loaded)
    assert_few(leases)
    swapper.loaded(loaded).unload()

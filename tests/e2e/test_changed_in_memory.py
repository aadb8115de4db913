"""Changes by hand of parameters in memory, after a commit: nothing announces them, and nothing that follows loses them."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapper
from e2e import killed_ranks
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import Twins, adamw, fail_in_the_middle
from swapper import _C

MakeTwins = Callable[..., Twins]
Write = Callable[[nn.Parameter], Any]


def in_place(weight: nn.Parameter) -> None:
    weight.mul_(0.5)


def past_the_version(weight: nn.Parameter) -> None:
    weight.data.mul_(0.5)


def change_late(write: Write) -> Callable[[Any, Any], None]:
    """Take a step, run a forward, in which that is committed, and change a parameter then; a gradient is left."""

    def run(model: Any, optimizer: Any) -> None:
        train_step(model, optimizer)
        loss_of(model, tokens()).backward()
        with torch.no_grad():
            write(model.blocks[1].up.weight)

    return run


PLACES = pytest.mark.parametrize("params", ["host", "nvme"])
WRITES = pytest.mark.parametrize("write", [in_place, past_the_version])


@PLACES
@WRITES
def test_parking_keeps_them(twins: MakeTwins, write: Write, params: str) -> None:
    pair = twins(Net(), params=params, commit_every=1)
    pair.both(change_late(write))
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    with pair.manager.parked():
        pass
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@PLACES
@WRITES
def test_a_closed_run_goes_on_with_them(twins: MakeTwins, write: Write, params: str) -> None:
    pair = twins(Net(), params=params, commit_every=1)
    pair.both(change_late(write))
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    pair.resume(Net())
    assert pair.manager.step == 1
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@PLACES
@WRITES
def test_a_step_that_fails_is_not_undone_without_them(twins: MakeTwins, write: Write, params: str) -> None:
    pair = twins(Net(), params=params, commit_every=1)
    pair.both(change_late(write))
    fail_in_the_middle(pair)
    with pytest.raises(RuntimeError, match="a fault in the middle"):
        pair.optimizer.step()
    with pytest.raises(RuntimeError, match="memory and files hold a mix of two steps"):
        train_step(pair.swapped, pair.optimizer)


@PLACES
def test_a_step_that_fails_is_undone_where_nothing_was_changed(twins: MakeTwins, params: str) -> None:
    pair = twins(Net(), params=params, commit_every=1)
    pair.both(change_late(lambda weight: None))
    fail_in_the_middle(pair)
    with pytest.raises(RuntimeError, match="a fault in the middle"):
        pair.optimizer.step()
    pair.both(lambda _, optimizer: optimizer.step())
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@WRITES
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_changes_while_it_is_committed_is_not_in_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write, update: str, ranks: int
) -> None:
    """As a perturbation of adversarial training, which comes after the backward in which the last step is committed."""
    if ranks == 1:
        change_while_committing(tmp_path, monkeypatch, write, update)
        return
    work = partial(change_while_committing, tmp_path, monkeypatch, write, update)
    assert killed_ranks.launch(ranks, tmp_path / "meeting", work) == [0] * ranks


def change_while_committing(directory: Path, monkeypatch: pytest.MonkeyPatch, write: Write, update: str) -> None:
    """Change a parameter while a step is committed; assert that another run resumes from what the step has left."""
    gate = os.eventfd(1)  # nothing that is written is over while it is closed, and nothing else begins
    chaos = {"seed": 1, "until": gate}
    monkeypatch.setattr(
        "swapper.modules.resources.open_engine",
        lambda *_, backend, **options: _C.Engine(backend="threads", chaos=chaos, **{**options, "depth": 1}),
    )
    changed = threading.Event()

    def open_gate() -> None:
        changed.wait(0.3)  # it comes only if the memory can be changed now, which is wrong
        os.eventfd_write(gate, 1)

    torch.manual_seed(0)
    directory, copied = directory / "run", directory / "copied"
    directory.mkdir(exist_ok=True)
    model = Net()
    options: dict[str, Any] = {"params": "host", "optimizer_state": "nvme", "update": update}
    commits = swapper.CommitPolicy(every=1)
    with swapper.SwapManager(directory, host_memory="64MiB", commits=commits) as manager:
        _, optimizer = manager.offload(model, adamw(model.parameters()), **options)
        train_step(model, optimizer)
        weight = model.blocks[1].up.weight
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        os.eventfd_read(gate)
        helper = threading.Thread(target=open_gate)
        helper.start()
        with manager.accumulate():
            loss_of(model, tokens()).backward()
        with torch.no_grad():
            write(weight)
        changed.set()
        helper.join()
        train_step(model, optimizer)
        own = manager.current.directory.path
        shutil.copytree(own, copied / own.relative_to(directory))
    with swapper.SwapManager(copied, host_memory="64MiB", resume="auto") as manager:
        torch.manual_seed(0)
        resumed = Net()
        manager.offload(resumed, adamw(resumed.parameters()), **options)
        assert manager.step == 1
        for name, value in resumed.state_dict().items():
            assert torch.equal(value, expected[name]), name

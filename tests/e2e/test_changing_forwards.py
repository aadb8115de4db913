"""Modules whose forward changes their own parameters: as in plain torch, and a commit has nothing of a later forward."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import swapper
from e2e.keywords import for_manager
from e2e.models import VOCABULARY, WIDTH, Block, Net, train_step
from e2e.twins import Twins, leased_pages, send_away
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access

MakeTwins = Callable[..., Twins]
STEPS = 4


class Renormed(Net):
    """torch's embedding makes rows shorter that are too long, when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, max_norm=0.5)


class Drifting(Block):
    """Changes a large parameter and a small one each time, past recognition if that is done twice."""

    def forward(self, value: Any) -> Any:
        with torch.no_grad():
            self.up.weight.mul_(1.01)
            self.norm.bias.add_(0.01)
        return super().forward(value)


MODELS: dict[str, Callable[[], nn.Module]] = {"max_norm": Renormed, "drifting": lambda: Net(make_block=Drifting)}


@pytest.mark.parametrize("params", ["nvme", "host"])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("name", MODELS)
def test_what_a_forward_changes_is_kept(twins: MakeTwins, name: str, update: str, params: str) -> None:
    pair = twins(MODELS[name](), update=update, params=params, room_bytes=4 << 20)
    pair.train(train_step, steps=3)
    with torch.no_grad():
        pair.train(lambda model, _: model(torch.zeros(1, 4, dtype=torch.long)), steps=2)
    if params == "nvme":
        send_away(pair.manager)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def go(model: nn.Module, optimizer: Any, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        words = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(number))
        loss = F.cross_entropy(model(words).view(-1, VOCABULARY), words.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make(name: str) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("params", ["nvme", "host"])
@pytest.mark.parametrize("update", ["step", "deferred"])
@pytest.mark.parametrize("name", MODELS)
def test_a_run_that_ended_in_the_middle_of_a_forward_is_gone_on_from_exactly(
    tmp_path: Path, name: str, update: str, params: str
) -> None:
    expected = go(*make(name), range(STEPS))
    options: dict[str, Any] = {"host_memory": "16MiB", "commit_every": 1}
    places = {"params": params, "optimizer_state": "nvme", "update": update}
    (tmp_path / "run").mkdir()
    forwards = 0
    model, optimizer = make(name)

    def copy(*_: Any) -> None:
        """What a kill at this instant would leave."""
        nonlocal forwards
        shutil.copytree(tmp_path / "run", tmp_path / f"copy-{forwards}")
        forwards += 1

    model.head.register_forward_pre_hook(copy)
    with swapper.SwapManager(tmp_path / "run", **for_manager(options)) as manager:
        model, optimizer = manager.offload(model, optimizer, **places)
        assert go(model, optimizer, range(STEPS)) == expected
    seen = set()
    for number in range(STEPS):
        model, optimizer = make(name)
        with swapper.SwapManager(tmp_path / f"copy-{number}", resume="auto", **for_manager(options)) as manager:
            model, optimizer = manager.offload(model, optimizer, **places)
            begin = manager.step
            seen.add(begin)
            assert go(model, optimizer, range(begin, STEPS)) == expected[begin:]
        shutil.rmtree(tmp_path / f"copy-{number}")
    assert len(seen) >= STEPS - 2, "steps were committed"


@pytest.mark.parametrize("name", MODELS)
def test_a_step_that_fails_is_not_undone_without_what_the_forward_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expected = go(*make(name), range(STEPS))
    model, optimizer = make(name)
    options: dict[str, Any] = {"host_memory": "16MiB", "resume": "auto"}
    with swapper.SwapManager(tmp_path, **for_manager(options)) as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        assert go(model, optimizer, range(3)) == expected[:3]

        def fail(*_: Any) -> None:
            raise swapper.IoError("read", "the drive", 0, 4096, 5)

        monkeypatch.setattr(type(manager.current.run.model._sweep), "end", fail)
        with pytest.raises(swapper.IoError):
            go(model, optimizer, range(3, 4))
        monkeypatch.undo()
        with pytest.raises(swapper.StateError, match="resume from the last commit"):
            optimizer.step()
    model, optimizer = make(name)
    with swapper.SwapManager(tmp_path, **for_manager(options)) as manager:
        model, optimizer = manager.offload(model, optimizer)
        begin = manager.step
        assert go(model, optimizer, range(begin, STEPS)) == expected[begin:]


def test_where_waiting_to_write_a_change_fails_no_lease_is_kept_and_the_change_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make("drifting")
    expected = model.blocks[0].up.weight.detach() * 1.01
    acquire = Pager.acquire

    def failing(pager: Pager, access: Access) -> None:
        """As where a write of another page had failed, and this is whom it is told."""
        if access.writes:
            raise swapper.IoError("write", "", 0, 4096, errno.EIO)
        acquire(pager, access)

    with swapper.SwapManager(tmp_path, host_memory="16MiB") as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        send_away(manager)
        with monkeypatch.context() as patch:
            patch.setattr(Pager, "acquire", failing)
            with pytest.raises(swapper.IoError, match="write of 4096 bytes"):
                model.blocks[0](torch.ones(1, WIDTH))
        assert leased_pages(manager) == []
        send_away(manager)
        with manager.gather(model.blocks[0].up.weight):
            assert torch.equal(model.blocks[0].up.weight, expected)

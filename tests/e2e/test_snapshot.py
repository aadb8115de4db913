"""A snapshot is a file of plain torch: opened by it in every way, gone on from by it, bit for bit."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import swapper
from e2e.models import Convolutions, Net, image_step, loss_of, tokens, train_step
from e2e.twins import PlainMasters, Twins, adamw, assert_same, assert_same_state
from swapper.durability.verify import verify

MakeTwins = Callable[..., Twins]


def test_it_opens_in_every_way_and_zip_tools_accept_it(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=2)
    path = pair.manager.snapshot(pair.directory / "a.pt").result()
    assert path == pair.directory / "a.pt"
    for options in ({}, {"mmap": True}, {"weights_only": True}, {"weights_only": False}, {"map_location": "cpu"}):
        state = torch.load(path, **options)
        assert_same(dict(state["model"]), dict(pair.plain.state_dict()))
        assert list(state["model"]) == list(pair.plain.state_dict())
        assert_same_state(state["optimizer"], pair.plain_optimizer.state_dict())
        assert state["swapper"]["step"] == 2
        assert "master" not in state
    with path.open("rb") as file:
        assert_same(dict(torch.load(file)["model"]), dict(pair.plain.state_dict()))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    pair.train(train_step, steps=1)
    pair.finish()


@pytest.mark.parametrize("is_near", [True, False])
def test_of_a_run_that_never_commits_it_has_all_checksums_though_none_were_taken_of_state(
    twins: MakeTwins, second_drive: Path, is_near: bool
) -> None:
    """Both where the swap file itself becomes the snapshot and where its bytes are copied."""
    pair = twins(Net(), commit_every=None, params="host", check_reads=False)
    pair.train(train_step, steps=2)
    pages = [
        page for section in pair.manager.current.run.sections for page in section.pages if page.location is not None
    ]
    assert pages and all(page.crc32 is None for page in pages)
    path = pair.manager.snapshot((pair.directory if is_near else second_drive) / "a.pt").result()
    pair.train(train_step, steps=1)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    (report,) = verify(path)
    assert report.checked_bytes and not report.faults
    pair.finish()


def test_plain_torch_goes_on_from_it_as_the_swapped_run_does(twins: MakeTwins) -> None:
    pair = twins(Net(tied=True), partial(AdamW, lr=1e-3, fused=True))
    pair.train(train_step, steps=3)
    state = torch.load(pair.manager.snapshot(pair.directory / "a.pt").result(), mmap=True)
    pair.plain = Net(tied=True)
    pair.plain.load_state_dict(state["model"])
    pair.plain_optimizer = AdamW(pair.plain.parameters())
    pair.plain_optimizer.load_state_dict(state["optimizer"])
    pair.train(train_step, steps=4)
    pair.finish()


def test_plain_torch_goes_on_from_the_masters_as_the_swapped_run_does(twins: MakeTwins) -> None:
    pair = twins(Net(depth=6).bfloat16(), master=True)
    pair.train(train_step, steps=3)
    state = torch.load(pair.manager.snapshot(pair.directory / "a.pt").result())
    assert all(value.dtype == torch.float32 for value in state["master"].values())
    assert all(entry["exp_avg"].dtype == torch.float32 for entry in state["optimizer"]["state"].values())

    pair.plain = Net(depth=6).bfloat16()
    pair.plain.load_state_dict(state["model"])
    pair.plain_optimizer = PlainMasters(pair.plain, adamw)
    names = [name for name, _ in pair.plain.named_parameters()]
    assert set(names) == set(state["master"])
    with torch.no_grad():
        for name, master in zip(names, pair.plain_optimizer.masters, strict=True):
            master.copy_(state["master"][name])
    pair.plain_optimizer.inner.load_state_dict(state["optimizer"])
    pair.train(train_step, steps=4)
    pair.finish()


def test_a_new_swapped_run_goes_on_from_it(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=3)
    state = torch.load(pair.manager.snapshot(pair.directory / "a.pt").result(), mmap=True)
    pair.close()

    fresh = Net()
    pair.swapped, pair.original = fresh, adamw(fresh.parameters())
    pair.directory = pair.directory / "second"
    pair.directory.mkdir()
    pair.offload()
    pair.swapped.load_state_dict(state["model"])
    pair.optimizer.load_state_dict(state["optimizer"])
    pair.train(train_step, steps=3)
    pair.finish()


def test_taking_it_changes_nothing_wherever_in_a_step(twins: MakeTwins) -> None:
    pair = twins(Net())
    model, optimizer, manager = pair.swapped, pair.optimizer, pair.manager
    first = manager.snapshot(pair.directory / "before.pt").result()
    assert_same(dict(torch.load(first)["model"]), dict(pair.plain.state_dict()))
    pair.train(train_step, steps=1)
    random_state = torch.get_rng_state()
    tickets = []
    for name in ("after-forward", "after-backward", "after-step"):
        loss = loss_of(model, tokens())
        if name == "after-forward":
            tickets.append(manager.snapshot(pair.directory / f"{name}.pt"))
        loss.backward()
        if name == "after-backward":
            tickets.append(manager.snapshot(pair.directory / f"{name}.pt"))
        optimizer.step()
        optimizer.zero_grad()
        if name == "after-step":
            tickets.append(manager.snapshot(pair.directory / f"{name}.pt"))
        pair.check_pager()
    assert all(ticket.wait() for ticket in tickets)
    torch.set_rng_state(random_state)
    for name in ("after-forward", "after-backward", "after-step"):
        expected = [value.clone() for value in pair.plain.state_dict().values()]
        train_step(pair.plain, pair.plain_optimizer)
        if name == "after-step":
            expected = list(pair.plain.state_dict().values())
        assert_same(list(torch.load(pair.directory / f"{name}.pt")["model"].values()), expected)
    pair.train(train_step, steps=2)
    pair.finish()


def test_tied_weights_stay_tied_by_storage(twins: MakeTwins) -> None:
    pair = twins(Net(tied=True))
    pair.train(train_step, steps=1)
    state = torch.load(pair.manager.snapshot(pair.directory / "a.pt").result())["model"]
    one, other = state["embedding.weight"], state["head.weight"]
    assert one.data_ptr() == other.data_ptr()
    one[0, 0] = 123.0
    assert other[0, 0] == 123.0


def test_buffers_are_in_it(twins: MakeTwins) -> None:
    pair = twins(Convolutions())
    pair.train(image_step, steps=2)
    state = torch.load(pair.manager.snapshot(pair.directory / "a.pt").result(), weights_only=True)
    assert any("running_var" in name for name in state["model"])
    assert_same(dict(state["model"]), dict(pair.plain.state_dict()))
    pair.plain = Convolutions()
    pair.plain.load_state_dict(state["model"])
    pair.plain_optimizer = adamw(pair.plain.parameters())
    pair.plain_optimizer.load_state_dict(state["optimizer"])
    pair.train(image_step, steps=2)
    pair.finish()


def test_what_is_registered_is_in_it_and_goes_on(twins: MakeTwins) -> None:
    pair = twins(Net())
    schedulers = {
        id(pair.plain): CosineAnnealingLR(pair.plain_optimizer, T_max=7),
        id(pair.swapped): CosineAnnealingLR(pair.optimizer, T_max=7),
    }
    pair.manager.register(scheduler=schedulers[id(pair.swapped)])

    def run(model: Any, optimizer: Any) -> torch.Tensor:
        loss = train_step(model, optimizer)
        schedulers[id(model)].step()
        return loss

    pair.train(run, steps=3)
    state = torch.load(pair.manager.snapshot(pair.directory / "a.pt").result())
    assert state["registered"]["scheduler"]["last_epoch"] == 3
    pair.plain.load_state_dict(state["model"])
    pair.plain_optimizer = adamw(pair.plain.parameters())
    schedulers[id(pair.plain)] = CosineAnnealingLR(pair.plain_optimizer, T_max=7)
    pair.plain_optimizer.load_state_dict(state["optimizer"])
    schedulers[id(pair.plain)].load_state_dict(state["registered"]["scheduler"])
    pair.train(run, steps=3)
    pair.finish()


@pytest.mark.parametrize(("params", "state"), [("host", "host"), ("host", "nvme"), ("nvme", "host")])
def test_every_placement_gives_the_same_snapshot(twins: MakeTwins, params: str, state: str) -> None:
    pair = twins(Net(), params=params, optimizer_state=state)
    pair.train(train_step, steps=2)
    content = torch.load(pair.manager.snapshot(pair.directory / "a.pt").result())
    assert_same(dict(content["model"]), dict(pair.plain.state_dict()))
    assert_same_state(content["optimizer"], pair.plain_optimizer.state_dict())
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


def test_many_snapshots_of_one_run_are_independent_files(twins: MakeTwins) -> None:
    pair = twins(Net())
    expected = []
    for number in range(3):
        pair.train(train_step, steps=1)
        pair.manager.snapshot(str(pair.directory / f"{number}.pt"))
        expected.append({name: value.clone() for name, value in pair.plain.state_dict().items()})
    pair.train(train_step, steps=1)
    pair.close()
    for number, model in enumerate(expected):
        assert_same(dict(torch.load(pair.directory / f"{number}.pt")["model"]), model)


def test_frozen_and_unused_parameters_are_in_it(twins: MakeTwins) -> None:
    model = Net()
    model.blocks[1].requires_grad_(False)
    model.extra = nn.Linear(256, 256)
    pair = twins(model)
    pair.train(train_step, steps=2)
    state = torch.load(pair.manager.snapshot(pair.directory / "a.pt").result())
    assert_same(dict(state["model"]), dict(pair.plain.state_dict()))
    assert_same_state(state["optimizer"], pair.plain_optimizer.state_dict())


def mode_of(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


@pytest.mark.parametrize(
    ("umask", "modes"), [(0, {"0o444", "0o666"}), (0o027, {"0o440", "0o640"}), (0o077, {"0o400", "0o600"})]
)
def test_the_runs_files_are_their_owners_and_snapshots_are_as_the_umask_says(
    twins: MakeTwins, umask: int, modes: set[str]
) -> None:
    before = os.umask(umask)
    try:
        pair = twins(Net())
        pair.train(train_step, steps=1)
        path = pair.manager.snapshot(pair.directory / "a.pt").result()
        pair.train(train_step, steps=1)
    finally:
        os.umask(before)
    run = pair.directory / "rank-0-of-1"
    assert mode_of(path) in modes  # read-only where it is a hard link
    assert mode_of(run) == "0o700"
    own = [file for file in run.glob("*.swap") if not file.samefile(path)]
    assert len(own) == 2
    assert {mode_of(file) for file in [run / "lock", *own]} == {"0o600"}


def test_ranks_have_directories_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    managers = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        model = Net()
        manager = swapper.SwapManager(tmp_path, host_memory="32MiB")
        manager.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        managers.append(manager)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
    assert all(list((tmp_path / f"rank-{rank}-of-2").glob("*.swap")) for rank in range(2))
    for manager in managers:
        manager.close()


PLAIN = """
import sys
import torch
from e2e.models import Net, loss_of
state = torch.load(sys.argv[1], mmap=True, weights_only=True)
model = Net()
model.load_state_dict(state["model"], assign=True)
optimizer = torch.optim.AdamW(model.parameters())
optimizer.load_state_dict(state["optimizer"])
assert "swapper" not in sys.modules
print(loss_of(model, torch.load(sys.argv[2])).item().hex())
"""


def test_a_process_without_swapper_goes_on_from_it(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=2)
    path = pair.manager.snapshot(pair.directory / "a.pt").result()
    batch = tokens()
    torch.save(batch, pair.directory / "batch.pt")
    expected = pair.both(lambda model, _: loss_of(model, batch).item())
    command = [sys.executable, "-c", PLAIN, str(path), str(pair.directory / "batch.pt")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == expected.hex(), done.stderr

"""One run over several drives: what it does on one, bit for bit, and nothing of it mixed up with another run's."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapper
from e2e import killed_run
from e2e.keywords import for_manager
from e2e.models import Net, finish_step, train_step
from e2e.twins import Twins, assert_same_state
from swapper.cli.doctor import look
from swapper.durability.commit import files_of, read_commit
from swapper.durability.verify import verify
from swapper.io.engines import EngineOfDrives

MakeTwins = Callable[..., Twins]
PART = "rank-0-of-1"
STEPS = 5


def go(directories: Any, until: int, snapshot: Path | None = None, **options: Any) -> list[float]:
    """Begin or go on with the run in `directories` until step `until`; returns the losses of the steps taken."""
    model, optimizer, scheduler = killed_run.make()
    losses = []
    with swapper.SwapManager(
        directories, host_memory=killed_run.BUDGET, resume="auto", **for_manager(options)
    ) as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        manager.register(scheduler=scheduler)
        while manager.step < until:
            losses.append(killed_run.train_step(model, optimizer, scheduler, manager.step))
        if snapshot is not None:
            manager.snapshot(snapshot).result()
    return losses


def taken_bytes(directory: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in directory.rglob("*.swap"))


@pytest.fixture
def pair_of_drives(tmp_path: Path, second_drive: Path) -> list[Path]:
    first = tmp_path / "first"
    first.mkdir()
    return [first, second_drive]


# --- what it does -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", ["host", "nvme"])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_training_is_bit_equal(twins: MakeTwins, second_drive: Path, update: str, gradients: str) -> None:
    pair = twins(Net(), others=[second_drive], update=update, gradients=gradients)
    pair.train(train_step, steps=4)
    assert isinstance(pair.manager.current.run.engine, EngineOfDrives)
    first, second = taken_bytes(pair.directory), taken_bytes(second_drive)
    assert 0.4 < second / (first + second) < 0.6
    pair.finish()


def test_masters_and_commits_of_what_is_in_memory_are_exact(twins: MakeTwins, second_drive: Path) -> None:
    pair = twins(
        Net(depth=6).bfloat16(), others=[second_drive], master=True, params="host", commit_every=1, room_bytes=8 << 20
    )
    pair.train(train_step, steps=3)
    pair.finish(paged=False)


def test_bytes_are_dealt_by_weight(tmp_path: Path, second_drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swapper.manager.weigh", lambda directories: [3.0, 1.0])
    (tmp_path / "first").mkdir()
    drives = [tmp_path / "first", second_drive]
    assert go(drives, 2) == killed_run.plain_losses(2)
    first, second = taken_bytes(drives[0]), taken_bytes(drives[1])
    assert 0.2 < second / (first + second) < 0.3
    monkeypatch.setattr("swapper.manager.weigh", lambda directories: [1.0, 1.0])  # tuned again: the run stays as it is
    assert go(drives, STEPS) == killed_run.plain_losses(STEPS)[2:]


def test_the_state_dict_shows_state_of_both_drives(twins: MakeTwins, second_drive: Path) -> None:
    pair = twins(nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512)), others=[second_drive])

    def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
        loss = model(torch.randn(2, 512)).square().mean()
        return finish_step(loss, optimizer)

    pair.train(step, steps=2)
    sections = pair.manager.current.run.sections
    assert any(len({page.drive for page in section.pages}) == 2 for section in sections)
    assert_same_state(pair.optimizer.state_dict(), pair.plain_optimizer.state_dict())
    pair.finish(paged=False)


def test_more_to_train_moves_both_drives_files(twins: MakeTwins, second_drive: Path) -> None:
    model = Net()
    model.blocks[0].requires_grad_(False)
    pair = twins(model, others=[second_drive], room_bytes=16 << 20)
    pair.train(train_step, steps=2)

    def unfreeze(model: Any, optimizer: Any) -> None:
        model.blocks[0].requires_grad_(True)
        optimizer.add_param_group({"params": model.blocks[0].parameters()})

    before = {file.name for file in second_drive.rglob("*.swap")}
    pair.both(unfreeze)
    pair.train(train_step, steps=2)
    after = {file.name for file in second_drive.rglob("*.swap")}
    assert after == {file.name for file in pair.directory.rglob("*.swap")}
    assert before.isdisjoint(after)
    pair.finish(paged=False)


# --- snapshots --------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_byte_for_byte_that_of_a_run_on_one_drive(pair_of_drives: list[Path], tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    go(alone, 3, snapshot=tmp_path / "alone.pt")
    go(pair_of_drives, 3, snapshot=tmp_path / "both.pt")
    assert filecmp.cmp(tmp_path / "alone.pt", tmp_path / "both.pt", shallow=False)


def test_training_goes_on_after_snapshots_and_their_files_go(pair_of_drives: list[Path], tmp_path: Path) -> None:
    for step in range(1, STEPS + 1):
        assert (
            go(pair_of_drives, step, snapshot=tmp_path / f"{step}.pt")
            == killed_run.plain_losses(STEPS)[step - 1 : step]
        )
        assert verify(tmp_path / f"{step}.pt")[0].faults == []
    assert verify(pair_of_drives[0] / PART)[0].faults == []
    # Two are written in turns; one is the last snapshot's, and one the commit before still names.
    assert len(list(pair_of_drives[1].rglob("*.swap"))) <= 4


def test_verify_finds_what_was_changed_on_the_second_drive(pair_of_drives: list[Path]) -> None:
    go(pair_of_drives, 2)
    files = sorted(pair_of_drives[1].rglob("*.swap"))
    found = []
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(bytes(len(whole)))
        found += verify(pair_of_drives[0] / PART)[0].faults
        file.write_bytes(whole)
    assert {Path(fault.path) for fault in found} <= set(files)
    assert found
    assert verify(pair_of_drives[0] / PART)[0].faults == []


# --- going on ---------------------------------------------------------------------------------------------------------


def test_a_closed_run_goes_on_exactly(pair_of_drives: list[Path]) -> None:
    assert go(pair_of_drives, 2) + go(pair_of_drives, 4) + go(pair_of_drives, STEPS) == killed_run.plain_losses(STEPS)


def test_a_run_goes_on_where_its_drives_have_other_names(pair_of_drives: list[Path], tmp_path: Path) -> None:
    losses = go(pair_of_drives, 2)
    moved = tmp_path / "moved"
    shutil.move(pair_of_drives[1], moved)
    pair_of_drives[1].mkdir()  # what its fixture removes
    losses += go([pair_of_drives[0], moved], 4)
    assert verify(pair_of_drives[0] / PART)[0].faults == []
    assert losses + go([pair_of_drives[0], moved], STEPS) == killed_run.plain_losses(STEPS)


def test_without_commits_it_begins_anew(pair_of_drives: list[Path]) -> None:
    go(pair_of_drives, 2, commit_every=None)
    assert all(list(directory.rglob("*.swap")) for directory in pair_of_drives)
    assert go(pair_of_drives, 1, commit_every=None) == killed_run.plain_losses(1)


def test_a_missing_drive_is_named(pair_of_drives: list[Path], tmp_path: Path) -> None:
    first, second = pair_of_drives
    go(pair_of_drives, 1)
    empty = tmp_path / "empty"
    empty.mkdir()
    for given in ([first], first, [first, empty]):
        with pytest.raises(swapper.DirectoryError, match=rf"over 2 drives, and its part in {second}.* is missing"):
            go(given, 2)
    with pytest.raises(
        swapper.DirectoryError, match=f"part in {second}/rank-0-of-1 is missing; {second}/none.* does not have it"
    ):
        go([first, second / "none"], 2)
    assert not (second / "none").exists()
    with pytest.raises(swapper.DirectoryError, match=f"resume it without {empty}"):
        go([first, second, empty], 2)
    for wrong in ([second, first], second):
        with pytest.raises(
            swapper.DirectoryError, match=f"{second}.* holds a part of the run in {first}.*: give all .* in their order"
        ):
            go(wrong, 2)
    assert go(pair_of_drives, 2) == killed_run.plain_losses(2)[1:]
    record = read_commit(first / "rank-0-of-1")
    assert record is not None
    for number in files_of(record):
        (second / "rank-0-of-1" / record.files[number]).unlink()
    with pytest.raises(swapper.CheckpointError, match=rf"{second}.*\.swap, a swap file of the run, is missing"):
        go(pair_of_drives, 3)


def test_a_run_on_one_drive_does_not_go_on_over_two(pair_of_drives: list[Path]) -> None:
    go(pair_of_drives[0], 1)
    with pytest.raises(
        swapper.DirectoryError, match=f"is in that directory alone: resume it without {pair_of_drives[1]}"
    ):
        go(pair_of_drives, 2)


def test_another_runs_directory_is_not_taken(pair_of_drives: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    go(pair_of_drives, 1)
    for resume in ("auto", "error"):
        with pytest.raises(swapper.DirectoryError, match="holds a "):
            swapper.SwapManager([other, pair_of_drives[1]], host_memory=killed_run.BUDGET, resume=resume)
    with pytest.raises(swapper.DirectoryError, match="holds a part of the run in"):
        go([other, pair_of_drives[0]], 1)
    assert go(pair_of_drives, 2) == killed_run.plain_losses(2)[1:], "nothing of it was touched"
    with swapper.SwapManager([other, pair_of_drives[1]], host_memory=killed_run.BUDGET, resume="discard") as manager:
        assert manager.step == 0
    assert not list(pair_of_drives[1].rglob("*.swap"))


def test_each_directory_is_locked(pair_of_drives: list[Path], tmp_path: Path) -> None:
    with swapper.SwapManager(pair_of_drives, host_memory=killed_run.BUDGET):
        with pytest.raises(swapper.DirectoryError, match=f"{pair_of_drives[1]}.* is in use by another run"):
            swapper.SwapManager([tmp_path, pair_of_drives[1]], host_memory=killed_run.BUDGET)
    with pytest.raises(swapper.ConfigError, match="each of them once"):
        swapper.SwapManager([tmp_path, tmp_path / "first" / ".."], host_memory=killed_run.BUDGET)
    with pytest.raises(swapper.ConfigError, match="a list of directories"):
        swapper.SwapManager([], host_memory=killed_run.BUDGET)


# --- a full drive -----------------------------------------------------------------------------------------------------


def test_a_drive_without_room_is_named(tmp_path: Path, small_tmpfs: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    (small_tmpfs / "other").write_bytes(bytes(1 << 20))
    with pytest.raises(swapper.DirectoryError, match=f"{small_tmpfs}.* needs .* and its filesystem has .* free"):
        go([first, small_tmpfs], 1)
    assert not [*first.rglob("*.swap"), *small_tmpfs.rglob("*.swap")]


def test_a_drive_that_is_full_fails_the_snapshot_alone(tmp_path: Path, small_tmpfs: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    model, optimizer, scheduler = killed_run.make()
    with swapper.SwapManager([first, small_tmpfs], host_memory=killed_run.BUDGET) as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        losses = [killed_run.train_step(model, optimizer, scheduler, 0)]
        ticket = manager.snapshot(tmp_path / "a.pt")
        with pytest.raises(swapper.IoError, match=f"allocate .*{small_tmpfs}.*No space left"):
            ticket.result()
        losses.append(killed_run.train_step(model, optimizer, scheduler, 1))
    assert losses == killed_run.plain_losses(2)
    assert not (tmp_path / "a.pt").exists()
    losses = go([first, small_tmpfs], 3)
    assert losses == killed_run.plain_losses(3)[2:]


# --- what is said -----------------------------------------------------------------------------------------------------


def test_doctor_names_the_drives_of_a_run_and_those_that_are_away(pair_of_drives: list[Path], tmp_path: Path) -> None:
    go(pair_of_drives, 1)
    found = [finding for finding in look(pair_of_drives[0]) if finding.what == "Run"]
    assert [finding.state for finding in found] == ["good"]
    assert f"{pair_of_drives[1] / PART} (50%)" in found[0].found
    shutil.move(pair_of_drives[1] / PART, tmp_path / "away")
    found = [finding for finding in look(pair_of_drives[0]) if finding.what == "Run"]
    assert [finding.state for finding in found] == ["bad"]
    assert f"{pair_of_drives[1] / PART} is missing" in found[0].found


def test_the_plan_says_what_each_drive_takes(pair_of_drives: list[Path]) -> None:
    model, optimizer, _ = killed_run.make()
    with swapper.SwapManager(pair_of_drives, host_memory=killed_run.BUDGET) as manager:
        plan = manager.plan(model, optimizer, params="nvme", optimizer_state="nvme", gradients="nvme")
        assert "; on 2 drives: " in str(plan)
        assert sum(plan.space_by_drive()) == plan.space_bytes
        manager.offload(model, optimizer, params="nvme", optimizer_state="nvme", gradients="nvme")
        scratch = plan.space_by_drive(0)  # has no name any more
        for directory, planned, unnamed in zip(pair_of_drives, plan.space_by_drive(), scratch, strict=True):
            assert taken_bytes(directory) == pytest.approx(planned - unnamed, rel=0.02)

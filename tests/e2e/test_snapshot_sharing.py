"""A snapshot has its bytes in common with a swap file: none is copied, and none is changed by the run that goes on."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapper
from e2e import killed_run
from e2e.processes import LONG_S
from swapper.durability.commit import encode_commit, files_of, publish_commit, read_commit
from swapper.durability.directory import FALLBACK_NAME
from swapper.durability.publication import Draft
from swapper.durability.verify import verify
from swapper.io.copying import copy


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Run:
    """A run in `directory`, made or gone on with."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.swap_files = directory / "rank-0-of-1"
        model, optimizer, self.scheduler = killed_run.make()
        if options.pop("freeze", False):
            for parameter in list(model.parameters())[:5]:
                parameter.requires_grad_(False)
        self.manager = swapper.SwapManager(directory, host_memory=killed_run.BUDGET, resume="auto")
        placement = {"params": "nvme", "optimizer_state": "nvme", **options}
        self.model, self.optimizer = self.manager.offload(model, optimizer, **placement)
        self.manager.register(scheduler=self.scheduler)

    def train(self, steps: int) -> list[float]:
        return [
            killed_run.train_step(self.model, self.optimizer, self.scheduler, self.manager.step) for _ in range(steps)
        ]

    def names(self) -> list[str]:
        return sorted(file.name for file in self.swap_files.glob("*.swap"))


def test_it_is_a_swap_file_under_another_name_and_nothing_paged_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(2)
    run.manager.current.run.committer.finish()
    written = run.manager.counters.bytes_written
    path = run.manager.snapshot(tmp_path / "a.pt").result()
    resident = sum(section.plan.nbytes for section in run.manager.current.run.sections if section.resident)
    assert run.manager.counters.bytes_written - written == resident
    assert path.stat().st_nlink == 2
    assert path.stat().st_ino in {file.stat().st_ino for file in run.swap_files.glob("*.swap")}
    run.manager.close()


def test_training_on_does_not_change_it_and_lets_the_file_go(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(2)
    paths = []
    for number in range(3):
        paths.append((run.manager.snapshot(tmp_path / f"{number}.pt").result(), run.manager.step))
        before = [digest(path) for path, _ in paths]
        run.train(3)
        assert [digest(path) for path, _ in paths] == before
    run.manager.current.run.committer.finish()
    assert len(run.names()) == 2
    assert all(path.stat().st_nlink == 1 for path, _ in paths)
    for path, step in paths:
        assert torch.load(path, weights_only=True)["swapper"]["step"] == step
    run.manager.close()


def test_a_run_that_goes_on_after_it_does_not_change_it(tmp_path: Path) -> None:
    first = Run(tmp_path)
    losses = first.train(2)
    path = first.manager.snapshot(tmp_path / "a.pt").result()
    first.manager.close()
    before = digest(path)
    second = Run(tmp_path)
    losses += second.train(3)
    second.manager.close()
    assert digest(path) == before
    assert losses == killed_run.plain_losses(5)


def test_frozen_parameters_stay_in_it_and_its_truncation_is_noticed(tmp_path: Path) -> None:
    run = Run(tmp_path, freeze=True)
    run.train(2)
    path = run.manager.snapshot(tmp_path / "a.pt").result()
    run.train(3)
    run.manager.current.run.committer.finish()
    assert len(run.names()) == 3  # the frozen parameters are in the snapshot's file only
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(swapper.CheckpointError, match="was changed from outside"):
        run.train(2)
    with pytest.raises(swapper.CheckpointError, match="was changed from outside"):
        run.manager.close()


def test_a_snapshot_that_takes_long_to_copy_stops_no_step_and_is_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it reads what the last commit names, there is no other commit, and no step writes there."""
    run = Run(tmp_path, freeze=True)
    run.train(3)
    run.manager.current.run.committer.finish()
    go_on, reached = threading.Event(), threading.Event()

    def copy_late(*arguments: Any) -> dict[int, int]:
        reached.set()
        go_on.wait()
        return copy(*arguments)

    monkeypatch.setattr("swapper.durability.publication.copy", copy_late)
    ticket = run.manager.snapshot(tmp_path / "a.pt")
    run.train(3)
    assert reached.wait(LONG_S) and not ticket.done
    record = read_commit(run.swap_files)
    assert record is not None and record.step == 3
    go_on.set()
    ticket.wait()
    run.train(1)
    run.manager.close()
    record = read_commit(run.swap_files)
    assert record is not None and record.step == 7
    assert verify(tmp_path / "a.pt")[0].faults == []
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    assert state["swapper"]["step"] == 3
    model, optimizer, scheduler = killed_run.make()
    for parameter in list(model.parameters())[:5]:
        parameter.requires_grad_(False)
    for number in range(3):
        killed_run.train_step(model, optimizer, scheduler, number)
    assert all(torch.equal(state["model"][name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("how", ["touched", "cut off"])
def test_a_changed_snapshot_costs_a_run_nothing_that_has_all_it_needs(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    losses = run.train(2)
    path = run.manager.snapshot(tmp_path / "a.pt").result()
    path.chmod(0o600)
    if how == "touched":
        os.utime(path)
        losses += run.train(1)
    else:
        losses += run.train(1)  # everything is written anew; what is in the snapshot is needed by the last commit only
        run.manager.current.run.pager.flush()
        with path.open("r+b") as file:
            file.truncate(100_000)
    losses += run.train(2)
    run.manager.close()
    assert "was changed from outside" in caplog.text
    assert losses == killed_run.plain_losses(5)


def harm(path: Path, how: str) -> None:
    path.chmod(0o600)
    if how == "cut off":
        os.truncate(path, 100_000)
    else:
        path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("how", ["cut off", "overwritten"])
def test_a_changed_snapshot_costs_a_run_that_goes_on_at_most_one_step(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing that the last commit needs is left, so the run goes on from the one before."""
    first = Run(tmp_path)
    losses = first.train(4)
    path = first.manager.snapshot(tmp_path / "a.pt").result()
    first.manager.close()
    harm(path, how)
    second = Run(tmp_path)
    assert second.manager.step == 3
    assert "resumes from step 3 instead of 4" in caplog.text
    losses[3:] = second.train(3)
    second.manager.close()
    assert len(second.names()) == 2
    assert losses == killed_run.plain_losses(6)


@pytest.mark.parametrize("how", ["cut off", "overwritten"])
def test_a_changed_snapshot_of_the_commit_before_costs_nothing(tmp_path: Path, how: str) -> None:
    """As of a snapshot that was published after the next commit, which names its file still, before a kill."""
    first = Run(tmp_path)
    losses = first.train(4)
    path = first.manager.snapshot(tmp_path / "a.pt").result()
    losses += first.train(1)
    first.manager.snapshot(tmp_path / "b.pt").result()
    first.manager.close()
    last, before = read_commit(first.swap_files), read_commit(first.swap_files, FALLBACK_NAME)
    assert last is not None and before is not None and not files_of(last) & files_of(before)
    publish_commit(first.swap_files, encode_commit(replace(last, files=last.files | before.files)), True)
    harm(path, how)
    second = Run(tmp_path)
    assert second.manager.step == 5
    losses += second.train(2)
    second.manager.close()
    assert losses == killed_run.plain_losses(7)


@pytest.mark.parametrize("how", ["cut off", "overwritten"])
def test_a_snapshot_that_is_changed_under_a_run_costs_it_at_most_one_step(tmp_path: Path, how: str) -> None:
    """What was read already is right; of anything else the run finds out, and says how to go on."""
    first = Run(tmp_path)
    losses = first.train(4)
    harm(first.manager.snapshot(tmp_path / "a.pt").result(), how)
    try:
        for _ in range(2):
            losses += first.train(1)
        first.manager.close()
    except swapper.SwapperError as error:
        if isinstance(error, swapper.CheckpointError):
            assert "from step 3" in str(error)
        with pytest.raises(swapper.SwapperError):
            first.manager.close()
    second = Run(tmp_path)
    step = second.manager.step
    assert step in (3, 6)
    losses[step:] = second.train(7 - step)
    second.manager.close()
    assert losses == killed_run.plain_losses(7)


def test_a_snapshot_that_is_whole_costs_no_step_and_the_way_back_stays(tmp_path: Path) -> None:
    first = Run(tmp_path)
    losses = first.train(4)
    path = first.manager.snapshot(tmp_path / "a.pt").result()
    first.manager.close()
    second = Run(tmp_path)
    assert second.manager.step == 4
    second.model(killed_run.batch(0))
    second.manager.close()
    harm(path, "overwritten")
    third = Run(tmp_path)
    assert third.manager.step == 3
    losses[3:] = third.train(2)
    third.manager.close()
    assert losses == killed_run.plain_losses(5)


def test_a_damaged_record_of_the_commit_before_stops_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Run(tmp_path)
    losses = first.train(4)
    first.manager.snapshot(tmp_path / "a.pt").result()
    first.manager.close()
    (first.swap_files / FALLBACK_NAME).write_bytes(b"torn")
    second = Run(tmp_path)
    assert second.manager.step == 4
    assert "the previous commit is not usable" in caplog.text
    losses += second.train(1)
    second.manager.close()
    assert not (second.swap_files / FALLBACK_NAME).exists()
    assert losses == killed_run.plain_losses(5)


def test_where_the_commit_before_cannot_be_kept_the_snapshot_fails_and_not_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    losses = run.train(3)
    (run.swap_files / f"{FALLBACK_NAME}.partial").mkdir()  # no file can be written there
    with pytest.raises(swapper.IoError, match="take it again"):
        run.manager.snapshot(tmp_path / "a.pt").result()
    assert not (tmp_path / "a.pt").exists()
    losses += run.train(2)
    run.manager.close()
    assert losses == killed_run.plain_losses(5)


def test_the_commit_before_goes_with_the_next_commit(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(3)
    run.manager.snapshot(tmp_path / "a.pt").result()
    run.train(1)
    run.manager.current.run.committer.finish()
    assert not (run.swap_files / FALLBACK_NAME).exists()
    assert len(run.names()) == 2
    run.manager.close()


def test_a_snapshot_without_the_frozen_parameters_is_small_and_names_them(tmp_path: Path) -> None:
    run = Run(tmp_path, freeze=True)
    frozen = {name for name, parameter in run.model.named_parameters() if not parameter.requires_grad}
    expected = {name: value.clone() for name, value in killed_run.make()[0].state_dict().items() if name in frozen}
    paths = []
    for number in range(3):
        run.train(1)
        paths.append(run.manager.snapshot(tmp_path / f"{number}.pt", frozen="reference").result())
    whole = run.manager.snapshot(tmp_path / "whole.pt").result()
    run.manager.close()
    states = [torch.load(path, weights_only=True) for path in (*paths, whole)]
    for state, path in zip(states, paths, strict=False):
        assert set(state["swapper"]["left_out"]) == frozen
        assert not frozen & state["model"].keys()
        assert verify(path)[0].faults == []
        model = killed_run.make()[0]
        assert set(model.load_state_dict(state["model"], strict=False).missing_keys) == frozen
    assert all(torch.equal(states[3]["model"][name], value) for name, value in expected.items())
    for name in states[2]["model"]:
        assert torch.equal(states[2]["model"][name], states[3]["model"][name])
    taken = [path.stat().st_blocks * 512 for path in (*paths, whole)]
    frozen_bytes = sum(value.nbytes for value in expected.values())
    assert min(taken[:3]) <= taken[3] - frozen_bytes // 2


def test_pages_of_another_file_are_brought_over(tmp_path: Path) -> None:
    run = Run(tmp_path, freeze=True)
    run.train(3)
    path = run.manager.snapshot(tmp_path / "a.pt").result()
    with run.manager.gather(run.model):
        expected = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.manager.close()
    loaded = torch.load(path, mmap=True)["model"]
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


@pytest.fixture
def small_drive(mount: Callable[..., Path]) -> Path:
    """A filesystem with room for two swap files of the run, and not for a third."""
    model = killed_run.make()[0]
    state_bytes = sum(parameter.nbytes for parameter in model.parameters()) * 3
    return mount("-t", "tmpfs", "-o", f"size={state_bytes * 5 // 2}", "swapper-test")


def test_a_full_drive_fails_the_snapshot_and_not_the_run(small_drive: Path) -> None:
    run = Run(small_drive)
    losses = run.train(2)
    with pytest.raises(swapper.IoError) as failure:
        run.manager.snapshot(small_drive / "a.pt").result()
    assert failure.value.errno == errno.ENOSPC
    assert [entry.name for entry in small_drive.iterdir()] == ["rank-0-of-1"]
    losses += run.train(3)
    run.manager.close()
    assert losses == killed_run.plain_losses(5)


def test_on_another_filesystem_it_is_copied(tmp_path: Path, mount: Callable[..., Path]) -> None:
    elsewhere = mount("-t", "tmpfs", "swapper-test")
    run = Run(tmp_path)
    run.train(2)
    path = run.manager.snapshot(elsewhere / "a.pt").result()
    with run.manager.gather(run.model):
        expected = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.manager.close()
    loaded = torch.load(path, weights_only=True)["model"]
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    assert path.stat().st_nlink == 1


@pytest.mark.whole
@pytest.mark.parametrize("nameless", [True, False])
def test_a_draft_has_no_name_before_it_is_whole_and_takes_none_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool
) -> None:
    if not nameless:  # as on a filesystem that knows no O_TMPFILE

        def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "not supported")
            return system_open(path, flags, *rest, **options)

        system_open = os.open
        monkeypatch.setattr(os, "open", refuse)
    draft = Draft(tmp_path / "a.pt")
    assert [path.name for path in tmp_path.glob("*.pt")] == []
    os.write(draft.descriptor, b"whole")
    draft.publish()
    draft.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    again = Draft(tmp_path / "a.pt")
    with pytest.raises(swapper.CheckpointError, match="was left as it is"):
        again.publish()
    again.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    assert (tmp_path / "a.pt").read_bytes() == b"whole"


def test_where_the_filesystem_can_reflink_the_files_are_separate(tmp_path: Path, mount: Callable[..., Path]) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(512 << 20)
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("no filesystem that can reflink can be made here: mkfs.btrfs is missing")
    subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True)
    drive = mount("-o", "loop", str(image))
    run = Run(drive)
    run.train(2)
    path = run.manager.snapshot(drive / "a.pt").result()
    assert path.stat().st_nlink == 1
    before = digest(path)
    run.train(3)
    run.manager.close()
    assert digest(path) == before
    assert len(run.names()) == 2
    torch.load(path, weights_only=True)


def test_buffers_are_as_they_were_when_it_was_taken(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256))
    with swapper.SwapManager(tmp_path, host_memory="8MiB") as manager:
        optimizer = torch.optim.AdamW(model.parameters())
        model, _ = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        model(torch.randn(8, 256))
        expected = model[1].running_mean.clone()
        path = manager.snapshot(tmp_path / "a.pt").result()
        model(torch.randn(8, 256))
        assert torch.equal(torch.load(path)["model"]["1.running_mean"], expected)

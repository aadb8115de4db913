"""A directory that cannot hold the run is refused with what to do, and nothing of the attempt is left."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from e2e.leaks import held_by_swapper, held_since
from e2e.models import Net, loss_of, tokens, train_step
from e2e.processes import started_python
from e2e.twins import Twins, adamw

import swapper
from swapper.io import replacing
from swapper.io.drives import Drives, DrivesRecord

BUDGET = "32MiB"


def test_a_missing_directory_is_made_with_those_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    several = [tmp_path / "one" / "run", tmp_path / "other" / "run"]
    for given in (tmp_path / "new", "relative/and/deep", tmp_path / "link" / "below" / "it", several):
        with swapper.SwapManager(given, host_memory=BUDGET) as manager:
            model, optimizer = manager.offload(model := Net(), adamw(model.parameters()), params="nvme")
            assert train_step(model, optimizer).isfinite()
        for directory in given if isinstance(given, list) else [given]:
            assert [path.name for path in Path(directory).iterdir()] == ["rank-0-of-1"]
        with swapper.SwapManager(given, host_memory=BUDGET, resume="auto") as manager:
            assert manager.step == 1


@pytest.mark.whole
@pytest.mark.parametrize("parent", ["/", "/mnt", "/media", "/dev"])  # /dev/shm is mounted
def test_what_may_be_a_drive_that_is_not_mounted_is_not_made(parent: str, tmp_path: Path) -> None:
    missing = Path(parent, "no such drive")
    match = f"lies beneath {missing if Path(parent).exists() else parent}, which does not exist: perhaps a drive is misspelt"
    with pytest.raises(swapper.DirectoryError, match=match):
        swapper.SwapManager([tmp_path / "made" / "too", missing / "below" / "run"], host_memory=BUDGET)
    with pytest.raises(swapper.CheckpointError, match=match):
        swapper.checkpoint.save({}, missing / "a.pt")
    assert not missing.exists() and not list(tmp_path.iterdir())


def test_nothing_is_made_in_the_mount_point_of_a_drive_that_is_not_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacing, "MOUNT_PARENTS", {tmp_path})
    (tmp_path / "nvme").mkdir()
    with pytest.raises(
        swapper.DirectoryError, match=rf"lies beneath {tmp_path}/nvme/runs, which does not exist: perhaps"
    ):
        swapper.SwapManager(tmp_path / "nvme" / "runs" / "run", host_memory=BUDGET, resume="auto")
    assert not list((tmp_path / "nvme").iterdir())
    (tmp_path / "nvme" / "lost+found").mkdir()
    swapper.SwapManager(tmp_path / "nvme" / "runs" / "run", host_memory=BUDGET, resume="auto").close()
    assert (tmp_path / "nvme" / "runs" / "run").is_dir()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(swapper.DirectoryError, match=rf"{tmp_path}/file is not a directory"):
        swapper.SwapManager(tmp_path / "file" / "run", host_memory=BUDGET)
    with pytest.raises(swapper.DirectoryError, match=r"file/too cannot be made \(Not a directory\)"):
        swapper.SwapManager(tmp_path / "file" / "too" / "run", host_memory=BUDGET)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(swapper.DirectoryError, match=rf"{tmp_path}/dangling is not a directory"):
        swapper.SwapManager(tmp_path / "dangling", host_memory=BUDGET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file"]


def test_a_new_directory_of_a_run_that_is_refused_is_removed(tmp_path: Path) -> None:
    with swapper.SwapManager(tmp_path / "held", host_memory=BUDGET):
        with pytest.raises(swapper.DirectoryError, match="in use by another run"):
            swapper.SwapManager([tmp_path / "new" / "run", tmp_path / "held"], host_memory=BUDGET)
    assert [path.name for path in tmp_path.iterdir()] == ["held"]


def test_a_directory_is_not_made_on_a_read_only_filesystem(mount: Callable[..., Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    point = mount("--bind", str(source))
    subprocess.run(["mount", "-o", "remount,ro,bind", str(point)], check=True)
    with pytest.raises(
        swapper.DirectoryError, match=f"cannot write to {point}: .*Choose a directory that you may write to"
    ):
        swapper.SwapManager(point / "run", host_memory=BUDGET)
    assert not list(source.iterdir())


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(swapper.DirectoryError, match="not a directory"):
        swapper.SwapManager(path, host_memory=BUDGET)
    assert path.read_text() == "mine"


def test_a_read_only_filesystem_is_refused(mount: Callable[..., Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    point = mount("--bind", str(source))
    subprocess.run(["mount", "-o", "remount,ro,bind", str(point)], check=True)
    with pytest.raises(swapper.DirectoryError, match="Choose a directory that you may write to"):
        swapper.SwapManager(point, host_memory=BUDGET)
    assert not list(source.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not bind root")
def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(swapper.DirectoryError, match="may write to"):
            swapper.SwapManager(tmp_path, host_memory=BUDGET)
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.whole
@pytest.mark.parametrize("nbytes", [64 << 10, 6 << 20, 16 << 20])
def test_a_drive_that_is_too_small_is_refused_before_anything_is_moved(
    small_drive: Callable[[int], Path], nbytes: int
) -> None:
    drive = small_drive(nbytes)
    model = Net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = adamw(model.parameters())
    with swapper.SwapManager(drive, host_memory=BUDGET) as manager:
        with pytest.raises((swapper.DirectoryError, swapper.IoError)) as caught:
            manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        assert "room" in str(caught.value) or "No space left" in str(caught.value)
    assert not list(drive.rglob("*.swap"))
    assert all((p == q).all() for p, q in zip(model.parameters(), before, strict=True))
    assert train_step(model, optimizer).isfinite()  # plain torch goes on with both


def test_a_run_in_memory_is_told_and_goes_on(
    small_drive: Callable[[int], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drive, on_drive = small_drive(64 << 20), not replacing.is_on(replacing.IN_MEMORY, tmp_path / "file")
    for directories in ([drive], [tmp_path / "run", drive], [tmp_path / "alone"]):
        caplog.clear()
        with swapper.SwapManager(directories, host_memory=BUDGET, resume="discard") as manager:
            model, optimizer = manager.offload(model := Net(), adamw(model.parameters()), params="nvme")
            assert train_step(model, optimizer).isfinite()
        told = [record.getMessage() for record in caplog.records if "file system in memory" in record.getMessage()]
        in_memory = [path for path in directories if path == drive or not on_drive]
        assert len(told) == len(in_memory)
        for path, said in zip(in_memory, told, strict=True):
            assert said.startswith(f"{path}/rank-0-of-1 is on") and "give a directory on a drive" in said


def begin_and_fill(drive: Path, twins: Callable[..., Twins]) -> tuple[Twins, Path]:
    """Return a run on a drive that others have filled since it began, and the file of theirs."""
    pair = twins(Net(), wait=True)
    pair.directory = drive
    pair.offload()
    others = drive / "others"
    with others.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1 << 12))
    return pair, others


def test_a_record_of_drives_that_cannot_take_its_name_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "drives.json").mkdir()
    with pytest.raises(swapper.DirectoryError, match=r"cannot write .*drives\.json"):
        DrivesRecord(Drives((tmp_path, tmp_path), (1.0, 1.0), "id"), 0).write()
    assert [path.name for path in tmp_path.iterdir()] == ["drives.json"]


def test_a_drive_that_others_fill_meanwhile_stops_commits_and_the_run_goes_on_when_there_is_room(
    small_drive: Callable[[int], Path], twins: Callable[..., Twins]
) -> None:
    """The swap files take their room at the start; what else is written are commits."""
    pair, others = begin_and_fill(small_drive(32 << 20), twins)
    steps = 0
    with pytest.raises(swapper.IoError, match="make room on the drive") as caught:
        for steps in range(3):  # noqa: B007
            pair.train(train_step, steps=1)
    assert caught.value.errno == errno.ENOSPC
    assert steps < 2
    assert not list(others.parent.rglob("*.partial"))
    random_state = torch.get_rng_state()
    with pytest.raises(swapper.IoError, match="make room on the drive"):
        train_step(pair.swapped, pair.optimizer)
    pair.check_pager()
    others.unlink()
    torch.set_rng_state(random_state)
    pair.swapped.load_state_dict(pair.plain.state_dict())  # the plain one is a step ahead
    pair.optimizer.load_state_dict(pair.plain_optimizer.state_dict())
    pair.both(lambda model, _: model.zero_grad())
    pair.train(train_step, steps=3)
    pair.finish()


def test_closing_on_a_full_drive_says_so_and_lets_everything_go(
    small_drive: Callable[[int], Path], twins: Callable[..., Twins]
) -> None:
    before = held_by_swapper()
    pair, _ = begin_and_fill(small_drive(32 << 20), twins)
    with contextlib.suppress(swapper.IoError):
        loss_of(pair.swapped, tokens())
    with pytest.raises(swapper.IoError, match="make room on the drive"):
        pair.close()
    pair.close()
    assert not [thing for thing in held_since(before) if "swapper-arena" not in thing]


HOLDER = """
import sys
import swapper
manager = swapper.SwapManager(sys.argv[1], host_memory="32MiB")
print("holding", flush=True)
sys.stdin.readline()
"""


def test_a_directory_in_use_by_another_process_is_refused_until_it_ends(tmp_path: Path) -> None:
    with started_python("-c", HOLDER, tmp_path) as process:
        assert process.stdout.readline() == "holding\n"
        for resume in ("error", "auto", "discard"):
            with pytest.raises(swapper.DirectoryError, match=rf"in use by another run \(process {process.pid}\)"):
                swapper.SwapManager(tmp_path, host_memory=BUDGET, resume=resume)
        process.send_signal(signal.SIGKILL)  # a lock does not outlive its holder, however it ends
        process.wait()
    swapper.SwapManager(tmp_path, host_memory=BUDGET).close()


def test_a_directory_in_use_in_this_process_is_refused(tmp_path: Path) -> None:
    with (
        swapper.SwapManager(tmp_path, host_memory=BUDGET),
        pytest.raises(swapper.DirectoryError, match="in use"),
    ):
        swapper.SwapManager(tmp_path, host_memory=BUDGET, resume="discard")
    swapper.SwapManager(tmp_path, host_memory=BUDGET).close()


def test_a_directory_that_holds_a_run_is_refused_unless_it_is_said_what_to_do(tmp_path: Path) -> None:
    with swapper.SwapManager(tmp_path, host_memory=BUDGET) as manager:
        model = Net()
        model, optimizer = manager.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        train_step(model, optimizer)
    before = {file.name: file.stat().st_ino for file in (tmp_path / "rank-0-of-1").glob("*.swap")}
    assert before
    with pytest.raises(swapper.DirectoryError, match=r'holds a run .* resume="discard"'):
        swapper.SwapManager(tmp_path, host_memory=BUDGET)
    assert {file.name: file.stat().st_ino for file in (tmp_path / "rank-0-of-1").glob("*.swap")} == before
    with swapper.SwapManager(tmp_path, host_memory=BUDGET, resume="discard") as manager:
        assert not list(tmp_path.rglob("*.swap"))
        model = Net()
        model, optimizer = manager.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        assert train_step(model, optimizer).isfinite()


def test_other_files_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "old.swap").write_text("mine too")
    with swapper.SwapManager(tmp_path, host_memory=BUDGET, resume="discard") as manager:
        model = Net()
        manager.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "old.swap").read_text() == "mine too"


def test_a_run_of_this_process_is_ended_by_its_close_or_with_its_model(tmp_path: Path) -> None:
    """What a notebook cell does that runs again, and a function that has dropped its manager."""
    for end in ("close", "collect"):
        manager = swapper.SwapManager(tmp_path / end, "64MiB")
        model, optimizer = manager.offload(model := torch.nn.Linear(8, 8), torch.optim.AdamW(model.parameters()))
        with pytest.raises(
            swapper.DirectoryError, match=r"run of this process.*close\(\), or use `with.*del model, opt"
        ):
            swapper.SwapManager(tmp_path / end, "64MiB")
        if end == "close":
            manager.close()
        del manager, model, optimizer
        gc.collect()
        swapper.SwapManager(tmp_path / end, "64MiB", resume="discard").close()


def test_the_error_of_a_run_without_a_commit_does_not_say_that_it_can_be_resumed(tmp_path: Path) -> None:
    """Parameters and state in memory are not committed unasked."""
    with swapper.SwapManager(tmp_path, host_memory=BUDGET) as manager:
        model = Net()
        model, optimizer = manager.offload(model, adamw(model.parameters()), params="host", optimizer_state="nvme")
        train_step(model, optimizer)
    with pytest.raises(swapper.DirectoryError, match="begin a new one: it has no commit"):
        swapper.SwapManager(tmp_path, host_memory=BUDGET)
    with swapper.SwapManager(tmp_path, host_memory=BUDGET, resume="auto") as manager:
        assert manager.step == 0

"""Files planted in place of a run's directory, or of a file in it: nothing outside of the directory is touched."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from e2e.models import Net, train_step
from e2e.twins import adamw

import swapper
from swapper.durability.directory import COMMIT_NAME, FALLBACK_NAME, RETENTION_NAME, SPARE_NAME
from swapper.io import extents
from swapper.io.drives import RECORD_NAME

BUDGET = "32MiB"
NAMES = [
    "lock",
    COMMIT_NAME,
    f"{COMMIT_NAME}.partial",
    FALLBACK_NAME,
    f"{FALLBACK_NAME}.partial",
    SPARE_NAME,
    RECORD_NAME,
    f"{RECORD_NAME}.partial",
    RETENTION_NAME,
    f"{RETENTION_NAME}.partial",
    "turn-0.swap",
    "turn-1.swap",
    "turn-2.swap",
    f"scratch-{os.getpid()}-0.swap",
]


def train(directories: Path | list[Path], snapshots: Path, resume: str = "auto", steps: int = 2) -> int:
    """Train a little, with a snapshot at each step. Returns the step that was begun from."""
    model = Net()
    with swapper.SwapManager(directories, host_memory=BUDGET, resume=resume) as manager:
        begun = manager.step
        model, optimizer = manager.offload(
            model, adamw(model.parameters()), params="nvme", optimizer_state="nvme", gradients="nvme"
        )
        for _ in range(steps):
            train_step(model, optimizer)
            manager.snapshot(snapshots / f"step-{manager.step}.pt", keep=1).result()
    return begun


def contents(directory: Path) -> dict[str, tuple[bytes, os.stat_result]]:
    return {str(p): (p.read_bytes(), p.stat()) for p in sorted(directory.rglob("*")) if p.is_file()}


def untouched(before: dict[str, tuple[bytes, os.stat_result]], directory: Path) -> bool:
    after = contents(directory)
    same_times = all(
        after[name][1].st_mtime_ns == status.st_mtime_ns for name, (_, status) in before.items() if name in after
    )
    return {n: c for n, (c, _) in after.items()} == {n: c for n, (c, _) in before.items()} and same_times


@pytest.fixture(autouse=True)
def names_that_can_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "_numbers", itertools.repeat(0))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run, made already and empty."""
    path = tmp_path / "drive" / "rank-0-of-1"
    path.mkdir(parents=True)
    path.chmod(0o700)
    return path


@pytest.fixture
def victims(tmp_path: Path) -> Path:
    """A directory with files of somebody's."""
    path = tmp_path / "victims"
    path.mkdir()
    for name in ("file", "turn-7.swap", "commit.pt"):
        (path / name).write_bytes(b"somebody's own" * 1000)
    return path


@pytest.mark.parametrize("resume", ["auto", "discard"])
@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.replace(str(os.getpid()), "PID"))
def test_no_link_that_is_planted_in_a_directory_is_followed(
    name: str, resume: str, run: Path, victims: Path, tmp_path: Path
) -> None:
    (run / name).symlink_to(victims / "file")
    before = contents(victims)
    try:
        train(run.parent, tmp_path, resume)
    except swapper.SwapperError as error:
        assert name.removesuffix(".partial") in str(error)
        assert "remove" in str(error) or "discard" in str(error)
    else:
        assert name != "lock"
        assert train(run.parent, tmp_path) == 2
    assert untouched(before, victims)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.replace(str(os.getpid()), "PID"))
def test_no_link_is_followed_in_place_of_a_file_of_the_run(name: str, run: Path, victims: Path, tmp_path: Path) -> None:
    train(run.parent, tmp_path)
    if (run / name).exists():
        (run / name).rename(victims / "its-own")
    (run / name).symlink_to(victims / ("its-own" if (victims / "its-own").exists() else "file"))
    before = contents(victims)
    try:
        train(run.parent, tmp_path, steps=4)
    except swapper.SwapperError as error:
        assert str(run) in str(error)
    assert untouched(before, victims)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.replace(str(os.getpid()), "PID"))
def test_a_fifo_in_place_of_a_file_does_not_hang(name: str, run: Path, tmp_path: Path) -> None:
    os.mkfifo(run / name)
    try:
        train(run.parent, tmp_path)
    except swapper.SwapperError as error:
        assert str(run) in str(error)


@pytest.mark.parametrize("resume", ["auto", "discard"])
@pytest.mark.parametrize("begun", [False, True], ids=["fresh", "begun"])
@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.replace(str(os.getpid()), "PID"))
def test_a_directory_in_place_of_a_file_is_named_and_stays(
    name: str, begun: bool, resume: str, run: Path, tmp_path: Path
) -> None:
    if begun:
        train(run.parent, tmp_path)
        (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    (run / name / "mine").write_text("mine")
    others = tmp_path / "others"
    others.mkdir()
    try:
        train(run.parent, others, resume, steps=4)
    except swapper.SwapperError as error:
        assert str(run / name).removesuffix(".partial") in str(error)
        assert "move it away" in str(error) or "remove" in str(error) or "discard" in str(error)
    assert (run / name / "mine").read_text() == "mine"


def test_over_drives_no_link_is_followed(tmp_path: Path, victims: Path) -> None:
    before = contents(victims)
    for name in (f"{RECORD_NAME}.partial", "turn-0.swap"):
        drives = [tmp_path / f"{name}-{n}" for n in range(2)]
        for drive in drives:
            (drive / "rank-0-of-1").mkdir(parents=True, mode=0o700)
            (drive / "rank-0-of-1" / name).symlink_to(victims / "file")
        assert train(list(drives), tmp_path, "discard") == 0
        assert untouched(before, victims)
        for path in tmp_path.glob("step-*.pt"):
            path.unlink()


@pytest.mark.whole
@pytest.mark.parametrize("resume", ["error", "auto", "discard"])
def test_a_directory_that_is_a_link_is_refused(resume: str, run: Path, victims: Path, tmp_path: Path) -> None:
    run.rmdir()
    run.symlink_to(victims)
    before = contents(victims)
    with pytest.raises(swapper.DirectoryError, match=r"rank-0-of-1 is a link.*Remove it"):
        train(run.parent, tmp_path, resume)
    assert untouched(before, victims)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o720, 0o1777])
@pytest.mark.parametrize("resume", ["error", "auto", "discard"])
def test_a_directory_that_others_may_write_is_refused(mode: int, resume: str, run: Path, tmp_path: Path) -> None:
    (run / "turn-0.swap").write_bytes(b"planted")
    run.chmod(mode)
    with pytest.raises(swapper.DirectoryError, match=rf"others may write to .*chmod go-w {run}"):
        train(run.parent, tmp_path, resume)
    assert [p.name for p in run.iterdir()] == ["turn-0.swap"]
    run.chmod(0o755)
    assert train(run.parent, tmp_path, "discard") == 0


@pytest.mark.whole
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_directory_of_somebody_else_is_refused(mode: int, run: Path, tmp_path: Path) -> None:
    run.chmod(mode)
    os.chown(run, 65534, -1)
    with pytest.raises(swapper.DirectoryError, match=r"belongs to nobody.*remove it"):
        train(run.parent, tmp_path)
    assert list(run.iterdir()) == []


def test_a_directory_below_one_that_all_may_write_is_as_good_as_any(run: Path, tmp_path: Path) -> None:
    run.rmdir()
    run.parent.chmod(0o1777)  # as /tmp is
    assert train(run.parent, tmp_path) == 0
    assert run.stat().st_mode & 0o777 == 0o700
    assert train(run.parent, tmp_path) == 2


def test_what_takes_the_place_of_a_directory_in_use_is_not_touched(run: Path, tmp_path: Path) -> None:
    model = Net()
    with swapper.SwapManager(run.parent, host_memory=BUDGET) as manager:
        model, optimizer = manager.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        train_step(model, optimizer)
        run.rename(tmp_path / "moved")
        run.mkdir()
        for name in NAMES:
            (run / name).write_bytes(b"another one's")
        before = contents(run)
        for _ in range(3):
            train_step(model, optimizer)
            manager.snapshot(tmp_path / f"step-{manager.step}.pt", keep=1).result()
    assert untouched(before, run)
    (tmp_path / "there").mkdir()
    (tmp_path / "moved").rename(tmp_path / "there" / "rank-0-of-1")
    assert train(tmp_path / "there", tmp_path) == 4

"""A snapshot that cannot be written says why, leaves nothing behind, and the run goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from e2e.models import Net, train_step
from e2e.twins import Twins, assert_same

import swapper

MakeTwins = Callable[..., Twins]


def files_in(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def assert_goes_on(pair: Twins) -> None:
    pair.check_pager()
    pair.train(train_step, steps=1)
    state = torch.load(pair.manager.snapshot(pair.directory / "good.pt").result())
    assert_same(dict(state["model"]), dict(pair.plain.state_dict()))
    pair.train(train_step, steps=1)
    pair.finish()


def test_an_existing_file_is_never_replaced(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=1)
    path = pair.directory / "mine.pt"
    path.write_bytes(b"mine")
    before = files_in(pair.directory)
    with pytest.raises(swapper.CheckpointError, match="exists already"):
        pair.manager.snapshot(path).result()
    assert path.read_bytes() == b"mine"
    assert files_in(pair.directory) == before
    assert_goes_on(pair)


def test_a_dangling_link_is_never_followed(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=1)
    path = pair.directory / "link.pt"
    path.symlink_to(pair.directory / "nowhere")
    with pytest.raises(swapper.CheckpointError, match="exists already"):
        pair.manager.snapshot(path).result()
    assert path.is_symlink()
    assert not (pair.directory / "nowhere").exists()
    assert_goes_on(pair)


def test_a_directory_is_not_a_file(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=1)
    (pair.directory / "folder").mkdir()
    before = files_in(pair.directory)
    with pytest.raises(swapper.CheckpointError, match="exists already"):
        pair.manager.snapshot(pair.directory / "folder").result()
    assert files_in(pair.directory) == before
    assert_goes_on(pair)


def test_a_missing_directory_is_made(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=1)
    path = pair.directory / "missing" / "too" / "a.pt"
    pair.manager.snapshot(path).result()
    assert torch.load(path)["swapper"]["step"] == 1
    assert_goes_on(pair)


def test_a_directory_that_cannot_be_made_is_named(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=1)
    (pair.directory / "a file").write_bytes(b"mine")
    before = files_in(pair.directory)
    with pytest.raises(swapper.CheckpointError, match=r"a file/too cannot be made \(Not a directory\)"):
        pair.manager.snapshot(pair.directory / "a file" / "too" / "a.pt").result()
    assert files_in(pair.directory) == before
    assert_goes_on(pair)


@pytest.mark.parametrize("nbytes", [64 << 10, 2 << 20, 8 << 20])
def test_a_full_drive_leaves_nothing_behind(small_drive: Callable[[int], Path], twins: MakeTwins, nbytes: int) -> None:
    drive = small_drive(nbytes)
    pair = twins(Net())
    pair.train(train_step, steps=1)
    for _ in range(2):
        with pytest.raises(swapper.SwapperError, match=r"No space left|room"):
            pair.manager.snapshot(drive / "a.pt").result()
        assert list(drive.iterdir()) == []
        usage = os.statvfs(drive)
        assert usage.f_bfree == usage.f_blocks
    assert_goes_on(pair)


def test_a_read_only_drive_is_named(mount: Callable[..., Path], twins: MakeTwins) -> None:
    drive = mount("-t", "tmpfs", "-o", "ro", "swapper-test")
    pair = twins(Net())
    pair.train(train_step, steps=1)
    with pytest.raises(swapper.SwapperError, match=r"Read-only|read-only") as caught:
        pair.manager.snapshot(drive / "a.pt").result()
    assert str(drive) in str(caught.value)
    assert_goes_on(pair)


def test_a_registered_object_that_fails_comes_through_and_leaves_nothing(twins: MakeTwins) -> None:
    class Broken:
        broken = False

        def state_dict(self) -> dict[str, int]:
            if self.broken:
                raise ZeroDivisionError
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    pair = twins(Net())
    thing = Broken()
    pair.manager.register(thing=thing)
    pair.train(train_step, steps=1)
    before = files_in(pair.directory)
    thing.broken = True
    with pytest.raises(ZeroDivisionError):
        pair.manager.snapshot(pair.directory / "a.pt").result()
    assert files_in(pair.directory) - before <= {"rank-0-of-1/commit.pt"}
    thing.broken = False
    assert_goes_on(pair)


def test_a_registered_state_that_torch_cannot_load_safely_is_refused(twins: MakeTwins) -> None:
    class Strange:
        def state_dict(self) -> dict[str, object]:
            return {"value": object()}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    pair = twins(Net())
    with pytest.raises(swapper.SwapperError, match="strange"):
        pair.manager.register(strange=Strange())
    pair.train(train_step, steps=1)
    assert_goes_on(pair)

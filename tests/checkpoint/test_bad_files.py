"""Paths that cannot be written, drives that are full, and files that are not what they claim: errors of ours, nothing half-done."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import examples

import swapper
from swapper.checkpoint import load, save
from swapper.formats.sources import open_source
from swapper.io.replacing import new_directory, replacing

STATE = {"a": torch.arange(300_000.0), "b": torch.ones(7)}


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path: Path) -> None:
    save({"old": torch.zeros(5)}, tmp_path / "x.pt")

    class Fails:
        def __reduce__(self) -> Any:
            raise RuntimeError("cannot be pickled")

    with pytest.raises(RuntimeError, match="cannot be pickled"):
        save([STATE, Fails()], tmp_path / "x.pt")
    assert load(tmp_path / "x.pt").keys() == {"old"}
    save(STATE, tmp_path / "x.pt")
    assert torch.equal(load(tmp_path / "x.pt")["a"], STATE["a"])
    assert names_in(tmp_path) == ["x.pt"]


def test_a_name_that_cannot_be_taken_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "snapshot").write_bytes(b"kept")
    (tmp_path / "snapshot").chmod(0o444)
    before = names_in(tmp_path)
    for name, options, message in (
        ("folder", {}, "a directory"),
        ("pipe", {}, "not a file"),
        ("mine", {"overwrite": False}, "exists already"),
        ("snapshot", {}, "write-protected"),
        ("mine/x.pt", {}, "cannot be written"),
    ):
        with pytest.raises(swapper.CheckpointError, match=message):
            save(STATE, tmp_path / name, **options)
    assert names_in(tmp_path) == before
    assert ((tmp_path / "mine").read_bytes(), (tmp_path / "snapshot").read_bytes()) == (b"mine", b"kept")


def test_what_appears_under_the_name_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    with (
        pytest.raises(swapper.CheckpointError, match="appeared meanwhile, and was not changed"),
        replacing(tmp_path / "file", overwrite=False) as ours,
    ):
        ours.write_bytes(b"ours")
        (tmp_path / "file").write_bytes(b"theirs")
    with (
        pytest.raises(swapper.CheckpointError, match="appeared meanwhile, and was not changed"),
        new_directory(tmp_path / "folder") as folder,
    ):
        (folder / "ours").touch()
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "theirs").touch()
    assert (tmp_path / "file").read_bytes() == b"theirs"
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "file",
        "folder",
        "folder/theirs",
    ]


def test_links_are_followed_and_hard_links_keep_the_old_content(tmp_path: Path) -> None:
    save({"old": 1}, tmp_path / "real.pt")
    (tmp_path / "link.pt").symlink_to("real.pt")
    os.link(tmp_path / "real.pt", tmp_path / "other.pt")
    save({"new": 1}, tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert load(tmp_path / "real.pt") == {"new": 1}
    assert load(tmp_path / "other.pt") == {"old": 1}


def test_a_full_drive_leaves_the_old_file_and_nothing_else(mount: Callable[..., Path]) -> None:
    drive = mount("-t", "tmpfs", "-o", "size=1m", "swapper-test")
    save({"old": 1}, drive / "x.pt")
    with pytest.raises(swapper.IoError) as caught:
        save(STATE, drive / "x.pt")
    assert caught.value.errno == errno.ENOSPC
    assert load(drive / "x.pt") == {"old": 1}
    assert names_in(drive) == ["x.pt"]


def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swapper.checkpoint.stream import StreamWriter

    finish = StreamWriter.finish

    def interrupted(writer: StreamWriter) -> None:
        finish(writer)
        raise KeyboardInterrupt

    monkeypatch.setattr(StreamWriter, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(STATE, tmp_path / "x.pt")
    assert names_in(tmp_path) == []


def test_two_threads_may_save_and_load_at_once(tmp_path: Path) -> None:
    def work(number: int) -> None:
        for _ in range(5):
            save({"a": torch.full((100_000,), float(number))}, tmp_path / "x.pt")
            values = load(tmp_path / "x.pt", verify=True)["a"]
            assert values.min() == values.max()

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(work, range(3))) == [None] * 3
    assert names_in(tmp_path) == ["x.pt"]


def test_a_forked_child_saves_and_loads(tmp_path: Path) -> None:
    save(STATE, tmp_path / "x.pt")
    child = os.fork()
    if child == 0:
        try:
            save(load(tmp_path / "x.pt"), tmp_path / "y.pt")
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(load(tmp_path / "y.pt")["a"], STATE["a"])


def test_a_wrong_checksum_is_found_when_asked_for(tmp_path: Path) -> None:
    save(STATE, tmp_path / "x.pt")
    at = open_source(tmp_path / "x.pt").tensors["a"].offset + 70_001
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[at] ^= 1
    (tmp_path / "x.pt").write_bytes(data)
    for options in ({}, {"map_location": "meta"}, {"mmap": True}, {"map_location": lambda storage, _: storage}):
        with pytest.raises(swapper.CheckpointError, match="archive/data/0 has the CRC-32"):
            load(tmp_path / "x.pt", verify=True, **options)
    assert load(tmp_path / "x.pt")["b"].sum() == 7


@pytest.mark.whole
@pytest.mark.parametrize("part", [0.0, 0.3, 0.999])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, part: float) -> None:
    save(STATE, tmp_path / "x.pt")
    os.truncate(tmp_path / "x.pt", int((tmp_path / "x.pt").stat().st_size * part))
    with pytest.raises(swapper.CheckpointError):
        load(tmp_path / "x.pt")


def test_a_file_that_is_not_there_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(swapper.IoError, match="No such file"):
        load(tmp_path / "x.pt")
    with pytest.raises(swapper.IoError, match="directory"):
        load(tmp_path)
    (tmp_path / "text").write_text("no checkpoint at all")
    with pytest.raises(swapper.CheckpointError, match="cannot be loaded"):
        load(tmp_path / "text")


def test_sizes_and_offsets_beyond_all_files_are_refused(tmp_path: Path) -> None:
    for at, value in ((40, 1 << 63), (48, 1 << 63), (48, (1 << 64) - 1), (32, 1 << 62), (24, 1 << 62)):
        save(STATE, tmp_path / "x.pt")
        data = bytearray((tmp_path / "x.pt").read_bytes())
        struct.pack_into("<Q", data, data.rindex(b"PK\x06\x06") + at, value)
        (tmp_path / "x.pt").write_bytes(data)
        with pytest.raises(swapper.CheckpointError, match="not a sound torch checkpoint"):
            load(tmp_path / "x.pt")


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_changed_load_ends_in_a_result_or_an_error_of_ours(data: st.DataObject, tmp_path: Path) -> None:
    save({"a": torch.arange(6.0), "b": [torch.ones(3), 1.5, "text"]}, tmp_path / "x.pt", durable=False)
    changed = bytearray((tmp_path / "x.pt").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "x.pt").write_bytes(changed)
    with contextlib.suppress(swapper.SwapperError):
        load(tmp_path / "x.pt", verify=True)

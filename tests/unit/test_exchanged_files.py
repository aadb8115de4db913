"""Files that are replaced without removing one: what was there is whole until the new content is, and is not lost to others."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import swapper
from swapper.io import beneath
from swapper.io.beneath import replace_file

LONG, SHORT = b"long content " * 1000, b"short"


@pytest.mark.parametrize("held", [False, True])
def test_two_files_take_turns(tmp_path: Path, held: bool) -> None:
    tmp_path.chmod(0o700)
    if held:
        beneath.hold(tmp_path)
    path, spare, found = tmp_path / "a", tmp_path / "b", []
    try:
        for number, data in enumerate([LONG, SHORT, LONG, b"", SHORT]):
            replace_file(path, data, durable=number % 2 == 0, spare=spare)
            assert path.read_bytes() == data
            found.append(path.stat().st_ino)
            assert sorted(each.name for each in tmp_path.iterdir()) == (["a", "b"] if number else ["a"])
    finally:
        beneath.release(tmp_path)
    assert found == [found[0], found[1]] * 2 + [found[0]] and found[0] != found[1]


def test_a_file_with_another_name_is_not_written_over(tmp_path: Path) -> None:
    path, spare = tmp_path / "a", tmp_path / "b"
    replace_file(path, LONG, spare=spare)
    os.link(path, tmp_path / "kept")
    for data in (SHORT, b"other", SHORT):
        replace_file(path, data, spare=spare)
        assert path.read_bytes() == data
    assert (tmp_path / "kept").read_bytes() == LONG


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("plant", [lambda path, to: path.symlink_to(to), lambda path, _: os.mkfifo(path)])
def test_what_is_no_file_is_replaced(tmp_path: Path, name: str, plant: Callable[[Path, Path], None]) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(LONG)
    plant(tmp_path / name, victim)
    for data in (SHORT, LONG, SHORT):
        replace_file(tmp_path / "a", data, spare=tmp_path / "b")
        assert (tmp_path / "a").read_bytes() == data and not (tmp_path / "a").is_symlink()
    assert victim.read_bytes() == LONG


def test_a_directory_is_no_spare_and_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for data in (SHORT, LONG):
        replace_file(tmp_path / "a", data, spare=tmp_path / "b")
        assert (tmp_path / "a").read_bytes() == data
    with pytest.raises(swapper.IoError):
        replace_file(tmp_path / "b", SHORT, spare=tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("more", [{}, {"renameat2": lambda *_: -1}])
def test_without_an_exchange_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(beneath, "_libc", SimpleNamespace(sync_file_range=lambda *_: 0, **more))
    for data in (SHORT, LONG):
        replace_file(tmp_path / "a", data, spare=tmp_path / "b")
        assert (tmp_path / "a").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSYS])
def test_a_content_that_is_not_written_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Unless the system cannot tell."""
    replace_file(tmp_path / "a", LONG, spare=tmp_path / "b")
    monkeypatch.setattr(beneath, "_libc", SimpleNamespace(sync_file_range=lambda *_: ctypes.set_errno(number) or -1))
    with pytest.raises(swapper.IoError) if number == errno.EIO else nullcontext():
        replace_file(tmp_path / "a", SHORT, spare=tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (LONG if number == errno.EIO else SHORT)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]

"""Files that are replaced without removing one: what was there is whole until the new content is, and is not lost to others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import swapper
from swapper.io import beneath
from swapper.io.beneath import exchange_file

LONG, SHORT = b"long content " * 1000, b"short"


@pytest.mark.parametrize("held", [False, True])
def test_two_files_take_turns(tmp_path: Path, held: bool) -> None:
    tmp_path.chmod(0o700)
    if held:
        beneath.hold(tmp_path)
    path, spare, found = tmp_path / "a", tmp_path / "b", []
    try:
        for number, data in enumerate([LONG, SHORT, LONG, b"", SHORT]):
            exchange_file(path, spare, data, durable=number % 2 == 0)
            assert path.read_bytes() == data
            found.append(path.stat().st_ino)
            assert sorted(each.name for each in tmp_path.iterdir()) == (["a", "b"] if number else ["a"])
    finally:
        beneath.release(tmp_path)
    assert found == [found[0], found[1]] * 2 + [found[0]] and found[0] != found[1]


def test_a_file_with_another_name_is_not_written_over(tmp_path: Path) -> None:
    path, spare = tmp_path / "a", tmp_path / "b"
    exchange_file(path, spare, LONG)
    os.link(path, tmp_path / "kept")
    for data in (SHORT, b"other", SHORT):
        exchange_file(path, spare, data)
        assert path.read_bytes() == data
    assert (tmp_path / "kept").read_bytes() == LONG


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("plant", [lambda path, to: path.symlink_to(to), lambda path, _: os.mkfifo(path)])
def test_what_is_no_file_is_replaced(tmp_path: Path, name: str, plant: Callable[[Path, Path], None]) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(LONG)
    plant(tmp_path / name, victim)
    for data in (SHORT, LONG, SHORT):
        exchange_file(tmp_path / "a", tmp_path / "b", data)
        assert (tmp_path / "a").read_bytes() == data and not (tmp_path / "a").is_symlink()
    assert victim.read_bytes() == LONG


def test_a_directory_is_no_spare_and_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for data in (SHORT, LONG):
        exchange_file(tmp_path / "a", tmp_path / "b", data)
        assert (tmp_path / "a").read_bytes() == data
    with pytest.raises(swapper.IoError):
        exchange_file(tmp_path / "b", tmp_path / "c", SHORT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("libc", [SimpleNamespace(), SimpleNamespace(renameat2=lambda *_: -1)])
def test_without_an_exchange_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libc: object) -> None:
    monkeypatch.setattr(beneath, "_libc", libc)
    for data in (SHORT, LONG):
        exchange_file(tmp_path / "a", tmp_path / "b", data)
        assert (tmp_path / "a").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["a"]

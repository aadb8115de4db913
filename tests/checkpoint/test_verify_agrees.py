"""A file that `verify` calls whole is read by all readers, with the bytes that were saved: for every change of a file."""

from __future__ import annotations

import os
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import corrupted
from torch.utils.serialization import config
from typer.testing import CliRunner

from checkpoint.equality import bytes_of
from swapper.checkpoint import load, save
from swapper.checkpoint.exporting import export
from swapper.checkpoint.inspecting import inspect
from swapper.cli import app
from swapper.durability.commit import read_commit
from swapper.durability.verify import verify
from swapper.errors import CheckpointError, SwapperError

STATE = {"a": torch.arange(3000.0), "b": {"c": torch.ones(7, dtype=torch.bfloat16)}, "note": "text", "number": 3}


def compressed(path: Path) -> None:
    torch.save(STATE, path.with_suffix(".plain"))
    with zipfile.ZipFile(path.with_suffix(".plain")) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            kind = zipfile.ZIP_DEFLATED if "/data/" in info.filename else zipfile.ZIP_STORED
            new.writestr(info.filename, old.read(info), kind)


def snapshot(path: Path) -> None:
    directory = path.with_suffix(".run")
    directory.mkdir()
    shutil.copy(corrupted.make_snapshot(directory), path)
    path.chmod(0o600)


MAKERS: dict[str, Callable[[Path], Any]] = {
    "torch": lambda path: torch.save(STATE, path),
    "swapper": lambda path: save(STATE, path),
    "compressed": compressed,
    "snapshot": snapshot,
}


@pytest.fixture(scope="module", params=MAKERS)
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / "x.pt"
    MAKERS[request.param](path)
    return path


def tensors_of(tree: Any, name: str = "") -> Iterator[tuple[str, bytes]]:
    if isinstance(tree, torch.Tensor):
        yield name, bytes_of(tree)
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors_of(value, f"{name}.{key}" if name else str(key))


def places(content: bytes, chance: random.Random) -> int:
    """A byte of the file; every second time one that is not a tensor's."""
    marks = (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")
    if chance.random() < 0.5:
        return chance.randrange(len(content))
    mark = chance.choice([mark for mark in marks if mark in content])
    starts = [at for at in range(len(content)) if content.startswith(mark, at)] if len(content) < 100_000 else []
    start = chance.choice(starts) if starts else content.rindex(mark)
    return min(start + chance.randrange(80), len(content) - 1)


def changed(content: bytes, chance: random.Random) -> bytes:
    at = places(content, chance)
    length = chance.choice((1, 2, 4, 16, 512, 4096))
    kind = chance.choice(("flip", "flip", "flip", "byte", "zero", "duplicate", "remove", "swap"))
    part = content[at : at + length]
    if kind in ("flip", "byte"):
        value = content[at] ^ 1 << chance.randrange(8) if kind == "flip" else chance.randrange(256)
        return content[:at] + bytes([value]) + content[at + 1 :]
    new = {"zero": bytes(len(part)), "duplicate": part + part, "remove": b"", "swap": part[::-1]}[kind]
    return content[:at] + new + content[at + length :]


def cuts(content: bytes, chance: random.Random) -> Iterator[bytes]:
    lengths = [*range(1, 81), 100, 512, 4096, len(content) // 2, len(content) - 1000]
    yield from (content[:-length] for length in lengths)
    for tail in (bytes(1), bytes(80), bytes(4096), b"\n", b"PK\x05\x06" + bytes(18), content):
        yield content + tail
    yield content + os.urandom(30)
    yield bytes(1) + content


def mutations(content: bytes, seed: int, count: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    yield from cuts(content, chance)
    yield from (changed(content, chance) for _ in range(count))


def faults_of(path: Path) -> int | None:
    """Return the number of faults; None where it cannot be checked."""
    try:
        return sum(len(report.faults) for report in verify(path))
    except SwapperError:
        return None


def test_what_is_called_whole_is_read_by_all_and_is_what_was_saved(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_SERIALIZATION_DEBUG")  # it asserts that records lie where torch would have put them
    content = original.read_bytes()
    saved = dict(tensors_of(torch.load(original)))
    assert faults_of(original) == 0
    is_packed = original.parent.name.startswith("compressed")  # not to be mapped, or read in place
    path, whole = tmp_path / "x.pt", 0
    count = 20 if len(content) > 1 << 20 else 1500 if "SWAPPER_TEST_ALL" in os.environ else 200
    for mutation in mutations(content, 1, count):
        path.write_bytes(mutation)
        if mutation == content or faults_of(path) != 0:
            continue
        whole += 1
        for read in (load, lambda p: load(p, verify=True), torch.load):
            assert dict(tensors_of(read(path))) == saved
        if not is_packed:
            assert dict(tensors_of(torch.load(path, mmap=True))) == saved
            assert len(inspect(path)["tensors"]) == len(saved)
            export(path, tmp_path / "y.pt", "torch", what="all", overwrite=True)
            assert dict(tensors_of(torch.load(tmp_path / "y.pt"))) == saved
    sealed = b"swapper-seal" in content
    assert (whole == 0) if sealed else whole > 0  # a seal covers every byte


def test_a_commit_record_that_is_cut_or_longer_is_damaged(original: Path, tmp_path: Path) -> None:
    runs = list(original.parent.glob("x.run/rank-*"))
    if not runs:
        pytest.skip("this file is of no run")
    content = (runs[0] / "commit.pt").read_bytes()
    for mutation in cuts(content, random.Random(2)):
        (tmp_path / "commit.pt").write_bytes(mutation)
        with pytest.raises(CheckpointError):
            read_commit(tmp_path)


def test_exit_codes(original: Path, tmp_path: Path) -> None:
    content = original.read_bytes()
    files: dict[str, tuple[int, bytes]] = {
        "whole.pt": (0, content),
        "cut.pt": (1, content[:-20]),
        "begun.pt": (1, content[:2000]),
        "longer.pt": (1, content + bytes(80)),
        "text": (2, b"no checkpoint at all"),
    }
    for name, (_, data) in files.items():
        (tmp_path / name).write_bytes(data)
    export(
        MAKERS["torch"](tmp_path / "plain.pt") or tmp_path / "plain.pt", tmp_path / "good.safetensors", "safetensors"
    )
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "good.safetensors").read_bytes()[:-1])
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with config.patch("save.compute_crc32", False):
        torch.save(STATE, tmp_path / "no-checksums.pt")
    os.mkfifo(tmp_path / "pipe")
    expected = {name: code for name, (code, _) in files.items()}
    expected |= {
        "good.safetensors": 2,
        "cut.safetensors": 1,
        "old.pt": 2,
        "no-checksums.pt": 2,
        "pipe": 2,
        "missing": 2,
    }
    for name, code in expected.items():
        done = CliRunner().invoke(app, ["verify", str(tmp_path / name)])
        assert done.exit_code == code, (name, done.output)
    shown = CliRunner().invoke(app, ["verify", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert all(text in " ".join(shown.split()) for text in ("0: whole", "1: damaged", "2: it cannot be checked"))

"""What the contract tests share: one engine for each backend, memory, real files, and a gate.

A gate is an operation that is certain to be still running while a test submits others behind it: it reads a file in
thousands of small pieces, one at a time, on an engine of its own. Tests assert that it was, instead of sleeping.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swapper import _C

BACKENDS = ["uring", "aio", "threads", "chaos"]
PAGE = 4096
MIB = 1 << 20


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def arena() -> Iterator[_C.Arena]:
    arena = _C.Arena(32 * MIB, huge_pages=False)
    yield arena
    arena.close()


@pytest.fixture
def make_engine(backend: str) -> Iterator[Callable[..., _C.Engine]]:
    """Engines of the backend under test, closed at the end."""
    engines: list[_C.Engine] = []

    def make(**options: object) -> _C.Engine:
        engine = _C.Engine(backend=backend, **options)  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine: Callable[..., _C.Engine], arena: _C.Arena) -> _C.Engine:
    return make_engine(arena=arena)


@pytest.fixture
def make_file(tmp_path: Path) -> Iterator[Callable[..., _C.File]]:
    """New files, filled with given bytes or allocated to a size."""
    files: list[_C.File] = []

    def make(content: bytes | int = b"", name: str | None = None, **options: object) -> _C.File:
        path = tmp_path / (name or f"file{len(files)}")
        path.write_bytes(b"" if isinstance(content, int) else content)
        file = _C.File(path, **options)  # type: ignore[arg-type]
        if isinstance(content, int):
            file.allocate(content)
        files.append(file)
        return file

    yield make
    for file in files:
        file.close()


@pytest.fixture
def start_gate(tmp_path: Path) -> Iterator[Callable[[], _C.Ticket]]:
    arena = _C.Arena(64 * MIB, lock=False, huge_pages=False)
    path = tmp_path / "gate"
    with path.open("wb") as stream:
        stream.truncate(arena.nbytes)
    file = _C.File(path, direct=False)
    engine = _C.Engine(backend="threads", depth=1, piece_bytes=PAGE)

    def start() -> _C.Ticket:
        ticket = None
        for _ in range(3):
            ticket = engine.read(file, 0, arena.address, arena.nbytes, after=ticket)
        assert ticket is not None
        return ticket

    yield start
    engine.close()
    file.close()
    arena.close()
    path.unlink()


@pytest.fixture
def large_sectors(tmp_path: Path) -> Iterator[Path]:
    """An ext4 on a drive of 4096-byte sectors; skips where loop devices are not permitted."""
    image, mount_point = tmp_path / "image", tmp_path / "mounted"
    with image.open("wb") as stream:
        stream.truncate(64 * MIB)
    mount_point.mkdir()
    device = ""

    def command(*words: object) -> str:
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"not permitted here: {' '.join(map(str, words))}: {done.stderr.strip()}")
        return done.stdout.strip()

    try:
        device = command("losetup", "--sector-size", 4096, "--direct-io=on", "--find", "--show", image)
        command("mkfs.ext4", "-q", device)
        command("mount", device, mount_point)
        yield mount_point
        subprocess.run(["umount", "--lazy", mount_point], check=True)
    except FileNotFoundError as missing:
        pytest.skip(f"no such command here: {missing.filename}")
    finally:
        if device:
            subprocess.run(["losetup", "--detach", device], check=True)

"""Shared by the contract tests: one engine for each backend, memory, real files, and a gate.

A gate is an operation that is running until the test opens it, however long the machine takes for anything: others are submitted
behind it, and are then certain not to have begun. Of an engine with `chaos={"until": gate_fd}` nothing is over before that.
"""

from __future__ import annotations

import os
import subprocess
import threading
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
def gate_pipe() -> Iterator[tuple[int, int]]:
    """What is read, and what is written, by who opens the gate."""
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


@pytest.fixture
def gate_fd(gate_pipe: tuple[int, int]) -> int:
    return gate_pipe[0]


@pytest.fixture
def open_gate(gate_pipe: tuple[int, int]) -> Callable[[], object]:
    return lambda: os.write(gate_pipe[1], b"!")


@pytest.fixture
def open_gate_later(open_gate: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Opens it from another thread a little later, for what waits meanwhile. No test needs it to be late enough: where it is not,
    one that should fail may pass."""
    timer = threading.Timer(0.1, open_gate)
    yield timer.start
    timer.cancel()
    if timer.ident is not None:
        timer.join()


@pytest.fixture
def make_engine(backend: str, open_gate: Callable[[], object]) -> Iterator[Callable[..., _C.Engine]]:
    """Engines of the backend under test, closed at the end, which waits for what is behind the gate."""
    engines: list[_C.Engine] = []

    def make(**options: object) -> _C.Engine:
        engine = _C.Engine(backend=backend, **options)  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    yield make
    open_gate()
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
def gate(tmp_path: Path, gate_fd: int, open_gate: Callable[[], object]) -> Iterator[_C.Ticket]:
    """An operation, of an engine of its own, that is over when the gate is open."""
    path = tmp_path / "gate"
    path.write_bytes(bytes(PAGE))
    arena = _C.Arena(PAGE, lock=False, huge_pages=False)
    file = _C.File(path, direct=False)
    engine = _C.Engine(backend="threads", depth=1, chaos={"until": gate_fd})
    yield engine.read(file, 0, arena.address, PAGE)
    open_gate()
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

"""Signals, forks, exits and leaks: what the engine owes to the process that it lives in."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.leaks import live_threads

from swapper import _C

BACKENDS = ["uring", "aio", "threads", "chaos"]
MIB = 1 << 20
PAGE = 4096

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

# Begins operations of small pieces, one at a time, each behind the last. Of none is anything over before `other_end` is closed, and
# all of them take hours after that.
ENDLESS = """
import os, signal, sys
from swapper import _C
import swapper.errors
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
backend, directory = sys.argv[1:3]
arena = _C.Arena(64 << 20, lock=False, huge_pages=False)
path = os.path.join(directory, "file")
with open(path, "wb") as stream:
    stream.truncate(64 << 20)
file = _C.File(path, direct=False)
gate, other_end = os.pipe()
engine = _C.Engine(backend=backend, depth=1, piece_bytes=4096, chaos={"until": gate})
ticket = None
for _ in range(4000):
    ticket = engine.read(file, 0, arena.address, 64 << 20, after=ticket)
"""


def interrupt(script: str, backend: str, directory: Path) -> tuple[int, str]:
    """Runs ENDLESS and `script`, sends SIGINT from when it says "ready"; gives the exit status and the rest it says."""
    command = [sys.executable, "-c", ENDLESS + textwrap.dedent(script), backend, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while True:  # until it has an effect: the first may come a moment before the wait, and end something else
            process.send_signal(signal.SIGINT)
            try:
                rest, _ = process.communicate(timeout=1)
            except subprocess.TimeoutExpired:
                continue
            return process.returncode, rest


@pytest.mark.parametrize("blocked_in", ["ticket.wait()", "ticket.wait(3600)", "engine.drain()", "engine.close()"])
def test_ctrl_c_ends_a_wait(backend: str, tmp_path: Path, blocked_in: str) -> None:
    script = f"""
        try:
            print("ready", flush=True)
            {blocked_in}
        except KeyboardInterrupt:
            print("interrupted", "done" if ticket.done else "pending", flush=True)
            os._exit(0)
        """
    assert interrupt(script, backend, tmp_path) == (0, "interrupted pending\n")


def test_ctrl_c_ends_a_submission_that_waits_for_room(backend: str, tmp_path: Path) -> None:
    script = """
        try:
            while engine.in_flight < 4097:  # one has begun, and the inbox is full
                engine.read(file, 0, arena.address, 4096, after=ticket)
            print("ready", flush=True)
            engine.read(file, 0, arena.address, 4096, after=ticket)
        except KeyboardInterrupt:
            print("interrupted at", engine.in_flight, flush=True)
            os._exit(0)
        """
    assert interrupt(script, backend, tmp_path) == (0, "interrupted at 4097\n")


def test_ctrl_c_ends_an_exit_that_waits_for_an_engine_left_open(backend: str, tmp_path: Path) -> None:
    script = """
        import atexit
        os.close(other_end)  # what is in flight is waited for all the same
        atexit.register(print, "ready", flush=True)  # runs just before the engine is drained
        """
    returncode, rest = interrupt(script, backend, tmp_path)
    assert rest == ""
    assert returncode in (0, -signal.SIGINT, 130)


def test_other_threads_run_while_one_waits(backend: str, tmp_path: Path, run_python: RunPython) -> None:
    done = run_python(
        ENDLESS
        + textwrap.dedent(
            """
            import threading
            threading.Thread(target=ticket.wait, daemon=True).start()
            threading.Thread(target=engine.drain, daemon=True).start()
            print(sum(range(1000)), flush=True)
            os._exit(0)
            """
        ),
        backend,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "499500\n")


def test_a_forked_child_gets_errors_and_exits_cleanly(backend: str, tmp_path: Path, run_python: RunPython) -> None:
    done = run_python(
        ENDLESS
        + textwrap.dedent(
            """
            import gc, threading
            window = arena.window(1 << 20)
            view = arena.view(0, 4096)
            finished = engine.read(file, 0, 0, 0)
            for thread in (threading.Thread(target=ticket.wait, daemon=True) for _ in range(3)):
                thread.start()
            child = os.fork()
            if child == 0:
                uses = [
                    lambda: engine.read(file, 0, arena.address, 4096),
                    lambda: engine.write(file, 0, 0, 4096),
                    lambda: engine.in_flight,
                    lambda: engine.drain(),
                    lambda: engine.close(),
                    lambda: ticket.wait(),
                    lambda: arena.view(0, 1),
                    lambda: arena.window(4096),
                    lambda: window.map(0, 0, 4096),
                    lambda: window.unmap(0, 4096),
                ]
                for n, use in enumerate(uses):
                    try:
                        use()
                    except swapper.errors.IoError as error:
                        assert "forked child" in error.detail, error
                    else:
                        raise SystemExit(f"use {n} did not raise")
                for memory in (view, window):
                    try:
                        memoryview(memory)
                    except BufferError:
                        continue
                    raise SystemExit("a buffer of memory that is not there")
                assert finished.done and not ticket.done
                fresh = _C.Engine(backend=backend)
                memory = _C.Arena(1 << 20, lock=False)
                assert fresh.read(file, 0, memory.address, 1 << 20).wait()
                del engine, arena, window, view, ticket, finished, uses, use, file
                gc.collect()
                raise SystemExit(0)  # the whole way through the interpreter's end
            _, status = os.waitpid(child, 0)
            print("child", os.waitstatus_to_exitcode(status), "parent", not ticket.done, flush=True)
            os._exit(0)
            """
        ),
        backend,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "child 0 parent True\n"), done.stderr


def test_data_loader_workers_may_be_forked_during_reads(tmp_path: Path, run_python: RunPython) -> None:
    """Memory under direct I/O is shared and not inherited, so a fork in the middle loses no bytes."""
    done = run_python(
        """
        import os, sys
        import torch
        from torch.utils.data import DataLoader
        from swapper import _C
        directory, *backends = sys.argv[1:]
        for backend in backends:
            arena = _C.Arena(16 << 20, lock=False)
            engine = _C.Engine(backend=backend, arena=arena)
            file = _C.File(os.path.join(directory, backend), create=True)
            memory = torch.frombuffer(arena.view(0, 16 << 20), dtype=torch.uint8)
            memory[: 8 << 20].random_()
            engine.write(file, 0, arena.address, 8 << 20).wait()
            for _ in range(2):
                memory[8 << 20 :].zero_()
                tickets = [engine.read(file, n << 20, arena.address + (8 + n << 20), 1 << 20) for n in range(8)]
                loader = DataLoader(range(64), batch_size=8, num_workers=2, multiprocessing_context="fork")
                assert sum(int(batch.sum()) for batch in loader) == 2016
                for ticket in tickets:
                    ticket.wait()
                assert torch.equal(memory[: 8 << 20], memory[8 << 20 :])
            print(backend, "ok", flush=True)
        """,
        tmp_path,
        *BACKENDS,
    )
    assert (done.returncode, done.stdout) == (0, "".join(f"{backend} ok\n" for backend in BACKENDS)), done.stderr


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "del arena", "keep = [arena, keep_cycle]"])
def test_an_engine_left_open_finishes_its_writes_at_exit(
    backend: str, tmp_path: Path, run_python: RunPython, ending: str
) -> None:
    done = run_python(
        f"""
        import os, sys
        from swapper import _C
        backend, directory = sys.argv[1:]
        arena = _C.Arena(8 << 20, lock=False)
        memoryview(arena.view(0, arena.nbytes))[:] = b"x" * arena.nbytes
        keep_cycle = []
        keep_cycle.append(keep_cycle)
        address = arena.address
        view = arena.view(0, 1)
        engine = _C.Engine(backend=backend, piece_bytes=4096)
        file = _C.File(os.path.join(directory, "file"), create=True)
        tickets = [engine.write(file, n << 20, address + (n << 20), 1 << 20, checksum=True) for n in range(8)]
        {ending}
        """,
        backend,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "file").read_bytes() == b"x" * (8 * MIB)


def test_a_dropped_engine_finishes_its_operations(
    backend: str, arena: _C.Arena, make_file: Callable[..., _C.File]
) -> None:
    engine = _C.Engine(backend=backend, piece_bytes=PAGE)
    file = make_file(4 * MIB)
    tickets = [engine.read(file, 0, arena.address, 4 * MIB) for _ in range(8)]
    del engine
    gc.collect()
    assert all(ticket.done and ticket.error is None for ticket in tickets)


@pytest.mark.parametrize("first", ["engine", "file", "arena"])
def test_things_may_be_closed_in_any_order(backend: str, tmp_path: Path, first: str) -> None:
    arena = _C.Arena(4 * MIB)
    engine = _C.Engine(backend=backend, arena=arena)
    file = _C.File(tmp_path / "file", create=True)
    ticket = engine.write(file, 0, arena.address, 4 * MIB, checksum=True)
    things = {"engine": engine, "file": file, "arena": arena}
    things.pop(first).close()
    for thing in things.values():
        thing.close()
    assert ticket.done
    assert ticket.error is None
    assert (tmp_path / "file").stat().st_size == 4 * MIB


def test_nothing_is_leaked(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def threads() -> int:
        return sum(name.startswith("swapper-") for name in live_threads())  # others come and go: pytest's timers

    def once(backend: str) -> None:
        arena = _C.Arena(4 * MIB)
        engine = _C.Engine(backend=backend, arena=arena)
        file = _C.File(tmp_path / f"{backend}-{os.urandom(4).hex()}", create=True)
        window = arena.window(MIB)
        window.map(0, 0, MIB)
        engine.write(file, 0, window.address, MIB, checksum=True).wait()
        failed = engine.read(file, 8 * MIB, window.address, MIB)
        engine.read(file, 0, window.address, MIB, after=failed)
        engine.drain()
        assert failed.error is not None
        engine.close()

    for backend in BACKENDS:
        once(backend)
    gc.collect()
    before = descriptors(), threads()
    for _ in range(20):
        for backend in BACKENDS:
            once(backend)
    gc.collect()
    assert (descriptors(), threads()) == before

"""Processes that tests start: for what may crash, hang, fork or be interrupted."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

LONG_S = 200
"""Nothing here takes this long, on the slowest machine: what does hangs."""


def environment() -> dict[str, str]:
    """Return an environment in which the tests' own modules can be imported."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONFAULTHANDLER": "1"}


class Warm:
    """Runs Python programs, one at a time, by a process that forks them: see warm.py."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "e2e.warm", str(theirs.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment(), start_new_session=True, stdin=subprocess.DEVNULL
        )
        theirs.close()
        atexit.register(process.wait)
        atexit.register(self._channel.close)  # first: without it the process ends

    def start(self, arguments: list[str], variables: dict[str, str], files: list[int]) -> int:
        """Start a process that has `files` for input, output and errors. Returns its number."""
        order = json.dumps({"arguments": arguments, "variables": variables})
        socket.send_fds(self._channel, [order.encode()], files)
        return int(self._channel.recv(64))

    def has_ended(self) -> bool:
        return bool(select.select([self._channel], [], [], 0)[0])

    def wait(self) -> int:
        """Wait for the end of the process. Returns its exit code."""
        return int(self._channel.recv(64))


_warm = functools.cache(Warm)


class Started:
    """A process that runs. `stdin`, `stdout` and `stderr` are pipes."""

    def __init__(self, arguments: list[str], variables: dict[str, str]) -> None:
        pipes = [os.pipe() for _ in range(3)]
        ends = [(read, write) if number == 0 else (write, read) for number, (read, write) in enumerate(pipes)]
        self.stdin: IO[str] = os.fdopen(ends[0][1], "w")
        self.stdout: IO[str] = os.fdopen(ends[1][1])
        self.stderr: IO[str] = os.fdopen(ends[2][1])
        self.pid = _warm().start(arguments, variables, [theirs for theirs, _ in ends])
        for theirs, _ in ends:
            os.close(theirs)
        self._code: int | None = None
        self._stopper = threading.Timer(LONG_S, self.send_signal, [signal.SIGKILL])
        self._stopper.start()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def is_running(self) -> bool:
        return not _warm().has_ended()

    def wait(self) -> int:
        """Wait for its end. Returns its exit code: below 0, the signal that has killed it."""
        if self._code is None:
            self._code = _warm().wait()
            self._stopper.cancel()
        return self._code

    def end(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                self.send_signal(signal.SIGKILL)
            self.wait()
        for pipe in (self.stdout, self.stderr, self.stdin):
            with contextlib.suppress(BrokenPipeError):  # of what it has not read
                pipe.close()


@contextlib.contextmanager
def started_python(*arguments: object, **variables: str) -> Iterator[Started]:
    """Start Python with `arguments`, and with `variables` in its environment; it ends with the block at the latest."""
    process = Started([*map(str, arguments)], variables)
    try:
        yield process
    finally:
        process.end()


def run_python(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments`, and with `variables` in its environment, to its end."""
    command = [*map(str, arguments)]
    with (
        Path(os.devnull).open() as nothing,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        child = _warm().start(command, variables, [file.fileno() for file in (nothing, output, errors)])
        stopper = threading.Timer(LONG_S, os.kill, (child, signal.SIGKILL))
        stopper.start()
        code = _warm().wait()
        stopper.cancel()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, output.read(), errors.read())

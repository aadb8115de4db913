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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import durations

from swapper.errors import StateError

LONG_S = 200
"""Nothing here takes this long, on the slowest machine: what does hangs."""


def environment() -> dict[str, str]:
    """Return an environment in which the tests' own modules can be imported."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONFAULTHANDLER": "1"}


def killed_at_step(step: int, then: str) -> str:
    """Return a script that runs the code `then`, and kills itself when a Trainer in it has taken this step."""
    return f"""
import os, runpy, signal, sys
from transformers import TrainerState

counted = TrainerState.__setattr__
def count(self, name, value):
    counted(self, name, value)
    if name == "global_step" and value == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
TrainerState.__setattr__ = count
{then}
"""


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
        return int(self._answer())

    def has_ended(self) -> bool:
        return bool(select.select([self._channel], [], [], 0)[0])

    def wait(self) -> int:
        """Wait for the end of the process. Returns its exit code."""
        code, cpu_s = self._answer().split()
        durations.add_cpu_s(float(cpu_s))
        return int(code)

    def _answer(self) -> bytes:
        answer = self._channel.recv(64)
        assert answer, "the process that forks those of tests has ended: what it said is above"
        return answer


_materialize = functools.cache(Warm)


class Forked:
    """A process that runs Python with `arguments`, for LONG_S at most. `files`: its input, output and errors."""

    def __init__(self, arguments: Sequence[object], variables: dict[str, str], files: list[int]) -> None:
        self.pid = _materialize().start([*map(str, arguments)], variables, files)
        self._code: int | None = None
        self._stopper = threading.Timer(LONG_S, self.send_signal, [signal.SIGKILL])
        self._stopper.start()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def is_running(self) -> bool:
        return self._code is None and not _materialize().has_ended()

    def wait(self) -> int:
        """Wait for its end. Returns its exit code: below 0, the signal that has killed it."""
        if self._code is None:
            self._code = _materialize().wait()
            self._stopper.cancel()
        return self._code


class Started(Forked):
    """One that goes on meanwhile. `stdin`, `stdout` and `stderr` are pipes."""

    def __init__(self, arguments: Sequence[object], variables: dict[str, str]) -> None:
        its_input, stdin = os.pipe()
        stdout, its_output = os.pipe()
        stderr, its_errors = os.pipe()
        self.stdin: IO[str] = os.fdopen(stdin, "w")
        self.stdout: IO[str] = os.fdopen(stdout)
        self.stderr: IO[str] = os.fdopen(stderr)
        theirs = [its_input, its_output, its_errors]
        super().__init__(arguments, variables, theirs)
        for file in theirs:
            os.close(file)

    def end(self) -> None:
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):
                self.send_signal(signal.SIGKILL)
        self.wait()
        for pipe in (self.stdout, self.stderr, self.stdin):
            with contextlib.suppress(BrokenPipeError):  # of what it has not read
                pipe.close()


@contextlib.contextmanager
def started_python(*arguments: object, **variables: str) -> Iterator[Started]:
    """Start Python with `arguments`, and with `variables` in its environment; it ends with the block at the latest."""
    process = Started(arguments, variables)
    try:
        yield process
    finally:
        process.end()


def run_python(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments`, and with `variables` in its environment, to its end."""
    with (
        Path(os.devnull).open() as nothing,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        code = Forked(arguments, variables, [file.fileno() for file in (nothing, output, errors)]).wait()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess([*arguments], code, output.read(), errors.read())


def is_refused_in_a_fork(act: Callable[[], object]) -> bool:
    """Return True if `act` raises a StateError in a forked child."""
    child = os.fork()
    if child == 0:
        try:
            act()
        except StateError:
            os._exit(7)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

"""Processes that tests start: for what may crash, hang, fork or be interrupted."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

LONG_S = 200
"""Nothing here takes this long, on the slowest machine: what does hangs."""


def environment() -> dict[str, str]:
    """Return an environment in which the tests' own modules can be imported."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONFAULTHANDLER": "1"}


class Warm:
    """Runs Python programs by a process that forks them: see warm.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "e2e.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        atexit.register(self._process.communicate)  # without input it ends

    def run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
            print(
                json.dumps({"arguments": arguments, "output": output.name, "errors": errors.name}), file=process.stdin
            )
            process.stdin.flush()
            child = int(process.stdout.readline())
            stopper = threading.Timer(LONG_S, os.kill, (child, signal.SIGKILL))
            stopper.start()
            status = int(process.stdout.readline())
            stopper.cancel()
            return subprocess.CompletedProcess(arguments, status, output.read(), errors.read())


_warm = functools.cache(Warm)


def run_python(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments` to its end."""
    return _warm().run([*map(str, arguments)])

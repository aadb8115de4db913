"""Runs a command with a deadline and kills it with all its children. Its output goes to a file, which nobody can block."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


def run_bounded(
    command: Sequence[str],
    output: IO[str],
    timeout_s: float,
    environment: Mapping[str, str],
    directory: Path | None = None,
) -> int | None:
    """Run the command and return its exit status; None if it took longer."""
    running = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=dict(environment),
        cwd=directory,
        start_new_session=True,
    )
    try:
        return running.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # mostly none is left
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()

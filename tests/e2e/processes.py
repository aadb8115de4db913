"""Processes that tests start: for what may crash, hang, fork or be interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LONG_S = 200
"""Nothing here takes this long, on the slowest machine: what does hangs."""


def environment() -> dict[str, str]:
    """Return an environment in which the tests' own modules can be imported."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONFAULTHANDLER": "1"}


def run_python(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments` to its end."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=LONG_S, check=False)

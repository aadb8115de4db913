"""Builds swapper from this checkout into a separate directory, without a network and without changing this Python.

A virtual environment would not work: made inside of another one it does not see that one's packages, and torch is
mostly in one.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from gpu.bounded import run_bounded

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("torch", "triton", "pytest", "nanobind", "scikit_build_core", "numpy", "psutil", "rich", "typer")
"""The last ones are swapper's own imports: pip must not search for packages, since there may be no network."""


def install(prefix: Path, timeout_s: float) -> str:
    """Build and install into `prefix`, replacing its contents. Return the error, or ""."""
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--upgrade", "--disable-pip-version-check", "-q"]
    build = f"--config-settings=build-dir={prefix}-build"
    command = [sys.executable, "-m", "pip", "install", *options, build, "--target", str(prefix), str(ROOT)]
    environment = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
    with tempfile.TemporaryFile("w+") as output:
        status = run_bounded(command, output, timeout_s, environment)
        output.seek(0)
        told = output.read()
    return "" if status == 0 else f"building took longer than {timeout_s:.0f} s" if status is None else told


def environment_with(prefix: Path | None) -> dict[str, str]:
    """Return an environment for processes that import swapper from `prefix`."""
    if prefix is None:
        return dict(os.environ)
    paths = [str(prefix), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def missing() -> list[str]:
    """Return the names of missing required modules."""
    from importlib.util import find_spec

    return [name for name in NEEDED if find_spec(name) is None]

"""Each program of the repository explains itself: `--help` prints what it does, and does nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tools", "csrc/tests", ".ci")


def programs() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-s", *FOLDERS], cwd=ROOT, capture_output=True, text=True)
    return [line.split("\t")[1] for line in listed.stdout.splitlines() if line.startswith("100755")]


@pytest.mark.parametrize("program", programs())
def test_help_is_printed_by_any_python(program: str) -> None:
    """Programs in Python enter the project's environment by themselves, so the caller's interpreter does not matter."""
    if not (ROOT / ".venv").is_dir():
        pytest.skip("tools/setup has made no .venv here")
    path = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nowhere"}
    done = subprocess.run([ROOT / program, "--help"], cwd="/", capture_output=True, text=True, timeout=100, env=path)
    assert done.returncode == 0 and done.stderr == "", done.stderr[-3000:]
    assert len(done.stdout.splitlines()) > 1 and "Traceback" not in done.stdout

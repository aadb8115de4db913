"""Limits of open files, addresses and threads: whatever fails in them, the error is ours and names the limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bad_input.limits_run import USES

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("limit", "option"), [("files", "ulimit -n"), ("addresses", "ulimit -v"), ("threads", "ulimit -u")]
)
def test_a_limit_that_is_reached_is_named(limit: str, option: str) -> None:
    if limit == "threads" and os.geteuid():
        pytest.skip("the limit of threads is a user's: only root can be a user who runs nothing else")
    variables = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "bad_input.limits_run", limit],
        env=variables, cwd=TESTS, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    failed = [line for line in lines if not line.endswith(" OK")]
    assert done.returncode == 0 and failed, done.stderr[-2000:]
    assert [line for line in failed if option not in line or " ours " not in line] == []
    for use in USES:
        assert [line for line in lines if line.startswith(use)][-1].endswith(" OK"), lines

"""One architecture within its budget and one working set; all of them by tools/test_memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

COMMAND = Path(__file__).resolve().parents[2] / "tools" / "test_memory"
NOT_PERMITTED = 77


def test_training_stays_within_its_budget_and_one_working_set(tmp_path: Path) -> None:
    command = [str(COMMAND), "--only", "Llama", "--width", "384", "--layers", "4", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == NOT_PERMITTED:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr

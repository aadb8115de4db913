"""Another process takes the device's memory in the middle of a run: an error says so, and the step can be taken again.

Only where torch's CUDA build runs on the stand-in (tools/test_cuda): on a GPU other tests run at the same time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).parent / "taken_memory.py"


@pytest.mark.parametrize("moment", ["forward", "backward", "update"])
@pytest.mark.parametrize("state", ["host", "device"])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_the_step_can_be_taken_again_with_the_same_losses(tmp_path: Path, update: str, state: str, moment: str) -> None:
    if "STAND_IN_DEVICES" not in os.environ:
        pytest.skip("this CUDA device is not the stand-in of tools/test_cuda")
    command = [sys.executable, PROGRAM, update, state, moment, tmp_path]
    environment = {**os.environ, "STAND_IN_MEMORY": str(96 << 20), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    *errors, result = ran.stdout.splitlines()
    assert result == "equal"
    assert len(errors) == (0 if moment == "update" else 1), "what an update needs is there when the backward is over"
    assert all("out of memory" in error for error in errors)

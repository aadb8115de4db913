"""A CUDA device that fails for good in the middle of something: it is named, nothing hangs, and the process ends.

Only where torch's CUDA build runs on the stand-in (tools/test_cuda): a GPU cannot be had to fail.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).parent / "lost_device.py"


@pytest.fixture(autouse=True)
def needs_the_stand_in() -> None:
    try:
        runtime = ctypes.CDLL("libcudart.so.13")  # which torch has loaded
    except OSError:
        runtime = None
    if not hasattr(runtime, "stand_in_lose_device_at_copy"):
        pytest.skip("this CUDA device is not the stand-in of tools/test_cuda")


@pytest.mark.parametrize("copies", [0, 3, 11])
@pytest.mark.parametrize(
    "kind",
    [
        *("infer", "save_activations", "transfer", "save"),
        *("train-step-cpu", "train-step-device", "train-deferred-cpu", "train-deferred-device"),
        *("train-backward-cpu", "train-backward-device"),
    ],
)
def test_it_is_named_and_nothing_hangs(tmp_path: Path, kind: str, copies: int) -> None:
    command = [sys.executable, PROGRAM, kind, str(copies), tmp_path]
    environment = {**os.environ, "STAND_IN_DELAY_US": "300"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    told = ran.stdout.splitlines()
    assert told, "nothing failed"
    # The last is torch's: one of its own kernels met the error first. A step that had begun names what ended it.
    named = (
        r"DeviceError cuda:0 failed at ",
        r"CheckpointError ",
        r"StateError step \d+ failed half-way \(cuda:0 failed at ",
        r"AcceleratorError ",
    )
    for line in told:
        assert re.match("|".join(named), line) and "CUDA error: unspecified launch failure" in line, line
    if kind in ("transfer", "save"):
        assert "AcceleratorError" not in ran.stdout, "none of torch's kernels was to run"

"""The memory that may still be taken is what the system and a control group around the process say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from swapper.runtime.free_memory import headroom_bytes, read_kernel

CAPPED = Path(__file__).resolve().parents[2] / "tools" / "capped"
NOT_PERMITTED = 77
ASK = "import sys; from swapper.runtime.free_memory import headroom_bytes; print(headroom_bytes()); sys.stdout.flush()"


def test_no_more_than_the_system_has():
    total_kb = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0])
    assert 0 < headroom_bytes() < total_kb << 10


def test_no_more_than_a_control_group_leaves(tmp_path):
    limit = 200 << 20
    capped = [sys.executable, str(CAPPED), "--memory", str(limit), "--directory", str(tmp_path), "--", sys.executable]
    done = subprocess.run([*capped, "-c", ASK], capture_output=True, text=True, timeout=120)
    if done.returncode == NOT_PERMITTED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert limit // 2 < int(done.stdout.split()[0]) < limit


@pytest.mark.whole
@pytest.mark.parametrize("path", ["/proc/meminfo", "/proc/self/cgroup", "/proc/self/smaps_rollup"])
def test_the_kernels_files_are_read_whole(path):
    if not Path(path).exists():
        pytest.skip(f"no {path} here")
    assert len(read_kernel(path).splitlines()) == len(Path(path).read_bytes().splitlines())

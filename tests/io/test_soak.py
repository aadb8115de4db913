"""The short form of tools/soak_io: no leak, every byte accounted for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parents[2] / "tools" / "soak_io"


def test_a_soak_of_four_seconds_leaks_nothing_and_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(SOAK), str(tmp_path), "--minutes", str(4 / 60), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    figures = json.loads(done.stdout)
    assert figures["problems"] == []
    assert figures["operations"] > 0 and figures["bytes"] > 0 and figures["handles"] > 0
    assert list(tmp_path.iterdir()) == []

"""tools/bench_codec measures the codecs that there are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from swapper.codecs import CODECS

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_codec"


def test_the_benchmark_of_the_codecs_runs(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, TOOL, "--elements", "70000", "--rounds", "1", "--isa", "baseline", "--json", file]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(file.read_text())
    assert [row["codec"] for row in figures["codecs"]] == list(CODECS)
    assert all(row["encode"] > 0 and row["decode"] > 0 for row in figures["codecs"])
    assert {row["threads"] for row in figures["adamw"]} == {1, 2}
    assert all(row["G/s"] > 0 for row in figures["adamw"])
    assert "moment8" in ran.stdout

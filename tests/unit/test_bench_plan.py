"""tools/bench_plan has the combinations that it must, runs one, and goes on where a file of figures ends."""

from __future__ import annotations

import json
import mmap
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swapper.bench import measure
from swapper.bench.measure import own_bytes, pss_bytes
from swapper.io.engines import PAGES_DEPTH

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_plan"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(TOOL.parent))
    return runpy.run_path(str(TOOL))


def test_the_rows_cover_sizes_caps_placements_updates_codecs_and_inference(tool: dict[str, Any]) -> None:
    rows = tool["ROWS"]
    assert len(rows) >= 24 and len({row.name for row in rows}) == len(rows)
    assert {row.size for row in rows} == {"20M", "60M", "168M"} and {row.cap for row in rows} == {200, 500, None}
    assert {row.update for row in rows} == {"step", "deferred", "backward"}
    assert {row.placement for row in rows} == {"state", "all", "infer"}
    assert {"exact", "8bit", "bf16", "int8", "int4"} <= {row.codec for row in rows}


def test_the_drive_is_measured_as_a_session_uses_it(
    tool: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[str, int, int]] = []
    measured = measure.measure_engine

    def noting(pattern: measure.Pattern, *others: Any) -> measure.Speed:
        used.append((pattern.kind, pattern.depth, pattern.memory_bytes))
        return measured(replace(pattern, duration_s=0.01), *others)

    monkeypatch.setattr(measure, "measure_engine", noting)
    tool["own_rates"].__globals__.update(FILE_BYTES=16 << 20, BUSY_S=0.05)
    rates = tool["own_rates"](tmp_path)
    assert used == [(kind, PAGES_DEPTH, measure.POOL_BYTES) for kind in ("read", "write", "both", "both")]
    assert min(rates.read, rates.write, rates.both, rates.busy) > 0


@pytest.mark.parametrize(("cap", "runs"), [(None, 3), (500, 1)])
def test_of_a_row_without_a_cap_the_run_with_the_median_error_counts(
    tool: dict[str, Any], cap: int | None, runs: int
) -> None:
    answers = iter([1.3, 0.9, 1.1])

    def run(*_: Any) -> dict[str, float]:
        return {"predicted_s": next(answers), "measured_s": 1.0}

    tool["measure_row"].__globals__["in_process"] = run
    options = tool["parse_arguments"]([])
    options.own = "{}"
    found = tool["measure_row"](next(row for row in tool["ROWS"] if row.cap == cap), options)
    assert len(found["errors"]) == runs
    assert found["predicted_s"] == (1.1 if runs == 3 else 1.3)


def test_a_row_is_predicted_and_measured_and_not_run_again(tool: dict[str, Any], tmp_path: Path) -> None:
    figures = tmp_path / "rows.json"
    name = next(row.name for row in tool["ROWS"] if row.size == "20M" and row.cap is None)
    command = [sys.executable, TOOL, "--rows", name, "--runs", "1", "--directory", tmp_path, "--json", figures]
    for more in ([], ["--markdown"]):
        ran = subprocess.run([*command, *more], capture_output=True, text=True, timeout=400, check=False)
        assert ran.returncode == 0, ran.stderr
        assert name in ran.stdout and "bytes: median error" in ran.stdout
    assert f"| {name} | " in ran.stdout
    (row,) = json.loads(figures.read_text())
    assert "1 of 1" not in ran.stderr and row["row"] == name
    assert tool["error"](row, "bytes") == pytest.approx(
        0, abs=0.15
    )  # the pool keeps what it can: which, depends on the time


@pytest.mark.parametrize(
    "measure, tolerance", [(own_bytes, 0.1), (pss_bytes, 0.5)]
)  # shares of libraries change meanwhile
def test_memory_counts_what_a_memory_file_takes_in_no_map_too(measure: Callable[[], int], tolerance: float) -> None:
    nbytes = 64 << 20
    before = measure()
    file = os.memfd_create("trial")
    try:
        os.posix_fallocate(file, 0, nbytes)
        assert measure() - before == pytest.approx(nbytes, rel=tolerance)
        with mmap.mmap(file, nbytes) as memory:
            for at in range(0, nbytes // 2, mmap.PAGESIZE):  # in a map now: once all the same
                memory[at] = 1
            assert measure() - before == pytest.approx(nbytes, rel=tolerance)
    finally:
        os.close(file)


def test_a_row_is_predicted_again_from_what_it_has(tool: dict[str, Any]) -> None:
    row = next(row for row in tool["ROWS"] if row.size == "20M" and row.cap == 500 and row.placement == "all")
    groups = {str(group): 1e-3 for group in range(64)}
    compute = {
        "forward_s": groups, "backward_s": groups, "update_s": dict.fromkeys(groups, 1e-9),
        "paging": {"mapped_byte_s": 5e-11, "checked_byte_s": 2e-11},
    }  # fmt: skip
    drive = {"read": 2e9, "write": 3e9, "both": 3e9, "busy": 3e9, "cap": 5e8}
    found = tool["replay"]({"row": row.name, "compute": compute, "drive": drive, "measured_s": 0.25})
    assert 0.1 < found["predicted_s"] < 1 and found["predicted_bytes"] > 100e6
    slower = tool["replay"]({"row": row.name, "compute": compute, "drive": {**drive, "cap": 1e8}, "measured_s": 0.25})
    assert slower["predicted_s"] > 2 * found["predicted_s"]

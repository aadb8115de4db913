"""tools/gpu_check, rehearsed on a CPU: every measurement's code runs before it meets a GPU, and none takes another with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TOOL = Path(__file__).parents[2] / "tools" / "gpu_check"


def gpu_check(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TOOL, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, env={**os.environ, **environment}, check=False
    )


def test_without_a_device_it_says_so_and_exits_with_a_code_of_its_own() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    ran = gpu_check()
    assert (ran.returncode, "there is no CUDA device" in ran.stdout) == (3, True), ran.stderr


def test_a_rehearsal_gives_every_figure_marked_as_one(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    out = tmp_path / "out"
    out.mkdir()
    ran = gpu_check("--rehearse", "--no-build", "--directory", tmp_path, "--json", tmp_path / "x.json", OUT=str(out))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report: dict[str, Any] = json.loads((tmp_path / "x.json").read_text())
    assert report == json.loads((out / "gpu_check.json").read_text())
    assert report["rehearsal"] and "REHEARSAL" in ran.stdout and "MET" not in ran.stdout
    assert {"GPU", "CPU", "drive", "versions"} <= set(report["hardware"])
    if torch.cuda.is_available():
        return  # what is skipped and what cannot be measured is another matter there
    status = {row["figure"]: row["status"] for row in report["rows"]}
    unmeasured = {figure for figure, found in status.items() if found != "rehearsed"}
    assert unmeasured == {"drive -> device, GdsHandle", "device -> drive, GdsHandle"}
    assert {status[figure] for figure in unmeasured} == {"open"} and len(status) == 42
    tests = next(row for row in report["rows"] if row["figure"] == "tests that need a GPU")
    assert "skipped" in tests["number"]
    assert sorted(tmp_path.iterdir()) == [out, tmp_path / "x.json"], "something was left on the drive"


def test_a_measurement_that_fails_is_told_and_costs_no_other(tmp_path: Path) -> None:
    stub = tmp_path / "triton"
    stub.mkdir()
    (stub / "__init__.py").write_text("raise ImportError('not on this machine', name='triton')")
    ran = gpu_check(
        *("--rehearse", "--no-build", "--directory", tmp_path, "--only", "norm", "copies"), PYTHONPATH=str(tmp_path)
    )
    assert ran.returncode == 1
    assert "gradient norm and overflow: FAILED: swapper.errors.UnsupportedError" in ran.stdout
    assert "arena -> device: " in ran.stdout and "1 FAILED" in ran.stdout


def test_what_is_missing_is_named_before_anything_is_built(tmp_path: Path) -> None:
    """A Python without torch, and one with torch that lacks what swapper imports."""
    bare = subprocess.run([sys.executable, "-S", TOOL], capture_output=True, text=True, timeout=60, check=False)
    assert (bare.returncode, "has no torch" in bare.stderr) == (2, True), bare.stderr
    hiding = tmp_path / "sitecustomize.py"
    hiding.write_text(
        "import importlib.util as u\nfind = u.find_spec\nu.find_spec = lambda n, *a: None if n == 'rich' else find(n, *a)\n"
    )
    ran = gpu_check("--rehearse", PYTHONPATH=str(tmp_path))
    assert (ran.returncode, "has no rich" in ran.stderr) == (2, True), ran.stdout + ran.stderr


def test_a_name_that_is_none_is_refused() -> None:
    ran = gpu_check("--rehearse", "--no-build", "--only", "copy")
    assert ran.returncode == 1 and "copies" in ran.stderr


def test_what_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOL.parent))
    from gpu.bounded import run_bounded

    with (tmp_path / "told").open("w+") as output:
        assert run_bounded(["sh", "-c", "sleep 1000 & echo $!; wait"], output, 1, os.environ) is None
        output.seek(0)
        started = Path(f"/proc/{int(output.read())}/stat")
        assert not started.exists() or ") Z " in started.read_text()  # nobody may have taken note of its end
        assert run_bounded(["sh", "-c", "exit 3"], output, 60, os.environ) == 3

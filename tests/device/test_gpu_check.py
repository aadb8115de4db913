"""tools/gpu_check, rehearsed on a CPU: every measurement's code runs before it meets a GPU, and none takes another with it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from contextlib import suppress
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


def test_a_rehearsal_gives_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All measurements in one process, which the tool would give one each."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.syspath_prepend(str(TOOL.parent))
    from gpu.bench import is_of
    from gpu.figures import FIGURES

    drive, known = tmp_path / "drive", tmp_path / "known"
    drive.mkdir(), known.mkdir()
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "GPU_CHECK_KNOWN": str(known)}
    ran = gpu_check("--rehearse", "--directory", drive, "--measure", *FIGURES, **environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    promised = [name for figures in FIGURES.values() for name in figures.names]
    assert len(rows) == len(promised)
    assert all(any(is_of(row["figure"], name) for row in rows) for name in promised)
    assert not [row for row in rows if not row["number"] and not row["is_open"]]
    assert not [row for row in rows if row["is_equal"] is False]
    assert len([row for row in rows if row["is_equal"]]) > 15
    if not torch.cuda.is_available():  # what cannot be measured is another matter there
        unmeasured = {
            row["figure"]: row["is_open"] for row in rows if not row["number"] and "not installed" not in row["reason"]
        }
        assert unmeasured == {"drive -> device, GdsHandle": True, "device -> drive, GdsHandle": True}
    assert {path.name for path in known.iterdir()} == {
        f"plain-{of}.json" for of in ("False-None", "True-None", "False-2")
    }
    assert list(drive.iterdir()) == [], "something was left on the drive"


FAILING = """
import sys
from functools import partial
from pathlib import Path

sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent / "tests")]
from gpu.bench import Bench, Row, each, is_of
from gpu.figures import FIGURES

made, bad = Row.__init__, [figures.names[0] for figures in FIGURES.values()]


def fail(self, figure, *of, **options):
    made(self, figure, *of, **options)
    if self.number and any(is_of(figure, name) for name in bad):
        raise RuntimeError("as asked for")


Row.__init__ = fail
bench = Bench(Path(sys.argv[2]), is_rehearsal=True)
for figures in FIGURES.values():
    for row in each((figures.names, partial(figures.measure, bench))):
        print(f"{row.figure}\t{'open' if row.is_open else row.number or row.reason}")
"""


def test_a_row_that_fails_loses_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of each measurement, when it has been measured."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.syspath_prepend(str(TOOL.parent))
    from gpu.bench import is_of
    from gpu.figures import FIGURES

    command = [sys.executable, "-c", FAILING, str(TOOL.parent), str(tmp_path)]
    (tmp_path / "known").mkdir()
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "GPU_CHECK_KNOWN": str(tmp_path / "known")}
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=os.environ | environment, check=False
    )
    assert ran.returncode == 0, ran.stderr
    told = dict(line.split("\t") for line in ran.stdout.splitlines() if "\t" in line)
    for figures in FIGURES.values():
        for number, name in enumerate(figures.names):
            [figure] = [figure for figure in told if is_of(figure, name)]
            result = told.pop(figure)
            assert result == "open" or (result == "RuntimeError: as asked for") == (number == 0), (figure, result)
    assert told == {}


def test_a_rehearsal_runs_the_tests_and_reports_every_row_marked_as_one(tmp_path: Path) -> None:
    """And a measurement that fails is told, and costs no other; nor does what a library prints, as cuFile does."""
    stub, out, drive = tmp_path / "triton", tmp_path / "out", tmp_path / "drive"
    for directory in (stub, out, drive):
        directory.mkdir()
    (stub / "__init__.py").write_text(
        "import os, sys\n"
        "if '--measure' in sys.argv: os.write(1, b'words of a library\\n')\n"
        "raise ImportError('not on this machine', name='triton')"
    )
    ran = gpu_check(
        *("--rehearse", "--no-build", "--directory", drive, "--json", tmp_path / "x.json"),
        *("--only", "tests", "quantised", "copies"),
        PYTHONPATH=str(tmp_path),
        OUT=str(out),
    )
    assert ran.returncode == 1
    assert "quantise 8 bits: FAILED: UnsupportedError" in ran.stdout
    assert "arena -> device: " in ran.stdout and "4 FAILED" in ran.stdout
    assert "words of a library" not in ran.stdout
    report: dict[str, Any] = json.loads((tmp_path / "x.json").read_text())
    assert report == json.loads((out / "gpu_check.json").read_text())
    assert report["rehearsal"] and "REHEARSAL" in ran.stdout and "MET" not in ran.stdout
    assert {"GPU", "CPU", "drive", "versions"} <= set(report["hardware"])
    status = {row["figure"]: row["status"] for row in report["rows"]}
    tests, *measured = status
    assert (tests, len(measured)) == ("tests that need a GPU", 8)
    assert status == {
        **dict.fromkeys((tests, *measured[4:]), "rehearsed"),
        **dict.fromkeys(measured[:4], "FAILED"),
    }
    if not torch.cuda.is_available():
        assert "skipped" in report["rows"][0]["number"]
    assert list(drive.iterdir()) == [], "something was left on the drive"


def test_a_rehearsal_tells_values_that_are_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times mean nothing; its values do."""
    monkeypatch.syspath_prepend(str(TOOL.parent))
    from gpu.bench import Row
    from gpu.report import Report

    report = Report({}, is_rehearsal=True, path=None)
    for is_equal in (True, None, False):
        report.add(Row("a figure", "0.9", "0.1", False, is_equal=is_equal))
    assert [row["status"] for row in json.loads(report.json())["rows"]] == ["rehearsed", "rehearsed", "NOT EQUAL"]


def test_what_may_take_longer_than_is_left_is_left_out_and_named(tmp_path: Path) -> None:
    ran = gpu_check(
        *("--rehearse", "--no-build", "--directory", tmp_path, "--json", tmp_path / "x.json"),
        *("--minutes", 0.5, "--only", "tests", "facts", "copies"),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "in this order: tests facts copies" in ran.stdout
    assert "left out for lack of time; the next run: --only tests facts copies" in ran.stdout
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert len(rows) == 9 and {row["status"] for row in rows} == {"open"}
    assert "60 s it may take" in rows[1]["reason"]


def test_who_is_killed_leaves_the_rows_before(tmp_path: Path) -> None:
    command = [sys.executable, TOOL, "--rehearse", "--no-build", "--directory", tmp_path, "--only", "facts", "large"]
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout is not None
        rows = (line for line in running.stdout if line.startswith("  "))
        next(rows), next(rows)
        running.kill()
        told = sum(1 for _ in rows) + 2
    left = json.loads((tmp_path / "gpu_check.json").read_text())["rows"]
    assert told - 1 <= len(left) and left[0]["figure"] == "host memory"


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
        with suppress(ProcessLookupError):  # it is gone already
            started = os.pidfd_open(int(output.read()))
            assert select.select([started], [], [], 60)[0], "what it had started goes on"
            os.close(started)
        assert run_bounded(["sh", "-c", "exit 3"], output, 60, os.environ) == 3

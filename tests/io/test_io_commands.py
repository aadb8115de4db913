"""`swapper doctor`, `bench` and `tune`, and where tune's results are kept."""

from __future__ import annotations

import json
import os
import tempfile
import textwrap
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from handle_bytes import RunPython
from test_bad_input_io import FORBID_IO_URING
from test_deepnvme_failures import REFUSE_LOCKING
from typer.testing import CliRunner

from swapper.bench import measure
from swapper.bench.hardware import measure_read
from swapper.bench.measure import Pattern, Speed, files_for, measure_deepnvme, measure_while_computing
from swapper.cli import app
from swapper.cli.bench import search
from swapper.io.drives import Tuning, find_tuning, keep_tuning, tuning_path

runner = CliRunner()


@pytest.fixture(autouse=True)
def own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_doctor_finds_what_the_engine_needs(tmp_path: Path) -> None:
    done = runner.invoke(app, ["doctor", str(tmp_path), "--json"])
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert done.exit_code == 0
    assert findings["Backends"]["state"] == "good" and "threads: " in findings["Backends"]["found"]
    assert {"Versions", "Locked memory", "Memory", "Directory", "Direct I/O", "Drive", "CUDA"} <= set(findings)
    assert ("Endurance" in findings) is (findings["Drive"]["state"] == "good")
    assert all(finding["remedy"] for finding in findings.values() if finding["state"] == "bad")


def test_doctor_says_what_is_bad(tmp_path: Path) -> None:
    done = runner.invoke(app, ["doctor", str(tmp_path / "missing")])
    assert done.exit_code == 1
    assert "bad" in done.output and "name another" in done.output


def test_doctor_shows_a_table_and_what_to_do_about_a_directory_in_memory() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as there:
        done = runner.invoke(app, ["doctor", there])
        findings = {one["what"]: one for one in json.loads(runner.invoke(app, ["doctor", there, "--json"]).stdout)}
    assert done.exit_code == 0, done.output
    assert "slow" in done.output and "→ name a directory on a drive" in done.output and "\x1b" not in done.output
    assert findings["Directory"] == {
        "what": "Directory",
        "state": "slow",
        "found": f"{there} is memory (tmpfs)",
        "remedy": "name a directory on a drive",
    }
    assert findings["Drive"]["state"] == "slow" and "on no drive of this machine" in findings["Drive"]["found"]


LIMITS = {
    "io_uring": (FORBID_IO_URING, "Backend uring", "in Docker --security-opt seccomp=unconfined"),
    "locking": (textwrap.dedent(REFUSE_LOCKING), "Locked memory", "LimitMEMLOCK=infinity in a systemd unit"),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", LIMITS)
def test_doctor_names_what_a_container_forbids_and_how_to_allow_it(
    name: str, tmp_path: Path, run_python: RunPython
) -> None:
    forbid, what, remedy = LIMITS[name]
    done = run_python(f"{forbid}\nfrom swapper.cli import app\napp(['doctor', {str(tmp_path)!r}, '--json'])")
    assert done.returncode == 0, done.stderr
    found = {one["what"]: one for one in json.loads(done.stdout)}
    assert found[what]["state"] == "slow" and remedy in found[what]["remedy"], found[what]
    assert found["Backends"]["state"] == "good" and "threads: " in found["Backends"]["found"]
    assert name == "locking" or "uring: " not in found["Backends"]["found"]


def test_bench_measures_and_writes_figures(tmp_path: Path) -> None:
    arguments = [
        "bench", str(tmp_path), "--seconds", "0.05", "--file-size", "16MiB", "--sizes", "64KiB", "--depths", "4", "--no-peers",
        "--no-step", "--json", "--chart", str(tmp_path / "chart.html"),
    ]  # fmt: skip
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert [row["kind"] for row in figures["drive"]] == ["read", "write", "both"]
    assert all(row["programs"]["swapper"][0]["bytes_per_s"] > 0 for row in figures["drive"])
    assert "GB/s" in (tmp_path / "chart.html").read_text()
    assert {path.name for path in tmp_path.iterdir()} <= {"chart.html", "config"}, "nothing is left behind"


@pytest.mark.whole
@pytest.mark.parametrize(
    "arguments",
    [["--kinds", "sideways"], ["--sizes", "1000"], ["--depths", "0"], ["--chart", "x.gif"], ["--sizes", "x"]],
)
def test_bench_names_a_wrong_option(tmp_path: Path, arguments: list[str]) -> None:
    done = runner.invoke(app, ["bench", str(tmp_path), "--no-peers", *arguments])
    assert done.exit_code == 2
    assert arguments[0] in done.output


def program(path: Path, text: str) -> str:
    """Make a program of the shell, which stands for another one. Returns its name."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


FIO = """
case "$*" in *--bs=131072*) echo "fio: such blocks it refuses" >&2; exit 1;; esac
echo "fio: a remark before the figures"
echo '{"jobs": ['
for word in "$@"; do
    case $word in --name=*) kind=${word#--name=}; echo "$comma"; comma=,
        echo "{\\"jobname\\": \\"$kind\\", \\"$kind\\": {\\"bw_bytes\\": 250000000}, \\"usr_cpu\\": 5.0, \\"sys_cpu\\": 7.5}";;
    esac
done
echo ']}'
"""
"""Prints what fio does for the jobs that it is asked for, of 250 MB/s each, for an eighth of a processor."""


def test_bench_compares_with_fio_and_goes_on_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin" / "fio", FIO)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    arguments = ["bench", str(tmp_path), "--seconds", "0.05", "--file-size", "16MiB", "--depths", "4", "--no-step"]
    chart = tmp_path / "chart.png"
    done = runner.invoke(app, [*arguments, "--kinds", "both", "--sizes", "64KiB", "--json", "--chart", str(chart)])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["drive"]
    assert row["programs"]["fio"] == [{"bytes_per_s": 5e8, "cpu_s_per_gb": 0.5}]
    assert row["ratio_to_fio"] == row["programs"]["swapper"][0]["bytes_per_s"] / 5e8
    assert chart.read_bytes().startswith(b"\x89PNG")
    shown = runner.invoke(app, [*arguments, "--kinds", "read", "--sizes", "64KiB"]).output
    assert "swapper / fio" in shown and "0.25 (0.500)" in shown
    refused = runner.invoke(app, [*arguments, "--kinds", "read", "--sizes", "128KiB"])
    assert refused.exit_code == 0 and "without fio: fio failed: fio: such blocks it refuses" in refused.output


def test_bench_takes_steps_of_a_small_model_beside_plain_torch(tmp_path: Path) -> None:
    arguments = ["bench", str(tmp_path), "--seconds", "0.05", "--file-size", "16MiB", "--depths", "4", "--no-peers"]
    done = runner.invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["update_per_s"] > 0 and found["step"]["plain_s"] > 0 and found["step"]["wall_s"] > 0
    read, state = found["step"]["read_bytes"], 3 * 4 * found["step"]["parameters"]
    assert 0.5 * state < read < 1.6 * state, "most of the parameters and of AdamW's state are read once or twice a step"
    shown = runner.invoke(app, arguments).output
    assert "billion parameters a second" in shown and "in memory with plain torch" in shown
    assert [path.name for path in tmp_path.iterdir()] in ([], ["config"]), "nothing is left behind"


def test_what_deepnvme_prints_is_its_speed_and_else_its_error_is_named(tmp_path: Path) -> None:
    pattern, paths = Pattern("read", 1 << 16, 4, 1 << 24, 0.05), {"read": tmp_path / "file"}
    found = measure_deepnvme(pattern, paths, program(tmp_path / "good", "echo remark; echo RESULT 2.5e8 0.125"))
    assert (found.bytes_per_s, found.cpu_s_per_gb) == (2.5e8, 0.125)
    with pytest.raises(OSError, match="DeepNVMe failed: no libaio here"):
        measure_deepnvme(pattern, paths, program(tmp_path / "bad", "echo no libaio here >&2; exit 1"))


def test_transfers_are_measured_while_torch_computes(tmp_path: Path) -> None:
    pattern = Pattern("both", 1 << 16, 4, 1 << 24, 0.05)
    with files_for(tmp_path, pattern.file_bytes) as paths:
        found = measure_while_computing(pattern, paths)
    assert found.bytes_per_s > 0 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("threads", "slowing_byte_s"), [(1, 0.0), (1 << 10, 0.5e-9)])
def test_the_engines_thread_delays_computing_that_needs_each_processor(
    threads: int, slowing_byte_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert Speed(1e9, cpu_s_per_gb=0.5).slowing_byte_s == slowing_byte_s
    assert Speed(1e9).slowing_byte_s == 0.0


@pytest.mark.whole
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_a_name_in_brackets_is_not_taken_for_markup(command: str) -> None:
    done = runner.invoke(app, [command, "/missing[/red]"])
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert "/missing[/red] is not a directory" in done.output


def test_tune_keeps_what_it_found_and_prints_it_for_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "START_S", 0.01)
    arguments = ["tune", str(tmp_path), "--seconds", "0.05", "--file-size", "32MiB"]
    shown = runner.invoke(app, [*arguments, "--no-keep"])
    assert shown.exit_code == 0 and not tuning_path().exists(), shown.output
    assert (
        "GB/s both ways" in shown.output and "while torch computes" in shown.output and "For DeepSpeed:" in shown.output
    )
    assert set(json.loads(shown.output[shown.output.index("{") :])) == {"aio"}
    done = runner.invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    aio, found = said["deepspeed"]["aio"], find_tuning(tmp_path)
    assert found is not None and found == Tuning(**{name: said[name] for name in asdict(found)})
    assert said["kept_in"] == str(tuning_path()) and said["directory"] == str(tmp_path)
    assert (found.piece_bytes, found.depth) == (aio["block_size"], aio["queue_depth"])
    assert aio["single_submit"] is False and aio["overlap_events"] is True


def test_reads_of_a_file_are_measured_and_their_error_is_raised(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8 << 20))
    assert measure_read(tmp_path / "file", duration_s=0.05) > 0
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        measure_read(tmp_path / "folder", duration_s=0.05)


def test_the_search_takes_the_smallest_of_the_good_settings() -> None:
    def speeds(piece_bytes: int, depth: int) -> tuple[float, float]:
        full = min(piece_bytes / (512 << 10), 1) * min(depth / 16, 1)
        return 2e9 * full, 1e9 * full

    found = search(speeds, "uring")
    assert (found.piece_bytes, found.depth, found.read_bytes_per_s) == (512 << 10, 16, 2e9)


def test_tuning_of_a_drive_that_nobody_tuned_is_none(tmp_path: Path) -> None:
    assert find_tuning(tmp_path) is None
    tuning_path().parent.mkdir(parents=True)
    tuning_path().write_text("{ broken")
    assert find_tuning(tmp_path) is None


def test_tuning_of_other_drives_stays(tmp_path: Path) -> None:
    tuning_path().parent.mkdir(parents=True)
    tuning_path().write_text('{"uuid:other": {}}')
    tuning = Tuning(1 << 20, 32, "uring", 1e9, 2e9)
    keep_tuning(tmp_path, tuning)
    assert find_tuning(tmp_path) == tuning
    assert "uuid:other" in json.loads(tuning_path().read_text())

"""tools/capped limits what it says it limits, reports what the kernel counted, and leaves no control group behind."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

CAPPED = Path(__file__).resolve().parents[2] / "tools" / "capped"
NOT_PERMITTED = 77
MB = 10**6

DIRECT_WRITE = """
import mmap, os, sys
path, nbytes = sys.argv[1], int(sys.argv[2])
file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
piece = mmap.mmap(-1, 1 << 20)
for offset in range(0, nbytes, 1 << 20):
    os.pwrite(file, piece, offset)
if len(sys.argv) > 3:
    for offset in range(0, nbytes, 1 << 20):
        os.preadv(file, [piece], offset)
"""


def load_capped():
    loader = SourceFileLoader("capped", str(CAPPED))
    spec = importlib.util.spec_from_loader("capped", loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["capped"] = module
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


capped = load_capped()


def run(*arguments, **options):
    command = [sys.executable, str(CAPPED), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.fixture
def permitted(tmp_path):
    """Skips where control groups cannot be made here, with capped's own reason."""
    done = run("--read", "1GB", "--write", "1GB", "--memory", "1GiB", "--directory", tmp_path, "--", "true")
    if done.returncode == NOT_PERMITTED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr


def groups_left():
    return [path for path in Path("/sys/fs/cgroup").rglob("swapper-capped-*") if path.is_dir()]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("500MB", 500 * MB), ("1GiB", 1 << 30), ("1.5kB", 1500), ("4096", 4096), ("500MB/s", 500 * MB), ("7B", 7)],
)
def test_sizes_are_decimal_or_binary(text, nbytes):
    assert capped.parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MB", "5xb", "-1MB", "0", "1 2MB", "5ib", "500Mb", "500M"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        capped.parse_bytes(text)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--read", "fast", "--", "true"], "not a size"),
        (["--read", "5MB"], "no command"),
        (["--directory", "/does/not/exist", "--", "true"], "is not a directory"),
        (["--speed", "5", "--", "true"], "unrecognized|no command|required"),
    ],
)
def test_wrong_arguments_exit_2_and_say_which(arguments, reason):
    done = run(*arguments)
    assert done.returncode == 2
    assert any(word in done.stderr for word in reason.split("|")), done.stderr


def test_a_directory_on_no_drive_is_not_permitted():
    if not Path("/dev/shm").is_dir() or os.major(Path("/dev/shm").stat().st_dev) != 0:
        pytest.skip("no tmpfs at /dev/shm")
    done = run("--directory", "/dev/shm", "--", "true")
    assert done.returncode == NOT_PERMITTED
    assert "no drive" in done.stderr


def test_the_exit_code_is_the_commands(permitted, tmp_path):
    assert run("--directory", tmp_path, "--", "sh", "-c", "exit 7").returncode == 7
    assert run("--directory", tmp_path, "--", "sh", "-c", "kill -TERM $$").returncode == 128 + signal.SIGTERM
    assert run("--directory", tmp_path, "--", "no-such-command").returncode == 127


def test_writes_and_reads_are_capped_and_counted(permitted, tmp_path):
    nbytes, cap = 32 << 20, 32 * MB
    report = tmp_path / "report.json"
    caps = ["--read", f"{cap}", "--write", f"{cap}", "--directory", tmp_path, "--json", report]
    done = run(*caps, "--", sys.executable, "-c", DIRECT_WRITE, tmp_path / "data", nbytes, "read")
    if "Invalid argument" in done.stderr:
        pytest.skip("the filesystem of the temporary directory refuses O_DIRECT")
    assert done.returncode == 0, done.stderr
    figures = json.loads(report.read_text())
    assert figures["wall_s"] > 0.8 * 2 * nbytes / cap
    assert nbytes <= figures["device_written_bytes"] < 1.05 * nbytes
    assert nbytes <= figures["device_read_bytes"] < 1.05 * nbytes + 16 * MB  # and Python's own files


def test_bytes_are_counted_without_a_cap(permitted, tmp_path):
    report = tmp_path / "report.json"
    arguments = ["--directory", tmp_path, "--json", report]
    done = run(*arguments, "--", sys.executable, "-c", DIRECT_WRITE, tmp_path / "data", 8 << 20)
    if "Invalid argument" in done.stderr:
        pytest.skip("the filesystem of the temporary directory refuses O_DIRECT")
    assert json.loads(report.read_text())["device_written_bytes"] >= 8 << 20


def test_memory_is_capped_and_the_kill_is_reported(permitted, tmp_path):
    report = tmp_path / "report.json"
    arguments = ["--memory", "64MiB", "--directory", tmp_path, "--json", report]
    done = run(*arguments, "--", sys.executable, "-c", "held = b'1' * (200 << 20)")
    figures = json.loads(report.read_text())
    assert done.returncode == 128 + signal.SIGKILL
    assert figures["oom_kills"] >= 1
    peak = figures["peak_memory_bytes"]
    assert peak is None or peak <= 65 << 20


def test_the_child_finds_its_counters(permitted, tmp_path):
    show = "import os; print(os.environ['CAPPED_DEVICE'], open(os.environ['CAPPED_IO_COUNTERS']).readable())"
    done = run("--directory", tmp_path, "--", sys.executable, "-c", show)
    assert done.stdout.split()[1:] == ["True"], done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_command_and_no_group_is_left(permitted, tmp_path, number):
    script = "import time; print('up', flush=True); time.sleep(60)"
    command = [sys.executable, CAPPED, "--directory", tmp_path, "--", sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.wait(timeout=120) == 128 + number
        mine = f"swapper-capped-{process.pid}"
    assert mine not in {path.name for path in groups_left()}


def test_what_outlives_the_command_is_killed(permitted, tmp_path):
    done = run("--directory", tmp_path, "--", "sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!")
    pid = int(done.stdout)
    for _ in range(3000):  # a minute, by far
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            break
        time.sleep(0.02)
    else:
        pytest.fail("a process of the group survived it")


def test_where_no_group_can_be_made_it_says_what_to_do(monkeypatch, capsys, tmp_path):
    def refuse(parent):
        raise PermissionError(13, "Permission denied", str(parent))

    monkeypatch.setattr(capped, "make_child", refuse)
    monkeypatch.setattr(capped, "disk_of", lambda directory: "254:0")
    assert capped.main(["--directory", str(tmp_path), "--", "touch", str(tmp_path / "ran")]) == NOT_PERMITTED
    assert "root" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_version_2_files_are_written_and_read_as_the_kernel_documents(tmp_path):
    group = capped.Group(2, ["254:0"], tmp_path, tmp_path)
    group.limit(500 * MB, 400 * MB, 1 << 30)
    assert (tmp_path / "io.max").read_text() == "254:0 rbps=500000000 wbps=400000000"
    assert (tmp_path / "memory.max").read_text() == str(1 << 30)
    assert (tmp_path / "memory.swap.max").read_text() == "0"
    (tmp_path / "io.stat").write_text(
        "253:0 rbytes=1 wbytes=2 rios=1 wios=1 dbytes=0 dios=0\n"
        "254:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n"
    )
    (tmp_path / "memory.peak").write_text("12345\n")
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n")
    assert group.moved_bytes() == (4096, 8192)
    assert capped.Group(2, ["254:0", "253:0"], tmp_path, tmp_path).moved_bytes() == (4097, 8194)
    assert group.peak_memory_bytes() == 12345
    assert group.oom_kills() == 2

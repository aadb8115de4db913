"""The watchdog: a run that is asked, or that waits too long, says where it stands, and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

import swapper
from e2e.models import Net
from e2e.processes import LONG_S, environment, started_python
from e2e.twins import adamw

ROOT = Path(__file__).resolve().parents[2]
NOT_PERMITTED = 77

TRAIN = """
import sys, threading, torch, swapper
from e2e.models import Net, train_step
from e2e.twins import adamw, smallest_budget
directory, stall_s, steps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
asked = threading.Event()
threading.Thread(target=lambda: sys.stdin.readline() and asked.set(), daemon=True).start()
places = {"params": "nvme", "optimizer_state": "nvme"}
model = Net()
optimizer = adamw(model.parameters())
budget = smallest_budget(directory, model, optimizer, **places)
with swapper.SwapManager(directory, host_memory=budget, stall_s=stall_s) as manager:
    model, optimizer = manager.offload(model, optimizer, **places)
    while manager.step < steps and not asked.is_set():
        train_step(model, optimizer)
        optimizer.zero_grad()
        if manager.step == 1:
            print("trains", flush=True)
print("closed", flush=True)
"""


def dump_from(stream: IO[str]) -> list[str]:
    """Return the lines of the next dump, from the one that says why to the one that counts what is in flight."""
    lines = [next(line for line in stream if "SIGUSR1" in line or "waiting for" in line)]
    while not lines[-1].startswith("in flight"):
        line = stream.readline()
        assert line, lines
        lines.append(line)
    return lines


def test_a_training_process_that_is_sent_sigusr1_says_where_it_stands_and_goes_on(tmp_path: Path) -> None:
    with started_python("-c", TRAIN, tmp_path, 1000, 1 << 30) as child:
        assert child.stdout.readline() == "trains\n"
        for _ in range(2):
            child.send_signal(signal.SIGUSR1)
            lines = dump_from(child.stderr)
            assert lines[0] == "swapper: SIGUSR1\n"
            assert lines[1].startswith("step ")
            assert any(line.startswith("frames: ") for line in lines)
            assert any(line.startswith("leases: ") for line in lines)
        child.stdin.write("stop\n")
        child.stdin.flush()
        assert child.stdout.read() == "closed\n"
        assert child.wait() == 0


def test_a_wait_that_is_too_long_is_told_with_names_and_ages(tmp_path: Path) -> None:
    """The drive takes 4 MB a second: a page of some 100 KB, behind others, takes longer than the 20 ms that a wait may take."""
    capped = [str(ROOT / "tools" / "capped"), "--write", "4MB", "--directory", str(tmp_path), "--"]
    command = [*capped, sys.executable, "-c", TRAIN, str(tmp_path), "0.02", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=LONG_S, stdin=subprocess.DEVNULL
    )
    if done.returncode == NOT_PERMITTED:
        pytest.skip("control groups cannot be made here: " + done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("closed\n")
    assert "waiting for 0.02 s and more" in done.stderr
    lines = done.stderr.splitlines()
    assert any(line.startswith("waiting 0.") and ": page " in line for line in lines), done.stderr
    assert any("blocks." in line and line.endswith("WRITING") for line in lines), done.stderr
    assert any("('param'" in line or "('slice'" in line for line in lines), done.stderr


def test_a_handler_of_the_user_stays_and_default_comes_back(tmp_path: Path) -> None:
    seen: list[int] = []

    def offload(name: str) -> swapper.SwapManager:
        (tmp_path / name).mkdir()
        manager = swapper.SwapManager(tmp_path / name, host_memory="32MiB")
        model = Net()
        manager.offload(model, adamw(model.parameters()))
        return manager

    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # a manager that another thread has closed leaves its handler
    with offload("a"):
        with offload("b"):
            pass
        assert signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL  # the first one is still there
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    previous = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with offload("c") as manager:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert seen == [signal.SIGUSR1]
            assert "leases: none" in manager.dump()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGUSR1, previous)


@pytest.mark.whole
@pytest.mark.parametrize("stall_s", [0, -1.0, float("nan")])
def test_a_stall_that_is_no_time_is_refused(tmp_path: Path, stall_s: float) -> None:
    with pytest.raises(swapper.ConfigError, match="stall_s"):
        swapper.SwapManager(tmp_path, stall_s=stall_s)

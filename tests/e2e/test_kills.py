"""Kills and corruptions in a short form. The long ones: tools/test_crashes."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e import corrupted, killed_calls, killed_run, signalled_run, synced_run
from e2e.processes import run_python
from e2e.stopped_calls import why_not


def test_killed_at_random_instants_a_run_goes_on_exactly(tmp_path: Path) -> None:
    done = run_python(Path(killed_run.__file__), tmp_path, 1, 4)
    assert done.returncode == 0, done.stderr
    assert "all exact" in done.stdout


def test_a_run_whose_signal_handlers_raise_at_random_instants_goes_on_exactly(tmp_path: Path) -> None:
    done = run_python(Path(signalled_run.__file__), tmp_path, 1, 4)
    assert done.returncode == 0, done.stderr
    assert "all exact" in done.stdout


def test_killed_at_random_instants_a_run_with_encoded_state_goes_on_exactly(tmp_path: Path) -> None:
    done = run_python(Path(killed_run.__file__), tmp_path, 5, 3, "8bit")
    assert done.returncode == 0, done.stderr
    assert "all exact" in done.stdout


def test_killed_at_random_instants_a_run_over_two_drives_goes_on_exactly(tmp_path: Path, second_drive: Path) -> None:
    done = run_python(Path(killed_run.__file__), tmp_path, 3, 3, second_drive)
    assert done.returncode == 0, done.stderr
    assert "all exact" in done.stdout


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_killed_at_system_calls_that_write_a_run_goes_on_exactly(tmp_path: Path) -> None:
    done = run_python(Path(killed_calls.__file__), tmp_path, 41, 17)
    assert done.returncode == 0, done.stderr
    assert "all exact" in done.stdout


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_with_fsync_a_commit_is_on_the_drive_before_the_next_step_writes(tmp_path: Path) -> None:
    done = run_python(Path(synced_run.__file__), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "each synced" in done.stdout


def test_a_change_of_any_byte_of_a_snapshot_is_found(tmp_path: Path) -> None:
    done = run_python(Path(corrupted.__file__), tmp_path, 1, 40)
    assert done.returncode == 0, done.stderr
    assert "all found" in done.stdout

"""Ranks of a sharded model that are killed, fail, or take snapshots: all go on from one step, or all stop and say why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from e2e import fsdp_snapshot, killed_ranks, ranks_run
from e2e.processes import run_python
from e2e.test_ranks import launch
from swapper.durability.verify import verify

BUDGET = "memory=4MiB"
"""The smallest for the model of ranks_run.py, so that an update writes."""


def test_killed_at_random_instants_ranks_go_on_together_exactly(tmp_path: Path) -> None:
    done = run_python(Path(killed_ranks.__file__), tmp_path, 3, 2, 2, "fsdp")
    assert done.returncode == 0, done.stderr
    assert "all exact" in done.stdout


def test_a_step_that_fails_on_one_rank_is_undone_on_all_and_can_be_repeated(tmp_path: Path) -> None:
    for name, orders in (("failed", ["full=1:3", "retries"]), ("well", [])):
        (tmp_path / name).mkdir()
        said = launch(tmp_path / name, "steps=4", "sharded", BUDGET, f"snapshot={tmp_path / name / 'end'}", *orders)
        assert "rank 0: began at 0, ended at 4" in said and "rank 1: began at 0, ended at 4" in said
        if name == "failed":
            assert any("rank 1: IoError at 2" in line and "File too large" in line for line in said)
            assert any("rank 0: StateError at 2: step 3 failed on another rank" in line for line in said)
            assert any("(rank 1: IoError: write of" in line for line in said)
    for rank in range(2):
        failed, well = (torch.load(tmp_path / name / "end" / f"rank-{rank}.pt") for name in ("failed", "well"))
        assert_same(failed, well)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_the_reason_of_the_rank_that_ended_first_is_told_on_the_others(tmp_path: Path) -> None:
    """Its peers learn from gloo only that it has closed its connection."""
    done = run_python(Path(ranks_run.__file__), tmp_path, 2, "steps=3", "sharded", BUDGET, "torn=1:3")
    assert "rank 1: ChecksumError" in done.stdout
    assert "rank 1 ended first: ChecksumError" in done.stderr and "turn-" in done.stderr


def test_a_budget_that_one_rank_cannot_open_is_refused_on_all(tmp_path: Path) -> None:
    said = launch(tmp_path, "memory=1:64KiB", "sharded", ok=False)
    assert "StateError" in said[0] and "could not manager.offload" in said[0] and "rank 1: host_memory" in said[0]
    assert "BudgetError" in said[1]


# --- snapshots --------------------------------------------------------------------------------------------------------


def reshard(directory: Path, *sizes: int) -> None:
    done = run_python(Path(fsdp_snapshot.__file__), directory, *sizes)
    assert done.returncode == 0, done.stderr[-6000:]
    said = {line for line in done.stdout.splitlines() if line.startswith("rank ")}
    assert said == {f"rank {rank} of {size}: same" for size in sizes for rank in range(size)}


def test_a_snapshot_of_two_ranks_is_loaded_by_one(tmp_path: Path) -> None:
    reshard(tmp_path, 2, 1)


@pytest.mark.slow
def test_snapshots_are_loaded_by_any_number_of_ranks(tmp_path: Path) -> None:
    reshard(tmp_path, 2, 1, 3, 4)


def test_a_snapshot_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    existing, other, taken, well = (tmp_path / name for name in ("existing", "other", "taken", "well"))
    existing.mkdir()
    (tmp_path / ".well.partial").mkdir()  # of a run that was killed
    (tmp_path / ".well.partial" / "rank-0.pt").touch()
    paths = [existing, f"0:{other}", f"1:{other}-1", taken, well]
    said = launch(
        tmp_path, "steps=1", "sharded", "retries", f"taken=1:{taken}", *(f"snapshot={path}" for path in paths)
    )
    lines = {rank: [line for line in said if line.startswith(f"rank {rank}: ")] for rank in range(2)}
    for rank in range(2):
        text = "\n".join(lines[rank])
        assert len(lines[rank]) == 4, text
        assert f"{existing} exists already" in text
        assert "different snapshots" in text and "other-1" in text
        assert f"rank {rank}: began at 0, ended at 1" in text
    assert any("CheckpointError" in line and "appeared while the snapshot was written" in line for line in lines[1])
    assert any("StateError" in line and "rank 1: CheckpointError" in line for line in lines[0])
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"existing", "well", "rank-0-of-2", "rank-1-of-2"}
    assert [report.faults for report in verify(well)] == [[]] * 3

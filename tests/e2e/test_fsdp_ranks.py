"""Ranks of a sharded model that are killed, fail, or take snapshots: all go on from one step, or all stop and say why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e import (
    failed_ranks,
    fsdp_buffers,
    fsdp_snapshot,
    fsdp_unfrozen_kills,
    killed_ranks,
    ranks_run,
    restarted_run,
    stopped_calls,
)
from e2e.processes import run_python
from e2e.test_ranks import launch
from swapper.durability.verify import verify

BUDGET = "memory=4MiB"
"""The smallest for the model of ranks_run.py, so that an update writes."""


def test_killed_at_random_instants_ranks_go_on_together_exactly(tmp_path: Path) -> None:
    done = run_python(Path(killed_ranks.__file__), tmp_path, 3, 1, 2, "fsdp")
    assert done.returncode == 0, done.stderr
    assert "all exact" in done.stdout


def test_killed_while_they_get_more_to_train_ranks_go_on_with_one_layout(tmp_path: Path) -> None:
    if why := stopped_calls.why_not():
        pytest.skip(why)
    done = run_python(Path(fsdp_unfrozen_kills.__file__), tmp_path, 33, 60)
    assert done.returncode == 0, done.stderr
    assert "3 kills" in done.stdout and "all exact" in done.stdout


def restarted(
    directory: Path, killed_at: int, *resume: str, size: int = 2, restarts: int = 1, ok: bool = True
) -> dict[str, set[str]]:
    """Return what ranks of restarted_run.py said, by its subject.

    Restarted ranks must not find the addresses of those before in torchrun's store: pytorch #135712, docs/reference/snapshots.md.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", size]
    often = ["--max-restarts", restarts, "--monitor-interval", 0.1]
    done = run_python(
        *torchrun, *often, Path(restarted_run.__file__), directory, 5, killed_at, *resume,
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )  # fmt: skip
    assert (done.returncode == 0) == ok, done.stderr[-6000:]
    said: dict[str, set[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("rank "):
            subject, _, value = line.partition(": ")
            said.setdefault(subject, set()).add(value)
    return said


def test_torchrun_restarts_ranks_of_which_one_is_killed_and_they_go_on_exactly(tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "well").mkdir()
    killed = restarted(tmp_path / "killed", 3)
    resumed = killed.pop("rank 0, restart 1")
    assert resumed == killed.pop("rank 1, restart 1") and resumed <= {"2", "3"}
    assert killed == restarted(tmp_path / "well", 0)  # also steps that were taken twice
    assert len(killed) == 2 * (5 + 1)


def test_torchrun_goes_on_with_another_number_of_ranks_that_is_asked_for(tmp_path: Path) -> None:
    restarted(tmp_path, 3, restarts=0, ok=False)
    refused = restarted(tmp_path, 0, size=3, restarts=0, ok=False)
    assert refused.keys() == {f"rank {rank}, refused" for rank in range(3)}
    for (said,) in refused.values():
        assert "holds a run of 2 ranks (2 of them here), and this job has 3" in said and "resume='reshard'" in said
    three = restarted(tmp_path, 0, "reshard", size=3)
    (begun,) = {step for rank in range(3) for step in three[f"rank {rank}, restart 0"]}
    assert begun in ("2", "3") and f"rank 2, step {begun}" in three and f"rank 2, step {int(begun) - 1}" not in three
    two = restarted(tmp_path, 0, "reshard")
    assert two["rank 1, restart 0"] == {"5"} and two["rank 1, end"] == three["rank 2, end"] == three["rank 0, end"]


@pytest.mark.parametrize("engine, errors", [("fsdp", 3), ("ddp", 5)])
def test_transfers_that_fail_on_one_rank_leave_all_ranks_at_one_step(engine: str, errors: int, tmp_path: Path) -> None:
    done = run_python(Path(failed_ranks.__file__), tmp_path, 4, errors, 2, engine)
    assert done.returncode == 0, done.stderr
    assert f"{errors} errors" in done.stdout and "all exact" in done.stdout


def test_what_fails_on_one_rank_is_undone_on_all_and_can_be_repeated(tmp_path: Path) -> None:
    """A step, for a drive without room, and then snapshots. The job that fails comes to where one that does not comes."""
    failing, well = tmp_path / "failing", tmp_path / "well"
    existing, taken, end = (failing / name for name in ("existing", "taken", "end"))
    existing.mkdir(parents=True)
    well.mkdir()
    paths = [existing, f"0:{failing / 'other'}", f"1:{failing / 'another'}", taken, end]
    orders = ["full=1:3", f"taken=1:{taken}", "retries", *(f"snapshot={path}" for path in paths)]
    said = launch(failing, "steps=4", "sharded", BUDGET, *orders)
    first, second = ([line for line in said if line.startswith(f"rank {rank}: ")] for rank in range(2))
    assert len(first) == len(second) == 5, said
    expected = [
        (
            "StateError at 2: step 3 failed on another rank, so no rank takes it (rank 1: IoError",
            "IoError at 2: write of",
        ),
        (f"CheckpointError: {existing} exists already", f"CheckpointError: {existing} exists already"),
        (
            "StateError: ranks take different snapshots",
            "StateError: ranks take different snap",
        ),
        (f"StateError: the snapshot {taken} was not taken: it failed on rank 1: CheckpointError", "CheckpointError: "),
        ("began at 0, ended at 4", "began at 0, ended at 4"),
    ]
    for texts, lines in zip(zip(*expected, strict=True), (first, second), strict=True):
        for text in texts:
            assert any(text in line for line in lines), (text, lines)
    assert {path.name for path in failing.iterdir()} == {"existing", "end", "rank-0-of-2", "rank-1-of-2"}
    launch(well, "steps=4", "sharded", BUDGET, f"snapshot={well / 'end'}")
    for rank in range(2):
        one, other = (torch.load(path / "end" / f"rank-{rank}.pt", weights_only=True) for path in (failing, well))
        assert_same(one, other)
    assert [report.faults for report in verify(end)] == [[]] * 3


def test_a_deferred_update_that_fails_on_one_rank_ends_all_and_they_go_on_from_one_step(tmp_path: Path) -> None:
    """It fails in a forward, where the others wait for that rank's shards: for a drive without room, when step 2 is open."""
    failing, well = tmp_path / "failing", tmp_path / "well"
    orders = ["sharded", BUDGET, "update=deferred"]
    done = run_python(Path(ranks_run.__file__), failing, 2, "steps=4", *orders, "full=1:3")
    assert done.returncode == 1 and "rank 1: IoError: write of" in done.stdout
    assert "rank 1 ended first: IoError: write of" in done.stderr
    first, second = launch(failing, "steps=1", *orders, f"snapshot={failing / 'end'}")
    begun = 2 if "began at 2" in first else 1  # the one that failed may have done the rest as it ended
    assert (first, second) == tuple(f"rank {rank}: began at {begun}, ended at {begun + 1}" for rank in range(2))
    launch(well, f"steps={begun}", *orders)
    launch(well, "steps=1", *orders, f"snapshot={well / 'end'}")
    for rank in range(2):
        one, other = (torch.load(path / "end" / f"rank-{rank}.pt", weights_only=True) for path in (failing, well))
        assert_same(one, other)


def test_an_update_in_backward_that_fails_on_one_rank_is_undone_on_all_at_the_step(tmp_path: Path) -> None:
    """The failing rank goes on with that backward, in which the others wait for its gradients, and both repeat the step."""
    failing, well = tmp_path / "failing", tmp_path / "well"
    failing.mkdir(), well.mkdir()
    orders = ["steps=4", "sharded", BUDGET, "update=backward"]
    said = launch(failing, *orders, "breaks=1:3", "retries", f"snapshot={failing / 'end'}")
    assert any("rank 0: StateError at 2: step 3 failed on another rank" in line for line in said), said
    assert any("rank 1: IoError at 2: write of" in line for line in said), said
    launch(well, *orders, f"snapshot={well / 'end'}")
    for rank in range(2):
        one, other = (torch.load(path / "end" / f"rank-{rank}.pt", weights_only=True) for path in (failing, well))
        assert_same(one, other)


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
    done = run_python(Path(ranks_run.__file__), tmp_path, 2, "steps=1", "sharded", BUDGET, "torn=1:1")
    assert "rank 1: ChecksumError" in done.stdout
    assert "rank 1 ended first: ChecksumError" in done.stderr and "turn-" in done.stderr


def test_the_plan_names_the_memory_of_fsdps_own_buffers(tmp_path: Path) -> None:
    """Within 10 % of what a step takes; what the allocator frees is given back at once."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    done = run_python(*torchrun, Path(fsdp_buffers.__file__), tmp_path, MALLOC_MMAP_THRESHOLD_="65536")
    assert done.returncode == 0, done.stderr[-6000:]
    found = re.findall(r"planned (\d+) measured (\d+)", done.stdout)
    assert len(found) == 2 * len(fsdp_buffers.CASES)
    for planned, measured in found:
        assert 0.9 * int(measured) <= int(planned) <= 1.1 * int(measured), found


def test_a_rank_that_is_killed_before_a_snapshot_is_noticed_there_at_once(tmp_path: Path) -> None:
    """Not by the timeout of torch.distributed, which would be named."""
    orders = ["steps=1", "sharded", BUDGET, "gone=1", f"snapshot={tmp_path / 'x'}", "timeout=9"]
    first, gone = launch(tmp_path, *orders, ok=False)
    named = re.search("StateError: (another rank|rank 1 of 2) did not arrive at take a snapshot", first)
    assert named and "Timed out" not in first
    assert gone == "rank 1: gone"


def test_a_rank_that_has_left_a_collective_cannot_go_on(tmp_path: Path) -> None:
    """It tries again, while the other waits for its shards in another place of the forward: both would wait for ever."""
    done = run_python(Path(ranks_run.__file__), tmp_path, 2, "steps=2", "sharded", BUDGET, "torn=1:1", "retries")
    assert "rank 1: ChecksumError at 0: " in done.stdout
    assert "rank 1 ended first: StateError: a forward or backward ended" in done.stderr
    assert launch(tmp_path, "resume=discard", "steps=1", "sharded", BUDGET)[1] == "rank 1: began at 0, ended at 1"


# --- snapshots --------------------------------------------------------------------------------------------------------


def reshard(directory: Path, *sizes: int) -> None:
    done = run_python(Path(fsdp_snapshot.__file__), directory, *sizes)
    assert done.returncode == 0, done.stderr[-6000:]
    said = {line for line in done.stdout.splitlines() if line.startswith("rank ")}
    assert said == {f"rank {rank} of {size}: same" for size in sizes for rank in range(size)}


def test_a_snapshot_of_two_ranks_is_loaded_by_one(tmp_path: Path) -> None:
    reshard(tmp_path, 2, 1)


def test_snapshots_are_loaded_by_any_number_of_ranks(tmp_path: Path) -> None:
    reshard(tmp_path, 2, 1, 3, 4)

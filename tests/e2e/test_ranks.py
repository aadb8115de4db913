"""Ranks that train together go on from one step, whatever was killed when; what does not fit together is named, on every rank."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import swapper
from e2e import killed_ranks, ranks_run
from e2e.processes import run_python, started_python
from swapper.durability.directory import COMMIT_NAME, FALLBACK_NAME, SPARE_NAME
from swapper.durability.ranks import CommitId, Held, choose
from swapper.io.drives import Tuning, keep_tuning


def launch(directory: Path, *orders: str, size: int = 2, ok: bool = True, **variables: str) -> list[str]:
    """Run `orders` (see ranks_run.py) on all ranks at once. Returns what they said, a line or more of each, sorted."""
    done = run_python(Path(ranks_run.__file__), directory, size, *orders, **variables)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    talkers = {line.partition(":")[0] for line in said}
    assert talkers == {f"rank {rank}" for rank in range(size)}, done.stdout + done.stderr
    return said


def test_killed_at_random_instants_ranks_go_on_together_exactly(tmp_path: Path) -> None:
    done = run_python(Path(killed_ranks.__file__), tmp_path, 5, 6)
    assert done.returncode == 0, done.stderr
    assert "all exact" in done.stdout


def test_a_rank_that_is_ahead_goes_back_to_the_step_that_all_have(tmp_path: Path) -> None:
    assert launch(tmp_path, "steps=3", "killed=1") == [
        "rank 0: began at 0, ended at 3",
        "rank 1: began at 0, killed before commit 3",
    ]
    assert launch(tmp_path, "steps=1") == ["rank 0: began at 2, ended at 3", "rank 1: began at 2, ended at 3"]


def test_commits_of_ranks_remove_no_file(tmp_path: Path) -> None:
    """As those of one rank: what is kept for ranks that are behind is a second name of the spare."""
    names = [tmp_path / "rank-1-of-2" / name for name in (COMMIT_NAME, SPARE_NAME, FALLBACK_NAME)]
    with contextlib.ExitStack() as stack:  # of open files, whose numbers no others get
        found = []
        for steps in (2, 1, 2):
            launch(tmp_path, f"steps={steps}")
            found.append({os.fstat(stack.enter_context(path.open("rb")).fileno()).st_ino for path in names})
    assert found == [found[0]] * 3 and len(found[0]) == 2


def test_killed_before_all_have_their_first_commit_all_start_over(tmp_path: Path) -> None:
    assert launch(tmp_path, "steps=0", "killed=1") == [
        "rank 0: began at 0, ended at 0",
        "rank 1: began at 0, killed before commit 0",
    ]
    assert launch(tmp_path, "steps=1") == ["rank 0: began at 0, ended at 1", "rank 1: began at 0, ended at 1"]


def test_a_rank_without_its_run_is_named_on_all(tmp_path: Path) -> None:
    launch(tmp_path, "steps=2")
    kept = tmp_path / "rank-1-of-2"
    kept.rename(tmp_path / "elsewhere")
    for said in launch(tmp_path, ok=False):
        assert "DirectoryError" in said and "some ranks have no run to resume" in said
        assert "rank 0: step 2" in said and "rank 1: no commit" in said and "Put the missing directories back" in said
    shutil.rmtree(kept)
    (tmp_path / "elsewhere").rename(kept)
    assert launch(tmp_path)[1] == "rank 1: began at 2, ended at 2"


def test_directories_of_two_runs_are_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        launch(tmp_path / name, "steps=1")
    shutil.rmtree(tmp_path / "a" / "rank-1-of-2")
    (tmp_path / "b" / "rank-1-of-2").rename(tmp_path / "a" / "rank-1-of-2")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    for said in launch(tmp_path / "a", ok=False):
        assert "DirectoryError" in said and "different runs" in said
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.*")}


def test_a_directory_of_another_rank_is_named(tmp_path: Path) -> None:
    launch(tmp_path, "steps=1")
    for old, new in (("0", "x"), ("1", "0"), ("x", "1")):
        (tmp_path / f"rank-{old}-of-2").rename(tmp_path / f"rank-{new}-of-2")
    for said in launch(tmp_path, ok=False):
        assert "DirectoryError" in said and "holds the run of rank" in said


@pytest.mark.parametrize("before, now", [(2, 1), (1, 2)])
def test_another_number_of_ranks_is_refused(before: int, now: int, tmp_path: Path) -> None:
    launch(tmp_path, "steps=1", size=before)
    for resume in ("auto", "error"):
        for said in launch(tmp_path, f"resume={resume}", size=now, ok=False):
            assert (
                "DirectoryError" in said and f"holds a run of {before} rank" in said and f"this job has {now}" in said
            )
    assert not list(tmp_path.glob(f"rank-*-of-{now}"))
    assert launch(tmp_path, "resume=discard", "steps=1", size=now)[0] == "rank 0: began at 0, ended at 1"
    assert launch(tmp_path, "steps=1", size=now)[0] == "rank 0: began at 1, ended at 2"


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    said = launch(tmp_path, "memory=1:64KiB", ok=False)
    assert "StateError" in said[0] and "rank 1: " in said[0] and "could not manager.offload" in said[0]
    assert "BudgetError" in said[1]
    (tmp_path / "rank-0-of-2" / "lock").unlink()
    (tmp_path / "rank-0-of-2" / "lock").mkdir()
    said = launch(tmp_path, ok=False)
    assert "DirectoryError" in said[0]
    assert "StateError" in said[1] and "rank 0: " in said[1] and "could not open its directory" in said[1]


def test_ranks_that_would_commit_at_different_steps_are_refused(tmp_path: Path) -> None:
    for said in launch(tmp_path, "every=1:2", ok=False):
        assert "ConfigError" in said and "rank 0 every 1 steps; rank 1 every 2 steps" in said


def test_ranks_that_say_different_things_are_refused(tmp_path: Path) -> None:
    for said in launch(tmp_path, "resume=1:discard", ok=False):
        assert "DirectoryError" in said and "- rank 0: auto\n- rank 1: discard" in said.replace(" | ", "\n")


def test_a_rank_that_ended_is_noticed(tmp_path: Path) -> None:
    said = launch(tmp_path, "steps=1:3", "plain", ok=False)
    assert said[0] == "rank 0: began at 0, ended at 0"
    assert "StateError" in said[1] and "another rank did not arrive at step 1" in said[1]


def test_a_rank_that_comes_late_to_a_commit_is_waited_for_and_all_go_on(tmp_path: Path) -> None:
    """It comes when the watchdog has said that the other waits for it."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    orders = ["steps=3", "plain", "held=1:2", f"gate={gate}", "stall_s=0.2"]
    with started_python(ranks_run.__file__, tmp_path / "run", 2, *orders) as ranks:
        assert any("for a rank: to come to step 2" in line for line in ranks.stderr)
        gate.write_text("go")
        said = sorted(ranks.stdout)
        assert ranks.wait() == 0
    assert said == [f"rank {rank}: began at 0, ended at 3\n" for rank in range(2)]


@pytest.mark.parametrize("engine", ["ddp", "sharded"])
def test_a_rank_that_comes_late_to_offload_is_waited_for_and_all_go_on(engine: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    orders = [*(["sharded"] if engine == "sharded" else []), "steps=2", "memory=16MiB"]
    held = [f"snapshot={tmp_path / 'late.pt'}", "held=1:0", f"gate={gate}", "comes=0"]
    with started_python(ranks_run.__file__, tmp_path / "run", 2, *orders, *held) as ranks:
        assert "rank 0: comes to manager.offload\n" in iter(ranks.stdout)
        gate.write_text("go")
        said = sorted(line for line in ranks.stdout if "ended" in line)
        assert ranks.wait() == 0
    assert said == [f"rank {rank}: began at 0, ended at 2\n" for rank in range(2)]
    launch(tmp_path / "other", *orders, f"snapshot={tmp_path / 'in-time.pt'}")
    pattern = "{}.pt/rank-*.pt" if engine == "sharded" else "{}.*pt"
    late, in_time = (
        [torch.load(path)["model"] for path in sorted(tmp_path.glob(pattern.format(name)))]
        for name in ("late", "in-time")
    )
    assert len(late) == len(in_time) == 2
    for one, other in zip(late, in_time, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_rank_that_never_comes_to_offload_is_named_and_nobody_waits_longer_than_the_user_says(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    orders = ["sharded", "held=2:0", f"gate={gate}", "timeout=2"]
    with started_python(ranks_run.__file__, tmp_path / "run", 3, *orders) as ranks:
        ended = sorted(next(ranks.stdout) for _ in range(2))
        gate.write_text("go")
        (last,) = ranks.stdout
        assert ranks.wait() != 0
    for rank, said in enumerate(ended):
        assert said.startswith(
            f"rank {rank}: StateError: rank 2 of 3 did not arrive at manager.offload: it has ended, or"
        ), said
        assert "resume='auto'" in said
    assert last.startswith("rank 2: StateError: ") and "did not arrive at manager.offload" in last
    assert not list(tmp_path.rglob("*.swap"))


def test_a_rank_that_skips_a_step_is_waited_for_no_longer_than_the_user_says(tmp_path: Path) -> None:
    """The one that skipped waits in DDP for the other, which waits for it to come to the step."""
    orders = ["steps=3", "skips=0:2", "timeout=2", "stall_s=0.5"]
    done = run_python(Path(ranks_run.__file__), tmp_path, 2, *orders)
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert "StateError" in said[1] and "another rank did not arrive at step 2" in said[1]
    assert "skips optimizer.step()" in said[1] and "resume='auto'" in said[1]
    assert "for a rank: to come to step 2" in done.stderr  # the watchdog, long before
    assert launch(tmp_path, "steps=1")[0] == "rank 0: began at 1, ended at 2"


def test_what_one_rank_calls_alone_is_named_on_all_where_they_meet(tmp_path: Path) -> None:
    """At once, as no collective of the user's comes first; and no rank has done anything."""
    orders = ["steps=3", "plain", "adds=1:2", "timeout=60"]
    for said in launch(tmp_path, *orders, ok=False):
        assert "StateError: ranks have come to different things: | - rank 0: step 2 | - rank 1: train more" in said
        assert "Call the same on all of them" in said
    assert launch(tmp_path, "steps=1", "plain")[0] == "rank 0: began at 1, ended at 2"


@pytest.mark.parametrize("call, waits", [("snaps", "take this snapshot"), ("adds", "train more parameters")])
def test_what_one_rank_calls_alone_is_logged_long_before_the_timeout(call: str, waits: str, tmp_path: Path) -> None:
    """The other one waits for it in FSDP2's collective, whose timeout ends both."""
    orders = ["sharded", "steps=3", f"{call}=1:2", "timeout=2", "stall_s=0.2", "memory=16MiB"]
    done = run_python(Path(ranks_run.__file__), tmp_path, 2, *orders)
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert len(said) == 2 and "StateError: rank 0 of 2 did not arrive at " in said[1]
    assert f"for a rank: to {waits}, which another does not, or not yet" in done.stderr
    assert len({line.partition(": ")[2] for line in launch(tmp_path, "steps=1", "sharded", "memory=16MiB")}) == 1


def test_a_step_that_fails_on_one_rank_is_undone_on_all(tmp_path: Path) -> None:
    """The one that failed tries again alone: the other has ended."""
    said = launch(tmp_path, "steps=4", "fails=0:2", "plain", ok=False)
    assert "StateError" in said[0] and "another rank did not arrive at step 2" in said[0]
    assert "StateError" in said[1] and "step 2 failed on another rank" in said[1]
    assert "rank 0: ZeroDivisionError" in said[1] and "resume='auto'" in said[1]
    assert launch(tmp_path, "steps=1", "plain")[0] == "rank 0: began at 1, ended at 2"


@pytest.mark.parametrize("engine", ["sharded", "ddp", "plain"])
def test_a_commit_that_fails_on_one_rank_before_the_update_is_told_to_all(engine: str, tmp_path: Path) -> None:
    """They all repeat the step. The commit is tried in the forward too, where it may fail: the others wait in collectives."""
    orders = ["steps=4", engine, "uncommitted=1:3", "retries"]
    said = launch(tmp_path, *(order for order in orders if order != "ddp"))
    assert "rank 0: StateError at 2: step 3 failed on another rank, so no rank takes it (rank 1: IoError" in said[0]
    assert said[1:2] == ["rank 0: began at 0, ended at 4"]
    assert "rank 1: IoError at 2: " in said[2] and "commit.pt" in said[2]
    assert said[3] == "rank 1: began at 0, ended at 4"


def test_ranks_that_share_a_drive_share_its_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two here, and one in memory. They tell each other where they are, whatever launched them; those alone know of none."""
    config = str(tmp_path / "config")
    monkeypatch.setenv("XDG_CONFIG_HOME", config)
    (tmp_path / "run").mkdir()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        for directory in (tmp_path, Path(other)):
            keep_tuning(directory, Tuning(1 << 20, 64, "threads", 6e9, 3e9))
        orders = [f"drive={tmp_path / 'run'}", f"drive=2:{other}", "rate"]
        said = launch(tmp_path, *orders, size=3, XDG_CONFIG_HOME=config)
    for rank, rate in enumerate((3.0, 3.0, 6.0)):
        (line,) = (line for line in said if line.startswith(f"rank {rank}: {rate} GB/s; "))
        assert ("divided by the 2 ranks that share it" in line) == (rank < 2)
    alone = launch(tmp_path, f"drive={tmp_path / 'alone'}", "ranks=alone", "plain", "rate", XDG_CONFIG_HOME=config)
    assert all("6.0 GB/s" in line and "divided" not in line for line in alone if "GB/s" in line)


def test_alone_each_rank_goes_its_own_way(tmp_path: Path) -> None:
    assert launch(tmp_path, "steps=1:3", "plain", "ranks=alone") == [
        "rank 0: began at 0, ended at 0",
        "rank 1: began at 0, ended at 3",
    ]


def test_a_sharded_model_of_ranks_that_are_alone_is_refused(tmp_path: Path) -> None:
    for said in launch(tmp_path, "ranks=alone", "sharded", ok=False):
        assert "ConfigError" in said and "leave out ranks='alone'" in said


def test_distributed_that_is_initialized_too_late_is_refused(tmp_path: Path) -> None:
    for orders in (["late"], ["later", "steps=1"]):
        said = launch(tmp_path, *orders, ok=False)
        assert len(said) == 2 and all("StateError" in each for each in said)
        assert all("make it after init_process_group" in each for each in said)


@pytest.mark.parametrize("size", [1, 3])
def test_each_rank_has_a_snapshot_of_its_own(size: int, tmp_path: Path) -> None:
    launch(tmp_path, "steps=1", f"snapshot={tmp_path / 'x.pt'}", f"snapshot={tmp_path / 'rank{rank}.pt'}", size=size)
    names = [f"x.rank-{rank}-of-{size}.pt" for rank in range(1, size)] + [f"rank{rank}.pt" for rank in range(size)]
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == sorted(["x.pt", *names])


# --- which step -------------------------------------------------------------------------------------------------------


def held(*commits: Sequence[CommitId], jobs: Sequence[str] = ()) -> list[Held]:
    named = jobs or ["job"] * len(commits)
    return [Held("here", "auto", job, tuple(each)) for job, each in zip(named, commits, strict=True)]


@given(
    st.integers(1, 5), st.lists(st.sampled_from(["behind", "ahead", "at"]), min_size=1, max_size=5), st.integers(0, 2)
)
def test_the_newest_common_step_is_chosen(step: int, where: list[str], edits: int) -> None:
    """Of all that may be on disk by the protocol: no rank is more than one commit ahead, and that one has the one before."""
    commits = {"behind": [(step, 0)], "at": [(step, 0), (step - 1, 0)], "ahead": [(step, edits + 1), (step, 0)]}
    found = choose(held(*(commits[each] for each in where)))
    assert found == ((step, edits + 1) if set(where) == {"ahead"} else (step, 0))


@pytest.mark.parametrize(
    "commits, jobs, expected",
    [
        ([[], []], "ab", None),
        ([[(0, 0)], []], "ab", None),
        ([[(0, 0)], [(0, 0)]], "ab", None),
        ([[(0, 0)], [(0, 0)]], "aa", (0, 0)),
        ([[(1, 0), (0, 0)], [(0, 0)]], "aa", (0, 0)),
        ([[(1, 0), (0, 0)], []], "ab", "have no run"),
        ([[(3, 0), (2, 0)], [(5, 0), (4, 0)]], "aa", "no step that all ranks"),
        ([[(3, 0)], [(3, 1)]], "aa", "no step that all ranks"),
        ([[(3, 0)], [(3, 0)]], "ab", "different runs"),
    ],
)
def test_what_ranks_have_is_one_of_these(
    commits: list[list[CommitId]], jobs: str, expected: CommitId | str | None
) -> None:
    found = held(*commits, jobs=list(jobs))
    if isinstance(expected, str):
        with pytest.raises(swapper.DirectoryError, match=expected):
            choose(found)
    else:
        assert choose(found) == expected

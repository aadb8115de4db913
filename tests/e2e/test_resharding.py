"""A job goes on with another number of ranks, from the directories of those before; what cannot be done is named on each."""

from __future__ import annotations

from pathlib import Path

import pytest
from sampling import runs_a_sample

import swapper
from e2e import coded_ranks_run, resharded_run
from e2e.processes import run_python
from e2e.test_ranks import launch
from swapper.durability.beginning import HeldBySize, choose_size
from swapper.durability.commit import read_commit
from swapper.durability.ranks import Held

BUDGET = "memory=16MiB"


def reshard(directory: Path, *arguments: object) -> None:
    done = run_python(Path(resharded_run.__file__), directory, *arguments)
    assert done.returncode == 0, done.stderr[-6000:]
    sizes = [size for size in arguments if isinstance(size, int)]
    said = [f"stage {n}, rank {rank} of {size}: same" for n, size in enumerate(sizes) for rank in range(size)]
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("stage ")) == sorted(said)


def test_each_rank_of_another_number_reads_its_rows(tmp_path: Path) -> None:
    reshard(tmp_path, *([1, 3] if runs_a_sample() else [2, 1, 3, 4]))


def test_killed_meanwhile_the_ranks_before_stay_usable(tmp_path: Path) -> None:
    """Back to a number that has a directory of an earlier step, too."""
    reshard(tmp_path, 2, 1, 2, "killed")


@pytest.mark.parametrize("codec", ["8bit", "bf16"])
def test_encoded_state_goes_on_and_is_in_snapshots(tmp_path: Path, codec: str) -> None:
    """A rank of four has nothing of a parameter."""
    sizes = [2, 1, 4] if codec == "8bit" else [3, 2]
    done = run_python(Path(coded_ranks_run.__file__), tmp_path, codec, *sizes)
    assert done.returncode == 0, done.stderr[-6000:]
    said = [f"rank {rank} of {size}: same" for size in sizes for rank in range(size)]
    assert sorted(done.stdout.splitlines()) == sorted(said)


def test_models_that_are_whole_on_each_rank_go_on(tmp_path: Path) -> None:
    """By DDP. The directories of the ranks before would go back to an earlier step, and are not resumed by the way."""
    launch(tmp_path, BUDGET, "steps=2", "update=deferred", size=2)
    three = [f"rank {rank}: began at 2, ended at 3" for rank in range(3)]
    assert launch(tmp_path, BUDGET, "resume=reshard", "steps=1", size=3) == three
    for said in launch(tmp_path, BUDGET, "steps=1", size=2, ok=False):
        assert "DirectoryError" in said and "went on with 3 ranks to step 3" in said and "go back to step 2" in said
        assert "resume='reshard'" in said
    assert [commit.step for rank in range(2) if (commit := read_commit(tmp_path / f"rank-{rank}-of-2"))] == [2, 2]
    assert launch(tmp_path, BUDGET, "steps=1", size=3)[2] == "rank 2: began at 3, ended at 4"
    two = [f"rank {rank}: began at 4, ended at 5" for rank in range(2)]
    assert launch(tmp_path, BUDGET, "resume=reshard", "steps=1", size=2) == two
    assert launch(tmp_path, BUDGET, "resume=reshard", size=2)[0] == "rank 0: began at 5, ended at 5"


def test_what_cannot_be_resharded_is_named_on_every_rank(tmp_path: Path) -> None:
    launch(tmp_path, "steps=1", "sharded", size=2)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    for orders, error, text in (
        (["sharded", "depth=2"], "CheckpointError", "another model or optimizer"),
        (["sharded", "optimizer=SGD"], "CheckpointError", "another model or optimizer"),
        (["ranks=alone"], "ConfigError", "leave out ranks='alone'"),
    ):
        for said in launch(tmp_path, "resume=reshard", *orders, size=3, ok=False):
            assert error in said and text in said, said
        left = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if "-of-3" not in str(path))
        assert left == before
        assert not [path for path in tmp_path.glob("rank-*-of-3/*") if path.suffix in (".swap", ".pt")]
    (node := tmp_path.with_name("node")).mkdir()
    for said in launch(tmp_path, "resume=reshard", "sharded", f"drive=2:{node}", size=3, ok=False):
        assert "rank 1: sees all of them" in said and "rank 2: does not see rank-0-of-2, rank-1-of-2" in said
    (tmp_path / "rank-1-of-2").rename(tmp_path / "elsewhere")
    for said in launch(tmp_path, "resume=reshard", "sharded", size=3, ok=False):
        assert "DirectoryError" in said and "the run has 2 ranks, whose directories are not all here" in said
        assert "rank 2: does not see rank-1-of-2" in said
    (tmp_path / "elsewhere").rename(tmp_path / "rank-1-of-2")
    assert launch(tmp_path, "steps=1", "sharded", size=2)[1] == "rank 1: began at 1, ended at 2"


# --- the choice ---------------------------------------------------------------------------------------------------------


def held(*steps: int, job: str = "a") -> Held:
    return Held("here", "reshard", job if steps else "", tuple((step, 0) for step in steps))


OLD: HeldBySize = {2: {0: held(6, 5), 1: held(5)}}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("mine", "theirs", "chosen"),
    [
        ([held(), held(), held()], OLD, 2),
        ([held(5), held(5), held()], OLD, 2),  # killed before all had committed
        ([held(5), held(5), held(5)], OLD, None),
        ([held(4), held(4), held(4)], OLD, 2),  # of an earlier time with this number of ranks
        ([held(7, 6), held(6), held(7, 6)], OLD, None),
        ([held(7), held(6), held(6)], OLD, None),  # and then they have no step in common
        ([held(), held(), held()], {}, None),
        ([held(), held(), held()], {2: {0: held(0), 1: held(0)}}, None),  # nothing is lost with it
        ([held(), held(), held()], {**OLD, 1: {0: held(9)}}, 1),
        ([held(0, job="b"), held(0, job="c"), held()], OLD, 2),
    ],
)
def test_the_newest_run_that_all_have_is_continued(mine: list[Held], theirs: HeldBySize, chosen: int | None) -> None:
    assert choose_size(mine, [theirs] * len(mine)) == chosen


@pytest.mark.whole
@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ([held(), held()], [{1: {}}, {1: {0: held(3)}}], "rank 0: does not see rank-0-of-1"),
        ([held()], [{2: {0: held(6), 1: held(5)}}], "no step in common"),
        ([held()], [{2: {0: held(6), 1: held(6, job="b")}}], "no step in common"),
        ([held()], [{2: {0: held(6, job=""), 1: held(6, job="")}}], "independent runs"),
        ([held(3, job="b")], [OLD], "of another run"),
        ([held(), held()], [{1: {0: held(3)}}, {1: {0: held(3, job="b")}}], "machines have different runs"),
    ],
)
def test_a_run_that_cannot_be_continued_is_named(mine: list[Held], theirs: list[HeldBySize], said: str) -> None:
    with pytest.raises(swapper.DirectoryError, match=said):
        choose_size(mine, theirs)

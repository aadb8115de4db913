"""Begins a run: opens its directory, and finds the commit to resume from, the same on all ranks that run together.

With `resume="reshard"` that may be the commit of another number of ranks, in other directories. Only their files are read, under a
shared lock that no run can begin with. Nothing of them is changed or removed, so they stay usable, whatever becomes of the new run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swapper.durability.commit import CommitRecord, read_commit, sections_of
from swapper.durability.directory import RunDirectory, ranks_by_size
from swapper.durability.ranks import CommitId, Held, Ranks, choose, describe, host_name, mismatch
from swapper.durability.recovery import Commit, find_commits, resume_from
from swapper.durability.verify import at_rest
from swapper.errors import CheckpointError, ConfigError, DirectoryError, InvariantError, SwapperError
from swapper.io import beneath
from swapper.paging.section import Section
from swapper.runtime.interrupts import close_all
from swapper.runtime.process import naming_limits

Weigh = Callable[[Sequence[Path]], Sequence[float]]
HeldBySize = Mapping[int, Mapping[int, Held]]
"""What ranks of other jobs can resume from: by their number, and by rank."""


@dataclass(frozen=True)
class CommittedRank:
    """One rank of the earlier run.

    Attributes:
        sections: say where their content lies.
        files: the parts of each swap file, by number and drive.
    """

    record: CommitRecord
    sections: Sequence[Section]
    files: Mapping[int, Sequence[Path]]


class EarlierRanks:
    """The runs of other numbers of ranks in a directory. Owns their locks until `close`.

    Args:
        directory: the user's, on the first drive.
        size: this job's number of ranks.
        is_wanted: False looks at nothing.

    Attributes:
        held: what they can resume from.
        ranks: those of the run that `keep` chose.

    Raises:
        CheckpointError: a run is in use, or its record cannot be read.
        DirectoryError: one of its directories is not the user's own.
    """

    def __init__(self, directory: Path, size: int, is_wanted: bool) -> None:
        self._stack = contextlib.ExitStack()
        self._commits: dict[int, dict[int, list[CommitRecord]]] = {}
        self.held: dict[int, dict[int, Held]] = {}
        self.ranks: list[CommittedRank] = []
        self._directory = directory
        try:
            for other, ranks in ranks_by_size(directory).items() if is_wanted else ():
                for rank in ranks if other != size else ():
                    self._open(other, rank)
        except BaseException:
            self.close()
            raise

    def _open(self, size: int, rank: int) -> None:
        path = self._path(size, rank)
        beneath.hold(path)
        self._stack.callback(beneath.release, path)
        self._stack.enter_context(at_rest(path, "reshard"))
        commits = find_commits(path)
        self._commits.setdefault(size, {})[rank] = commits
        self.held.setdefault(size, {})[rank] = Held.of(f"{host_name()}:{path}", "reshard", commits)

    def _path(self, size: int, rank: int) -> Path:
        return self._directory / f"rank-{rank}-of-{size}"

    def keep(self, size: int) -> None:
        """Take the run of `size` ranks, all of which are here, as of the newest step that all of them have."""
        chosen = common_commit(list(self.held[size].values()))
        for rank, commits in sorted(self._commits[size].items()):
            record = next(commit for commit in commits if commit.id == chosen)
            self.ranks.append(CommittedRank(record, *sections_of(self._path(size, rank), record)))

    @property
    def first(self) -> CommitRecord:
        """The first rank's commit, whose `extra` and registered objects count; random numbers are nobody's."""
        if not self.ranks:
            raise InvariantError("no earlier run was chosen")
        return dataclasses.replace(self.ranks[0].record, rng=None)

    def close(self) -> None:
        """Release the locks, and forget what was found. Idempotent."""
        self._stack.close()
        self._commits, self.ranks = {}, []


@dataclass(frozen=True)
class Beginning:
    """What a run begins with.

    Attributes:
        directory: open and locked.
        record: the commit to resume from; None: a new run, or `earlier`.
        fallback: the commit before it, if that is still usable.
        earlier: the run of another number of ranks that this one continues, if any; to be closed.
    """

    directory: RunDirectory
    record: CommitRecord | None
    fallback: Commit | None = None
    earlier: EarlierRanks | None = None

    @property
    def resumed(self) -> CommitRecord | None:
        """The commit whose step, `extra` and registered objects count."""
        return self.record if self.earlier is None else self.earlier.first


def begin_run(
    directories: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], resume: str, ranks: Ranks, weigh: Weigh
) -> Beginning:
    """Open the directory, and find what the run begins with.

    Args: as of RunDirectory.

    Raises:
        DirectoryError: as RunDirectory; or the ranks' directories do not match.
        CheckpointError: the last commit cannot be read.
        StateError: another rank could not open its own.
    """
    opened: list[RunDirectory] = []
    seen: list[EarlierRanks] = []

    def open_mine() -> list[CommitRecord]:
        if resume == "reshard" and ranks.size > 1 and not ranks.are_together:
            raise ConfigError(
                "resume='reshard' needs ranks that resume from the same step: leave out ranks='alone', and call "
                "init_process_group before the manager is made"
            )
        with _usable(opened):
            opened.append(RunDirectory(directories, resume, ranks, weigh))
            commits = _commits_of(opened[0])
            seen.append(EarlierRanks(opened[0].path.parent, ranks.size, is_wanted=resume == "reshard"))
            if resume == "auto" and commits:
                refuse_newer(opened[0].path.parent, ranks.size, commits[0])
            return commits

    def tell(commits: list[CommitRecord]) -> tuple[Held, dict[int, dict[int, Held]], str, list[str]]:
        held = Held.of(f"{host_name()}:{opened[0].path}", resume, commits)
        return held, seen[0].held, secrets.token_hex(8), opened[0].drive_names()

    try:
        commits, answers = ranks.settle("open its directory", open_mine, tell)
        held, theirs, starts, drives = zip(*answers, strict=True)
        if ranks.are_together:
            ranks.start = starts[0]
        with _usable(opened):
            beginning = _begin(opened[0], commits, held, theirs, starts[0], seen[0])
            if ranks.are_together:
                opened[0].share_drives(drives)
            return beginning
    except BaseException:
        close_all([owner.close for owners in (seen, opened, [ranks]) for owner in owners])
        raise


def _begin(
    directory: RunDirectory,
    commits: list[CommitRecord],
    held: Sequence[Held],
    theirs: Sequence[dict[int, dict[int, Held]]],
    start: str,
    earlier: EarlierRanks,
) -> Beginning:
    size = choose_size(held, theirs)
    if size is not None:
        earlier.keep(size)
        directory.job = earlier.first.job or start
        return Beginning(directory, None, None, earlier)
    earlier.close()
    chosen, are_together = choose(held), directory.ranks.are_together
    if chosen is None and are_together:
        directory.start_over()
    is_one_of_several = directory.ranks.size > 1 and not are_together
    directory.job = held[0].job if chosen is not None else "" if is_one_of_several else start
    return Beginning(directory, *resume_from(directory.path, commits, chosen, not are_together))


@contextmanager
def _usable(opened: Sequence[RunDirectory]) -> Iterator[None]:
    try:
        with naming_limits("open", opened[0].path if opened else ""):
            yield
    except OSError as error:
        if isinstance(error, SwapperError):
            raise
        where = f"{opened[0].path} has what cannot be used" if opened else "the directory cannot be used"
        raise DirectoryError(f"{where} ({error}): inspect it, and remove what swapper did not make") from error


def _commits_of(directory: RunDirectory) -> list[CommitRecord]:
    commits = find_commits(directory.path)
    for commit in commits:
        if (commit.rank, commit.world_size) != (directory.ranks.rank, directory.ranks.size):
            raise DirectoryError(
                f"{directory.path} holds the run of rank {commit.rank} of {commit.world_size}: somebody renamed it. Give "
                f"it its own, rank-{commit.rank}-of-{commit.world_size}, back"
            )
    return commits


# --- another number of ranks ------------------------------------------------------------------------------------------


def common_commit(held: Sequence[Held]) -> CommitId | None:
    """Return the newest commit that all have, of one run; None if there is none. Pure."""
    if len({each.job for each in held}) > 1:
        return None
    return max(set.intersection(*(set(each.commits) for each in held)), default=None)


def choose_size(held: Sequence[Held], theirs: Sequence[HeldBySize]) -> int | None:
    """Return the number of ranks whose run is to be continued; None: that of this job's, or none. Pure.

    Args:
        held: what each rank of this job can resume from.
        theirs: which other ranks' directories each of them sees.

    Raises:
        DirectoryError: the newest run cannot be continued; lists what each rank sees.
    """
    if any(each.resume != "reshard" for each in held):
        return None
    newest = {
        size: max(commit for seen in theirs for each in seen.get(size, {}).values() for commit in each.commits)
        for size in {size for seen in theirs for size in seen}
    }
    mine, last = common_commit(held), max((commit for each in held for commit in each.commits), default=(-1, 0))
    size = max(newest, key=lambda size: (newest[size], size), default=None)
    if size is None or newest[size][0] == 0 or last > newest[size] or (mine is not None and mine >= newest[size]):
        return None
    _check_visible(held, theirs, size)
    old = [theirs[0][size][rank] for rank in range(size)]
    common = common_commit(old)
    if common is None or not old[0].job:
        raise DirectoryError(
            mismatch(
                f"the {size} ranks of the run to be resharded have no step in common"
                if old[0].job
                else f"the {size} ranks of the run to be resharded were independent runs",
                [each.describe() for each in old],
                "load a snapshot with resume='discard'",
            )
        )
    if mine is not None and mine >= common:
        return None
    for rank, each in enumerate(held):
        if each.job != old[0].job and any(step > 0 for step, _ in each.commits):
            raise DirectoryError(
                f"rank {rank} has {each.describe()}, of another run than {old[0].describe()}, which would be resharded: move one "
                "of them to another directory"
            )
    return size


def _check_visible(held: Sequence[Held], theirs: Sequence[HeldBySize], size: int) -> None:
    """Raise DirectoryError unless all ranks see the directories of all `size` ranks, and the same ones."""
    lacking = [[old for old in range(size) if old not in seen.get(size, {})] for seen in theirs]
    lines = [
        f"does not see {', '.join(f'rank-{old}-of-{size}' for old in missing)} ({each.place})"
        if missing
        else f"sees all of them ({each.place})"
        for each, missing in zip(held, lacking, strict=True)
    ]
    remedy = (
        "make the directories of all ranks visible on all machines (a shared file system), start as many ranks as there were, or "
        "load a snapshot with resume='discard'"
    )
    if any(lacking):
        raise DirectoryError(mismatch(f"the run has {size} ranks, whose directories are not all here", lines, remedy))
    found = [{old: (each.job, each.commits) for old, each in seen[size].items()} for seen in theirs]
    if any(each != found[0] for each in found):
        texts = ["; ".join(each.describe() for each in seen[size].values()) for seen in theirs]
        raise DirectoryError(mismatch(f"machines have different runs of {size} ranks", texts, remedy))


def refuse_newer(directory: Path, size: int, own: CommitRecord) -> None:
    """Raise DirectoryError if the run went on with another number of ranks than `size`, from or after the commit `own`.

    Args:
        directory: of the run.
        size: how many ranks it has now.
        own: the commit that this rank resumes.
    """
    for other, ranks in ranks_by_size(directory).items():
        for rank in ranks if other != size and own.job else ():
            with contextlib.suppress(CheckpointError):  # it is not needed
                record = read_commit(directory / f"rank-{rank}-of-{other}")
                if record is not None and record.job == own.job and record.id > own.id:
                    raise DirectoryError(
                        f"the run in {directory} went on with {other} ranks to {describe(record.id)}, and this job of {size} "
                        f"would go back to {describe(own.id)}: start {other} ranks, or pass resume='reshard' to go on with {size}, "
                        f"or move rank-*-of-{other} away to go back"
                    )

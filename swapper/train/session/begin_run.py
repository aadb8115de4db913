"""Begins a manager's run: opens its directory, and finds the commit to go on from, the same on all ranks that are together."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from swapper.durability.commit import CommitRecord
from swapper.durability.directory import RunDirectory
from swapper.durability.fallback import Commit, find_commits, go_on_from
from swapper.durability.ranks import Held, Ranks, choose, host_name
from swapper.errors import DirectoryError, SwapperError


def begin(
    directories: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    resume: str,
    ranks: Ranks,
    weigh: Callable[[Sequence[Path]], Sequence[float]],
) -> tuple[RunDirectory, CommitRecord | None, Commit | None]:
    """Return the open directory, the commit to go on from (None: a new run), and the one before, if that is still a way back.

    Args: as of RunDirectory.

    Raises:
        DirectoryError: as RunDirectory; or ranks hold what does not fit together.
        CheckpointError: the last commit cannot be read.
        StateError: another rank could not open its own.
    """
    opened: list[RunDirectory] = []

    def open_mine() -> tuple[RunDirectory, list[CommitRecord]]:
        with _explained(opened):
            opened.append(RunDirectory(directories, resume, ranks, weigh))
            return opened[0], _commits_of(opened[0])

    def tell(found: tuple[RunDirectory, list[CommitRecord]]) -> tuple[Held, str]:
        directory, commits = found
        job = commits[0].job if commits else ""
        held = Held(f"{host_name()}:{directory.path}", resume, job, tuple(commit.id for commit in commits))
        return held, secrets.token_hex(8)

    try:
        (directory, commits), answers = ranks.settle("open its directory", open_mine, tell)
        if not ranks.are_together:
            directory.job = commits[0].job if commits else ""
            with _explained(opened):
                chosen = commits[0].id if commits else None
                return directory, *go_on_from(directory.path, commits, chosen, keep_before=True)
        held, jobs = zip(*answers, strict=True)
        chosen = choose(held)
        with _explained(opened):
            if chosen is None:
                directory.begin_anew()
            directory.job = jobs[0] if chosen is None else held[0].job
            return directory, *go_on_from(directory.path, commits, chosen, keep_before=False)
    except BaseException:
        for directory in opened:
            directory.close()
        ranks.close()
        raise


@contextmanager
def _explained(opened: Sequence[RunDirectory]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, SwapperError):
            raise
        where = f"{opened[0].path} has what cannot be used" if opened else "the directory cannot be used"
        raise DirectoryError(
            f"{where} ({error}): look at what is there, and remove what swapper did not make"
        ) from error


def _commits_of(directory: RunDirectory) -> list[CommitRecord]:
    commits = find_commits(directory.path)
    for commit in commits:
        if (commit.rank, commit.world_size) != (directory.rank, directory.world_size):
            raise DirectoryError(
                f"{directory.path} holds the run of rank {commit.rank} of {commit.world_size}: somebody gave it another name. Give "
                f"it its own, rank-{commit.rank}-of-{commit.world_size}, back"
            )
    return commits

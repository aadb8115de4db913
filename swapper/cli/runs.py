"""Implements `swapper runs` and `swapper clean`: the runs below a directory, and what dead ones have left.

[Note: leftovers] A swap file is a leftover if no process has the run open and no record names it: a run that never
committed can never be resumed, and a killed one may have made files that its commit does not name. A manager removes
the same files when it begins in that directory, and when it closes with a commit. On further drives the records of the
first drive decide; without them nothing is removed. Only names that swapper gives to swap files count, in directories
that only their user may write to.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from swapper.cli.command import make_console, print_table, reported
from swapper.durability.commit import CommitRecord, named_files, plans_of, read_commit
from swapper.durability.directory import COMMIT_NAME, LockedDirectory
from swapper.errors import CheckpointError, ConfigError, DirectoryError, SwapperError
from swapper.io import beneath
from swapper.io.drives import DrivesRecord, read_record
from swapper.runtime.sizes import format_bytes

_RUN = re.compile(r"rank-\d{1,9}-of-\d{1,9}")
_SWAP_FILE = re.compile(r"(turn|scratch)-\d+\.swap")


def runs(
    directory: Annotated[Path, typer.Argument(help="Runs in it and below it are listed.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the runs below a directory: model, step, size, and whether a process uses them.

    One line for each rank's directory. Exit code: 1 if one cannot be read.
    """
    with reported(make_console(stderr=True)):
        found = list(find_runs(directory))
    described = [_describe(run) for run in found]
    if as_json:
        typer.echo(json.dumps(described, indent=2))
    elif found:
        columns = ("step", "parameters", "size", "state", "optimizer", "directory")
        rows = [_row(run, of) for run, of in zip(found, described, strict=True)]
        print_table(columns, rows, left=("state", "optimizer", "directory"))
    else:
        typer.echo(f"no run in {directory} or below")
    raise typer.Exit(1 if any(run.problem for run in found) else 0)


def clean(
    directory: Annotated[Path, typer.Argument(help="Runs in it and below it are looked at.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: what was, or would be, removed.")] = False,
) -> None:
    """Remove swap files that nothing can use, of runs that ended without a commit or were killed.

    It lists them and asks first. It never removes a commit, what a commit names, a snapshot, a file that swapper did
    not make, or anything of a run that is in use. Exit code: 1 if something could not be removed or read.
    """
    console = make_console(stderr=True)
    with reported(console):
        found = list(find_runs(directory))
        left = {file: file.stat().st_blocks * 512 for run in found for file in run.leftovers}
        problems = [f"{run.path}: {run.problem}" for run in found if run.problem]
        if not as_json:
            for file, nbytes in left.items():
                typer.echo(f"{format_bytes(nbytes):>11}  {file}")
        removed, freed = [], 0
        if left and _may_remove(yes, as_json, len(left), sum(left.values())):
            for run in [run for run in found if run.leftovers]:
                try:
                    freed += remove_leftovers(run.path, left.__contains__)
                    removed += [str(file) for file in run.leftovers if not file.exists()]
                except SwapperError as error:
                    problems.append(str(error))
    if as_json:
        leftovers = [{"path": str(file), "bytes": nbytes} for file, nbytes in left.items()]
        typer.echo(json.dumps({"leftovers": leftovers, "removed": removed, "problems": problems}, indent=2))
    else:
        done = f"removed {len(removed)} files, {format_bytes(freed)}" if removed else "nothing was removed"
        typer.echo(done if left else f"nothing to remove in {directory} or below")
        for problem in problems:
            typer.echo(problem, err=True)
    raise typer.Exit(1 if problems else 0)


def _may_remove(yes: bool, as_json: bool, count: int, nbytes: int) -> bool:
    if yes or as_json:
        return yes
    if not sys.stdin.isatty():
        raise ConfigError("nobody can be asked, so nothing was removed: say --yes to remove these")
    return typer.confirm(f"Remove these {count} files, {format_bytes(nbytes)}?")


def _describe(run: RunOnDisk) -> dict[str, object]:
    record = run.record
    return {
        "path": str(run.path),
        "step": None if record is None else record.step,
        "optimizer": None if record is None else record.optimizer.rpartition(".")[2],
        "parameters": run.parameters,
        "bytes": run.nbytes,
        "in_use_by": run.process,
        "part_of": None if run.main is None else str(run.main),
        "leftovers": [str(file) for file in run.leftovers],
        "problem": run.problem or None,
    }


def _row(run: RunOnDisk, described: dict[str, object]) -> list[str]:
    state = "free" if run.process is None else f"in use by {run.process}"
    if run.problem:
        state = "unreadable"
    elif run.main is not None:
        state += f", part of {run.main}"
    elif run.record is None and run.process is None:
        state = "never committed"
    step, parameters, optimizer = (described[name] for name in ("step", "parameters", "optimizer"))
    cells = (step, parameters, format_bytes(run.nbytes), state, optimizer, run.path)
    return ["-" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells]


# --- the runs themselves ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunOnDisk:
    """One rank's run, or its part on a further drive.

    Attributes:
        process: number of the process that has it open, or "unknown"; None: nobody.
        nbytes: of its files, as they take space.
        record: of the last commit; None: there is none, or not here.
        main: the run's directory on its first drive, if that is another.
        leftovers: files that nothing can use. See [Note: leftovers].
        problem: the reason why it cannot be read, or "".
    """

    path: Path
    process: str | None
    nbytes: int
    record: CommitRecord | None = None
    parameters: int | None = None
    main: Path | None = None
    leftovers: tuple[Path, ...] = ()
    problem: str = ""


def find_runs(directory: Path) -> Iterator[RunOnDisk]:
    """Yield the runs in `directory`, of ranks and in all directories below, sorted. Follows no links.

    Raises:
        DirectoryError: there is no such directory, or one cannot be listed.
    """
    if not directory.is_dir():
        raise DirectoryError(f"{directory} is not a directory: name one that runs lie in or below")

    def refuse(error: OSError) -> None:
        raise DirectoryError(f"cannot list {error.filename}: {error.strerror}") from error

    for place, names, files in os.walk(directory.absolute(), onerror=refuse):
        names.sort()
        path = Path(place)
        if _RUN.fullmatch(path.name) and "lock" in files:
            names.clear()
            yield look_at(path)


def look_at(path: Path) -> RunOnDisk:
    """Describe the run in `path`. Changes nothing."""
    nbytes = 0
    try:
        process = _holder(path)
        nbytes = sum(beneath.status(file).st_blocks * 512 for file in beneath.files(path))
        record = read_commit(path) if beneath.exists(path / COMMIT_NAME) else None
        parameters = None if record is None else _parameters_in(path, record)
        drives = read_record(path)
        main = None if drives is None or drives.index == 0 else drives.drives.directories[0]
        found = () if process is not None else tuple(_leftovers(path, drives))
    except (CheckpointError, DirectoryError, OSError) as error:
        return RunOnDisk(path, None, nbytes, problem=str(error))
    return RunOnDisk(path, process, nbytes, record, parameters, main, found)


def remove_leftovers(path: Path, confirmed: Callable[[Path], bool] = lambda file: True) -> int:
    """Remove the leftovers of the run in `path`, and the directory of a run that is gone; return their bytes.

    Args:
        confirmed: returns True for a file that may be removed: what was shown to the user before.

    Raises:
        DirectoryError: it is in use, or others may write to it.
        CheckpointError: its commit cannot be read.
    """
    nbytes = 0
    with closing(LockedDirectory(path.parent, path.name)) as locked:
        for file in [file for file in _leftovers(path, read_record(path)) if confirmed(file)]:
            nbytes += beneath.status(file).st_blocks * 512
            beneath.unlink(file)
        if not locked.held():
            locked.clear()  # records beside swap files that are gone
            beneath.unlink(path / "lock")
            with suppress(OSError):  # something else is in it
                path.rmdir()
    return nbytes


def _leftovers(path: Path, drives: DrivesRecord | None) -> Iterator[Path]:
    """Yield the run's files that no record names, where the records are."""
    records = path if drives is None or drives.index == 0 else drives.drives.directories[0]
    if records != path:
        theirs = read_record(records) if records.is_dir() else None
        if theirs is None or drives is None or theirs.drives.id != drives.drives.id or _holder(records) is not None:
            return  # an unmounted drive, or another run
    named = named_files(records)
    for file in beneath.files(path):
        if _SWAP_FILE.fullmatch(file.name) and file.name not in named and file.is_file() and not file.is_symlink():
            yield file


def _parameters_in(path: Path, record: CommitRecord) -> int:
    try:
        specs = [slot.spec for plan in plans_of(record.plans) for slot in plan.slots]
    except (AttributeError, LookupError, ValueError) as error:
        raise CheckpointError(f"{path}: its commit record contradicts itself ({error!r})") from error
    return sum(spec.numel for spec in specs if spec.kind == "param")


def _holder(path: Path) -> str | None:
    """Return the number of the process that holds the run's lock; None if nobody does."""
    descriptor = beneath.open_file(path / "lock", os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
    finally:
        os.close(descriptor)
    return None

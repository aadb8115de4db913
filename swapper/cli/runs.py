"""Implements `swapper runs` and `swapper clean`: the runs below a directory, and what dead ones have left."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from swapper.cli.command import print_table, reported
from swapper.durability.runs import RunOnDisk, find_runs
from swapper.durability.runs import clean as clean_run
from swapper.durability.stored_sections import parse_plans
from swapper.errors import ConfigError, SwapperError
from swapper.runtime.sizes import format_bytes


def runs(
    directory: Annotated[Path, typer.Argument(help="Runs in it and below it are listed.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the runs below a directory: model, step, size, and whether a process uses them.

    One line for each rank's directory. Exit code: 1 if one cannot be read.
    """
    with reported(Console(stderr=True)):
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
    console = Console(stderr=True)
    with reported(console):
        found = list(find_runs(directory))
        left = {file: _space(file) for run in found for file in run.leftovers}
        problems = [f"{run.path}: {run.problem}" for run in found if run.problem]
        if not as_json:
            for file, nbytes in left.items():
                typer.echo(f"{format_bytes(nbytes):>11}  {file}")
        removed, freed = [], 0
        if left and _may_remove(yes, as_json, len(left), sum(left.values())):
            for run in [run for run in found if run.leftovers]:
                try:
                    freed += clean_run(run.path, left.__contains__)
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


def _space(file: Path) -> int:
    return file.stat().st_blocks * 512


def _describe(run: RunOnDisk) -> dict[str, Any]:
    record = run.record
    tensors = [] if record is None else [t for _, tensors in parse_plans(record.plans) for t in tensors]
    return {
        "path": str(run.path),
        "step": None if record is None else record.step,
        "optimizer": None if record is None else record.optimizer.rpartition(".")[2],
        "parameters": None if record is None else sum(t.numel for t in tensors if t.kind == "param"),
        "bytes": run.nbytes,
        "in_use_by": run.process,
        "part_of": None if run.main is None else str(run.main),
        "leftovers": [str(file) for file in run.leftovers],
        "problem": run.problem or None,
    }


def _row(run: RunOnDisk, described: dict[str, Any]) -> list[str]:
    state = "free" if run.process is None else f"in use by {run.process}"
    if run.problem:
        state = "unreadable"
    elif run.main is not None:
        state += f", part of {run.main}"
    elif run.record is None and run.process is None:
        state = "never committed"
    cells = (
        described["step"],
        described["parameters"],
        format_bytes(run.nbytes),
        state,
        described["optimizer"],
        run.path,
    )
    return ["-" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells]

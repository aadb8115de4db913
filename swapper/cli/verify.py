"""`swapper verify PATH`: every byte of a snapshot, or of a run's last commit, against its checksums."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from swapper.durability.verify import Fault, Report
from swapper.durability.verify import verify as verify_path
from swapper.errors import SwapperError
from swapper.runtime.sizes import format_bytes

SHOWN_TENSORS = 3


def verify(
    path: Annotated[Path, typer.Argument(help="A snapshot, a run's directory, or any torch checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Check every page and CRC, and name what is damaged.

    Exit code: 0: whole; 1: damaged; 2: it cannot be checked (no such file, in use, no checksums in it as in a safetensors file, or
    not of a kind that swapper reads).
    """
    console = Console(stderr=as_json)
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("verifying", total=None)
            reports = verify_path(path, lambda done, total: bar.update(task, completed=done, total=total))
    except (SwapperError, OSError) as error:
        console.print(f"[red]Error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        for report in reports:
            _show(report, console)
    raise typer.Exit(1 if any(report.faults for report in reports) else 0)


def _show(report: Report, console: Console) -> None:
    for fault in report.faults:
        console.print(f"[red]corrupt:[/red] {escape(_describe(fault))}", soft_wrap=True, highlight=False)
    checked = format_bytes(report.checked_bytes)
    if report.faults:
        verdict = f"[red]{len(report.faults)} faults[/red] in {checked}"
    elif report.kind == "torch checkpoint":
        verdict = (
            f"[green]well[/green]: {checked} in records; it has no manifest, so what lies between them was not checked"
        )
    else:
        verdict = f"[green]well[/green]: {checked}, every byte"
    console.print(f"{escape(report.path)} ({report.kind}): {verdict}", soft_wrap=True, highlight=False)


def _describe(fault: Fault) -> str:
    place = f"{fault.path}, {fault.nbytes} bytes at offset {fault.offset}"
    names = ", ".join(fault.tensors[:SHOWN_TENSORS])
    if len(fault.tensors) > SHOWN_TENSORS:
        names += f" and {len(fault.tensors) - SHOWN_TENSORS} more"
    parts = [fault.record and f"in {fault.record}", names and f"of {names}", fault.what]
    return ": ".join([place, ", ".join(part for part in parts if part)])

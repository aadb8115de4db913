"""Implements `swapper inspect`, `swapper verify` and `swapper export`: checkpoints as files, in bounded memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from swapper.checkpoint.exporting import FORMATS, SAYS_QUANTIZED, WHAT, select
from swapper.checkpoint.exporting import export as run
from swapper.checkpoint.inspecting import inspect as look
from swapper.checkpoint.quantization import SCHEMES, Loss
from swapper.cli.command import make_console, make_progress, print_table, reported
from swapper.durability.verify import Fault, Report
from swapper.durability.verify import verify as verify_path
from swapper.options import parse_choice
from swapper.runtime.sizes import format_bytes, parse_bytes


def inspect(
    path: Annotated[
        Path, typer.Argument(help="A file; or a directory of Hugging Face, torch.distributed.checkpoint, or a run.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the tensors of a checkpoint: shapes, dtypes, locations, alignment, step, checksums.

    Reads any file of torch.save (swapper's snapshots too), safetensors, Hugging Face directories, directories of
    torch.distributed.checkpoint, and a run's own directory (its last commit). Runs no code of a file.
    """
    with reported(make_console(stderr=True)):
        found = look(path)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    _show_tensors(found)


def _show_tensors(found: dict[str, Any]) -> None:
    columns = ["tensor", "dtype", "shape", "bytes", "offset", "aligned to"]
    files = {tensor["file"] for tensor in found["tensors"]}
    extra = [key for key in ("crc32", "pieces") if any(key in tensor for tensor in found["tensors"])]
    columns += [{"crc32": "record's CRC-32", "pieces": "pieces"}[key] for key in extra]
    rows = []
    for tensor in found["tensors"]:
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        shape += f" strides {tuple(tensor['stride'])}" if tensor["stride"] else ""
        place = "in your file" if tensor["offset"] is None else f"{tensor['offset']:,}"
        place += f" of {tensor['file']}" if len(files) > 1 and tensor["file"] else ""
        row = [tensor["name"], tensor["dtype"], shape, f"{tensor['bytes']:,}", place, str(tensor["alignment"] or "")]
        rows.append([*row, *(str(tensor.get(key, "")) for key in extra)])
    print_table(columns, rows, left=("tensor", "dtype", "shape"))
    step = f", step {found['step']}" if found["step"] is not None else ""
    size = format_bytes(found["tensor_bytes"])
    count = f"{len(found['tensors'])} tensors in {len(files)} files"
    typer.echo(f"{found['path']}: {found['kind']}, {count}, {size}{step}")
    for name, value in found["metadata"].items():
        typer.echo(f"{name}: {value}")


SHOWN_TENSORS = 3  # of a fault


def verify(
    path: Annotated[Path, typer.Argument(help="A snapshot, a run's directory, or any torch checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Check every page and CRC, and name what is damaged.

    Exit code: 0: whole; 1: damaged; 2: it cannot be checked (no such file, in use, without checksums such as a
    safetensors file, or of an unknown kind).
    """
    console = make_console(stderr=as_json)
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with reported(console, failure_code=2), make_progress(console, *columns) as bar:
        task = bar.add_task("verifying", total=None)
        reports = verify_path(path, lambda done, total: bar.update(task, completed=done, total=total))
    if as_json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        for report in reports:
            _show_report(report, console)
    raise typer.Exit(1 if any(report.faults for report in reports) else 0)


def _show_report(report: Report, console: Console) -> None:
    for fault in report.faults:
        console.print(f"[red]corrupt:[/red] {escape(_describe_fault(fault))}")
    checked = format_bytes(report.checked_bytes)
    if report.faults:
        verdict = f"[red]{len(report.faults)} faults[/red] in {checked}"
    elif report.kind == "torch checkpoint":
        verdict = f"[green]well[/green]: {checked} in records; it has no manifest, so the rest was not checked"
    else:
        verdict = f"[green]well[/green]: {checked}, every byte"
    console.print(f"{escape(report.path)} ({report.kind}): {verdict}")


def _describe_fault(fault: Fault) -> str:
    place = f"{fault.path}, {fault.nbytes} bytes at offset {fault.offset}"
    names = ", ".join(fault.tensors[:SHOWN_TENSORS])
    if len(fault.tensors) > SHOWN_TENSORS:
        names += f" and {len(fault.tensors) - SHOWN_TENSORS} more"
    parts = [fault.record and f"in {fault.record}", names and f"of {names}", fault.what]
    return ": ".join([place, ", ".join(part for part in parts if part)])


def export(
    source: Annotated[Path, typer.Argument(help="A snapshot, a file of torch.save or safetensors, or a directory.")],
    target: Annotated[Path, typer.Argument(help="What to make: a file, or for huggingface and dcp a directory.")],
    to: Annotated[str, typer.Option(help="torch, safetensors, huggingface or dcp.")],
    what: Annotated[str, typer.Option(help="model, or all: the optimizer's state and the rest too.")] = "model",
    shard: Annotated[str, typer.Option(help="Maximum size of a file of a Hugging Face directory.")] = "5GB",
    quantize: Annotated[
        str | None, typer.Option(help="int8 or int4: large matrices in 8 or 4 bits a weight, for swapper.load.")
    ] = None,
    keep: Annotated[list[str] | None, typer.Option(help="Names (with * and ?) that are not quantized.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written, and each tensor's error, as JSON.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
) -> None:
    """Write a checkpoint in another format, at the speed of the drive, in 100 MB in addition to Python and torch.

    From and to: torch (swapper's snapshots, any file of torch.save), safetensors, Hugging Face directories, and
    directories of torch.distributed.checkpoint. From a run's own directory: its parameters as of the last commit. The
    result appears when it is complete, or not at all.
    """
    console = make_console(stderr=True, quiet=quiet)
    with reported(make_console(stderr=True), words={"pass overwrite=True": "say --overwrite"}):
        parse_choice(to, "--to", FORMATS)
        parse_choice(what, "--what", WHAT)
        shard_bytes = parse_bytes(shard, "--shard")
        if quantize is not None:
            parse_choice(quantize, "--quantize", tuple(SCHEMES))
        selection = select(source, what)
        with _bar(console, f"{source.name} to {to}", selection.nbytes) as progress:
            found = run(
                source,
                target,
                to,
                what=what,
                shard_bytes=shard_bytes,
                overwrite=overwrite,
                selection=selection,
                progress=progress,
                quantize=quantize,
                keep=keep or (),
            )
        text = f"{target}: {len(selection.tensors)} tensors, {format_bytes(_nbytes(target))}"
        console.print(escape(text))
        if quantize is not None:
            _show_losses(console, quantize, found)
        left_out = selection.left_out if (to, what) != ("torch", "all") else []
        if to not in SAYS_QUANTIZED:
            left_out += [f"metadata of safetensors: {key}" for key in selection.metadata if key != "format"]
        if left_out:
            some = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
            console.print(escape(f"left out: {len(left_out)} ({some})"))
    if as_json:
        errors = {name: asdict(loss) for name, loss in found.items()}
        written = {"target": str(target), "tensors": len(selection.tensors), "nbytes": _nbytes(target)}
        typer.echo(json.dumps({**written, "left_out": left_out, "errors": errors}, indent=2))


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


def _show_losses(console: Console, quantize: str, losses: Mapping[str, Loss]) -> None:
    """Show the errors by layer: names that differ only in numbers share a line, with the worst of them."""
    kinds: dict[str, list[Loss]] = {}
    for name, loss in losses.items():
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(loss)
    table = Table(title=f"Error of {quantize}, to the root mean square of the values", title_justify="left")
    for column in ("tensors", "", "least", "most", "largest single error"):
        table.add_column(column, justify="left" if column == "tensors" else "right")
    for kind, some in kinds.items():
        relative = [loss.relative for loss in some]
        largest = max(loss.largest_error for loss in some)
        table.add_row(escape(kind), str(len(some)), f"{min(relative):.3%}", f"{max(relative):.3%}", f"{largest:.3g}")
    console.print(table)


@contextmanager
def _bar(console: Console, title: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with make_progress(console, TextColumn("{task.description}"), *columns) as bar:
        task = bar.add_task(escape(title), total=nbytes)
        yield lambda moved: bar.advance(task, moved)

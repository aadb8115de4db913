"""`swapper export`: a checkpoint in another format, without the memory for it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from swapper.cli.failing import reported
from swapper.options import parse_choice
from swapper.runtime.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from swapper.checkpoint.quantizing import Loss


def export(
    source: Annotated[Path, typer.Argument(help="A snapshot, a file of torch.save or safetensors, or a directory.")],
    target: Annotated[Path, typer.Argument(help="What to make: a file, or for huggingface and dcp a directory.")],
    to: Annotated[str, typer.Option(help="torch, safetensors, huggingface or dcp.")],
    what: Annotated[str, typer.Option(help="model, or all: the optimizer's state and the rest too.")] = "model",
    shard: Annotated[str, typer.Option(help="The most that a file of a Hugging Face directory holds.")] = "5GB",
    quantize: Annotated[
        str | None, typer.Option(help="int8 or int4: large matrices in as many bits, for swapper.load.")
    ] = None,
    keep: Annotated[list[str] | None, typer.Option(help="Names (with * and ?) that are not quantised.")] = None,
    report: Annotated[Path | None, typer.Option("--json", help="Write each tensor's error there.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
) -> None:
    """Write a checkpoint in another format, at the speed of the drive and within 100 MB beside Python and torch.

    From and to: torch (swapper's snapshots, any file of torch.save), safetensors, Hugging Face directories, and directories of
    torch.distributed.checkpoint. The result appears when it is complete, or not at all.
    """
    console = Console(stderr=True, quiet=quiet)
    with reported(), _terminated_like_interrupted():
        from swapper.checkpoint.exporting import FORMATS, WHAT, select
        from swapper.checkpoint.exporting import export as run
        from swapper.checkpoint.quantizing import SCHEMES

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
        console.print(escape(text), highlight=False, soft_wrap=True)
        if quantize is not None:
            _show_losses(console, quantize, found)
        if report is not None:
            report.write_text(json.dumps({name: asdict(loss) for name, loss in found.items()}, indent=2) + "\n")
        if selection.left_out and (to, what) != ("torch", "all"):
            some = ", ".join(selection.left_out[:3]) + (", ..." if len(selection.left_out) > 3 else "")
            console.print(escape(f"left out: {len(selection.left_out)} ({some})"), highlight=False, soft_wrap=True)


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


def _show_losses(console: Console, quantize: str, losses: Mapping[str, Loss]) -> None:
    """By layer: names that differ in their numbers only share a line, with the worst of them."""
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
def _bar(console: Console, title: str, nbytes: int) -> Iterator[Any]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=console.quiet) as bar:
        task = bar.add_task(escape(title), total=nbytes)
        yield lambda moved: bar.advance(task, moved)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: nothing is left behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""`swapper export`: a checkpoint in another format, without the memory for it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from swapper.cli.failing import reported
from swapper.config import format_bytes, parse_bytes, parse_choice


def export(
    source: Annotated[Path, typer.Argument(help="A snapshot, a file of torch.save or safetensors, or a directory.")],
    target: Annotated[Path, typer.Argument(help="What to make: a file, or for huggingface and dcp a directory.")],
    to: Annotated[str, typer.Option(help="torch, safetensors, huggingface or dcp.")],
    what: Annotated[str, typer.Option(help="model, or all: the optimizer's state and the rest too.")] = "model",
    shard: Annotated[str, typer.Option(help="The most that a file of a Hugging Face directory holds.")] = "5GB",
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

        parse_choice(to, "--to", FORMATS)
        parse_choice(what, "--what", WHAT)
        shard_bytes = parse_bytes(shard, "--shard")
        selection = select(source, what)
        with _bar(console, f"{source.name} to {to}", selection.nbytes) as progress:
            run(
                source,
                target,
                to,
                what=what,
                shard_bytes=shard_bytes,
                overwrite=overwrite,
                selection=selection,
                progress=progress,
            )
        count = len(selection.tensors)
        console.print(
            escape(f"{target}: {count} tensors, {format_bytes(selection.nbytes)}"), highlight=False, soft_wrap=True
        )
        if selection.left_out and (to, what) != ("torch", "all"):
            some = ", ".join(selection.left_out[:3]) + (", ..." if len(selection.left_out) > 3 else "")
            console.print(escape(f"left out: {len(selection.left_out)} ({some})"), highlight=False, soft_wrap=True)


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

"""Holds what commands share: errors and signals become exit codes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, ProgressColumn

from swapper.errors import ConfigError, SwapperError
from swapper.io.replacing import make_parents

INTERRUPTED = 130  # exit code, 128 + SIGINT
PIPED_COLUMNS = 4096
"""Of a table that is piped: no row is wrapped, so that grep finds whole ones."""
ARGUMENT = {" with --directory": "", "--parameters": "--file-size"}
"""The words of a command that takes the directory as its argument, for `reported`."""


def make_console(stderr: bool = False, quiet: bool = False) -> Console:
    """Return the console of a command, which breaks no lines. Where its output is piped, tables are as wide as their text."""
    console = Console(stderr=stderr, quiet=quiet, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    return console


def make_progress(console: Console, *columns: ProgressColumn) -> Progress:
    """Return a bar for the time of its `with`, on a terminal alone: into a pipe rich would print an empty line."""
    return Progress(*columns, console=console, transient=True, disable=console.quiet or not console.is_interactive)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> None:
    """Print rows below their headings: a line each, whatever the terminal's width, without colors or borders.

    Args:
        left: columns that are aligned left; others are numbers.
    """
    everything = [columns, *rows]
    widths = [max(len(row[number]) for row in everything) for number in range(len(columns))]
    for row in everything:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, cell, width in zip(columns, row, widths, strict=True)
        ]
        typer.echo("  ".join(cells).rstrip())


def check_output(option: str, path: Path | None) -> None:
    """Raise ConfigError unless a new file can be made there; makes missing directories. For before the work that fills it."""
    if path is None:
        return
    if os.path.lexists(path):
        raise ConfigError(f"{option} {path} exists already: name a new file, or remove it")
    make_parents(path, ConfigError)


@contextmanager
def reported(console: Console, failure_code: int = 1, words: Mapping[str, str] | None = None) -> Iterator[None]:
    """End the command with 2 for a wrong argument, `failure_code` for other errors, 130 for Ctrl-C, SIGTERM, SIGHUP.

    Args:
        words: what errors say of Python's interface, and what they say of this command's: {"host_memory": "--budget"}.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    heeded = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN
    ]  # nohup
    before = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    except KeyboardInterrupt:
        console.print("Interrupted. Nothing is left behind.")
        raise typer.Exit(INTERRUPTED) from None
    except (SwapperError, OSError) as error:
        text = str(error) or type(error).__name__
        for python, ours in (words or {}).items():
            text = text.replace(python, ours)
        text = escape(text)
        console.print(f"[red]Error:[/red] {text}")
        raise typer.Exit(2 if isinstance(error, ConfigError) else failure_code) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

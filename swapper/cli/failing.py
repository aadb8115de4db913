"""How a command ends when something is wrong: one line to stderr, and an exit code; no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from swapper.errors import ConfigError, SwapperError

INTERRUPTED = 130


@contextmanager
def reported() -> Iterator[None]:
    """Ends the command with 2 for a wrong argument, 1 for every other error of ours, 130 for Ctrl-C."""
    console = Console(stderr=True)
    try:
        yield
    except KeyboardInterrupt:
        console.print("Interrupted. Nothing is left behind.")
        raise typer.Exit(INTERRUPTED) from None
    except (SwapperError, OSError) as error:
        text = escape(str(error) or type(error).__name__)
        console.print(f"[red]Error:[/red] {text}", soft_wrap=True, highlight=False)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None

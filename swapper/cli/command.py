"""Holds what commands share: errors and signals become exit codes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from swapper.errors import ConfigError, SwapperError

INTERRUPTED = 130  # exit code, 128 + SIGINT


@contextmanager
def reported(console: Console, failure_code: int = 1) -> Iterator[None]:
    """End the command with 2 for a wrong argument, `failure_code` for another error of ours, and 130 for Ctrl-C, SIGTERM
    and SIGHUP."""

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
        text = escape(str(error) or type(error).__name__)
        console.print(f"[red]Error:[/red] {text}", soft_wrap=True, highlight=False)
        raise typer.Exit(2 if isinstance(error, ConfigError) else failure_code) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Implements `swapper trace SCRIPT`: runs a script with every manager in it traced, and prints the trace's name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from swapper.cli.command import reported
from swapper.errors import ConfigError
from swapper.runtime.trace import ENVIRONMENT


def trace(
    command: Annotated[
        list[str], typer.Argument(help="A Python script, or a command such as torchrun, and its arguments.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSON file; must not exist.")] = Path("trace.json"),
) -> None:
    """Run a script and record its managers, for https://ui.perfetto.dev or chrome://tracing. Exit code: the script's.

    Each process and each further manager has its own file: trace.rank-1.json, trace-2.json. Put the script's own
    options after it.
    """
    console = Console(stderr=True)
    with reported(console):
        if output.exists() or not output.absolute().parent.is_dir():
            why = "exists already" if output.exists() else "is in no directory that exists"
            raise ConfigError(f"{output} {why}: choose another name")
        words = [sys.executable, *command] if command[0].endswith(".py") else command
        try:
            child = subprocess.Popen(words, env={**os.environ, ENVIRONMENT: str(output.absolute())})
        except OSError as error:
            raise ConfigError(f"{command[0]}: {error.strerror}") from error
    signal.signal(signal.SIGINT, lambda *_: None)  # the terminal sends it to the script too, which decides
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    code = child.wait()
    found = sorted(output.absolute().parent.glob(f"{output.stem}*{output.suffix}"))
    if output.exists():
        names = ", ".join(path.name for path in found)
        console.print(
            f"trace: {escape(names)}; open with https://ui.perfetto.dev, or `swapper report`",
            soft_wrap=True,
            highlight=False,
        )
    else:
        console.print("no trace: no manager was closed after an offload", soft_wrap=True, highlight=False)
    raise typer.Exit(code if code >= 0 else 128 - code)

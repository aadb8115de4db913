"""Defines the command line: `swapper COMMAND`."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from swapper.cli.bench import bench, tune
from swapper.cli.checkpoints import export, inspect, verify
from swapper.cli.demo import demo
from swapper.cli.doctor import doctor
from swapper.cli.plan_config import plan
from swapper.cli.report import report, trace
from swapper.cli.runs import clean, runs

WIDE = 72
"""Columns of a terminal from which on help is a table; in fewer the table cuts off names of options."""
_columns = shutil.get_terminal_size().columns


TASKS = {
    "Begin": (demo, doctor),
    "Know the machine": (bench, tune, plan),
    "Look after runs": (runs, verify, clean),
    "Use checkpoints": (inspect, export),
    "See where time goes": (trace, report),
}
"""Commands by what they are for, in the order of the help."""


class WholeSentences(TyperGroup):
    """Shows what each command does in whole, where click would cut it to one line."""

    def format_commands(self, ctx: object, formatter: Any) -> None:
        for task, functions in TASKS.items():
            names = [function.__name__ for function in functions]
            with formatter.section(task):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit=1000)) for name in names])


app = typer.Typer(
    cls=WholeSentences,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich" if _columns >= WIDE else None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        **({} if _columns >= WIDE else {"terminal_width": max(_columns, 40)}),
    },
)
for task, functions in TASKS.items():
    for function in functions:
        settings = {"ignore_unknown_options": function is trace}  # they are the script's
        app.command(rich_help_panel=task, context_settings=settings)(function)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swapper {version('torch-swapper')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pages PyTorch parameters, gradients and optimizer state between memory and NVMe."""

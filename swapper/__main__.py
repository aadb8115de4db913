"""Runs the command line as `python -m swapper`, without an installed script."""

from swapper.cli import app

app(prog_name="swapper")

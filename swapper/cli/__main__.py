"""Runs the command line as `python -m swapper.cli`, without an installed script."""

from swapper.cli import app

app(prog_name="swapper")

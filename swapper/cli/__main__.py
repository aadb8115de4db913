"""`python -m swapper.cli`: the command line without an installed script."""

from swapper.cli import app

app(prog_name="swapper")

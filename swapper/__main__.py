"""Runs the command line: `swapper`, or `python -m swapper` without an installed script."""

import gc


def main() -> None:
    gc.disable()  # imports leave nothing to collect, and collections are a fifth of their time
    from swapper.cli import app

    gc.freeze()
    gc.enable()
    app(prog_name="swapper")


if __name__ == "__main__":
    main()

"""The process that test_cold.py starts: does to a cold parameter whatever a user may do, and says what came of it.

A process of its own, since what is tested may crash it: then test_cold.py knows which operation it was, and starts another
one that goes on after it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import swapper
from e2e import cold_escapes  # adds its operations
from e2e.cold_operations import REFUSED, WORKS
from e2e.models import Net, train_step
from e2e.twins import Twins, send_away

__all__ = ["REFUSED", "WORKS", "cold_escapes"]

ALL_PARAMETERS = 3 << 20
"""So much more than the smallest budget holds all parameters at once, but not the optimizer's state as well."""


def run(directory: Path, cold: str, names: list[str]) -> None:
    """Do the operations, saying before each that it begins and after it what came of it, one JSON object a line."""
    torch.manual_seed(0)
    torch.set_num_threads(2)  # which then read one parameter at the same time, past the guard too
    pair = Twins(directory, Net(), room_bytes=ALL_PARAMETERS, cold=cold)
    pair.train(train_step, steps=2)
    for name in names:
        send_away(pair.manager)
        say(begin=name)
        operation = REFUSED.get(name) or WORKS[name]
        try:
            operation(pair)
            outcome = {"result": "works"}
        except BaseException as error:
            outcome = {"result": "raises", "type": type(error).__name__, "message": str(error)}
            outcome["ours"] = isinstance(error, swapper.SwapperError)
        say(**outcome)
        pair.manager.current.run.model.passes.abandon()
        pair.check_pager()
    pair.train(train_step, steps=2)
    pair.finish()
    say(finished=True)


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))

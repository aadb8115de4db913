"""The process that test_interrupt.py starts: interrupts itself, by a real SIGINT, at many places of a training step.

A trace function counts the lines of swapper's that a step runs, and at a given one sends the signal, which Python delivers
there and then. After each interruption the run must be as if the step had been taken or had not: the plain twin says how
that looks. Says "interrupted N" for each and "finished" at the end.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from e2e.leaks import held_by_swapper
from e2e.models import Net, loss_of, tokens
from e2e.twins import Twins, assert_same

import swapper

SOURCE = str(Path(swapper.__file__).parent)


class Interrupter:
    """Sends SIGINT at the line with number `at` of those in swapper's files."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        self.where = ""

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                os.kill(os.getpid(), signal.SIGINT)
        return self._trace

    def run(self, action: Callable[[], Any]) -> bool:
        """Do `action`; returns whether it was interrupted."""
        sys.settrace(self._trace)
        try:
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


def run(directory: Path, places: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    torch.manual_seed(0)
    random.seed(0)
    pair = Twins(directory, Net(depth=2, checkpointing=False))
    manager = pair.manager

    def step(model: Any, optimizer: Any) -> None:
        loss_of(model, tokens()).backward()
        optimizer.step()

    counter = Interrupter(-1)
    pair.both(lambda model, optimizer: counter.run(lambda: step(model, optimizer)) and None)
    pair.both(lambda model, _: model.zero_grad())
    stride = counter.count / places
    positions = [int(stride * (number + random.random())) + 1 for number in range(places)]
    for at in positions:
        interrupter = Interrupter(at)
        before = manager.step
        random_state = torch.get_rng_state()
        interrupted = interrupter.run(lambda: step(pair.swapped, pair.optimizer))
        torch.set_rng_state(random_state)
        print("interrupted" if interrupted else "went on", at, interrupter.where, flush=True)
        step(pair.plain, pair.plain_optimizer) if manager.step > before else tokens()
        pair.both(lambda model, _: model.zero_grad())
        pair.both(lambda model, _: loss_of(model, tokens()).detach())  # the next forward forgets what was open
        pair.check_pager()
        pair.assert_same_parameters()
    interrupt_others(pair)
    for _ in range(2):
        pair.both(step)
        pair.both(lambda model, _: model.zero_grad())
    interrupt_close(pair)
    print("finished", flush=True)


def interrupt_others(pair: Twins) -> None:
    """What else takes long: nothing of it may leave a lease, a file or a change behind."""
    manager, weight = pair.manager, pair.swapped.blocks[0].up.weight
    path = pair.directory / "snapshot.pt"

    def gather() -> None:
        with manager.gather(weight):
            assert torch.equal(weight, pair.plain.blocks[0].up.weight)

    actions: list[Callable[[], Any]] = [
        gather,
        lambda: manager.snapshot(path).result(),
        lambda: pair.optimizer.state_dict(),
        lambda: pair.optimizer.load_state_dict(pair.plain_optimizer.state_dict()),
        lambda: pair.swapped.load_state_dict(pair.plain.state_dict()),
    ]
    for number, action in enumerate(actions):
        counter = Interrupter(-1)
        counter.run(action)
        path.unlink(missing_ok=True)
        for share in (0.03, 0.2, 0.5, 0.8, 0.97):
            interrupter = Interrupter(int(counter.count * share) + 1)
            interrupted = interrupter.run(action)
            print("interrupted" if interrupted else "went on", f"action {number}", interrupter.where, flush=True)
            manager.current.run.committer.finish()
            manager.current.run.publisher.finish()
            assert not list(pair.directory.rglob("*.partial"))
            path.unlink(missing_ok=True)
            manager.current.run.model.passes.abandon()
            pair.check_pager()
            pair.both(lambda model, _: loss_of(model, tokens()).detach())
    pair.assert_same_parameters()
    pair.assert_same_state()


def interrupt_close(pair: Twins) -> None:
    """Close in the middle of an interrupted backward: nothing hangs, nothing is left."""
    loss = loss_of(pair.swapped, tokens())
    Interrupter(50).run(loss.backward)
    pair.close()
    left = [thing for thing in held_by_swapper() if "swapper-arena" not in thing]
    assert_same(left, [])


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))

"""A run whose signal handlers raise, at random instants: it ends, or goes on with the same step, and is exact.

Usage: signalled_run.py DIRECTORY SEED SIGNALS. A child trains, and ticks as in killed_run.py; the parent sends it signals a little
after a random number of ticks. Three kinds take turns: SIGTERM, whose handler calls sys.exit; SIGUSR1, whose handler raises what
nobody catches; SIGALRM, whose handler raises a TimeoutError that the loop catches and repeats the step. After an end the next
child resumes. All placements and update times take turns, each in the smallest budget that works. Losses, random numbers,
parameters and state must equal those of plain torch, no child may hang or raise anything else, and none may give up its session,
except that with update="backward" a step is not repeated between its backward and `optimizer.step()`: that is refused, and resumed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import swapper
from e2e.keywords import for_manager
from e2e.killed_run import LONGEST_DELAY_S, WORDS, batch, find_kinds, fork, is_same, make
from e2e.processes import LONG_S

STEPS = 8
ENDED = 143
"""Exit code of a child that a signal has ended."""


class Ended(Exception):
    """Raised by a handler, and caught by nobody in the loop."""


def end(number: int, frame: FrameType | None) -> None:
    raise Ended


def leave(number: int, frame: FrameType | None) -> None:
    sys.exit(ENDED)


def time_out(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


HANDLERS = {signal.SIGTERM: leave, signal.SIGUSR1: end, signal.SIGALRM: time_out}


def loss_of(model: Any, number: int) -> torch.Tensor:
    words = batch(number)
    return cross_entropy(model(words).view(-1, WORDS), words.view(-1))


def take_step(manager: Any, model: Any, optimizer: Any, number: int, tries: list[str]) -> float | None:
    """Take a step, again after each TimeoutError unless it is counted. Returns its loss, None: not known."""
    random_state = torch.get_rng_state()
    loss = None
    while manager.step == number:
        try:
            torch.set_rng_state(random_state)
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
        except TimeoutError:
            tries.append(f"step {number}")
        except swapper.StateError as error:  # between a backward that updates and its step there is nothing to repeat
            if "optimizer.step() has not been called" not in str(error) or not tries:
                raise
            raise Ended from error
    return None if loss is None else loss.item()


def run(directory: Path, tick: Callable[[bytes], Any], **options: Any) -> None:
    """Train to the end, from wherever the last run was committed."""
    placed = {name: options.pop(name) for name in ("params", "optimizer_state", "gradients", "update")}
    model, optimizer, _ = make(0.1)
    warnings.simplefilter("ignore")
    for module in model:
        module.register_forward_hook(lambda *_: tick(b"f") and None)
        module.register_full_backward_hook(lambda *_: tick(b"b") and None)
    with swapper.SwapManager(directory, resume="auto", rng=True, **for_manager(options)) as manager:
        model, optimizer = manager.offload(model, optimizer, **placed)
        for number, handler in HANDLERS.items():
            signal.signal(number, handler)
        tick(b"o")
        tries: list[str] = []
        while manager.step < STEPS:
            number = manager.step
            loss = take_step(manager, model, optimizer, number, tries)
            if loss is not None:
                with (directory / "losses").open("a") as log:
                    log.write(f"{number} {loss.hex()}\n")
            tick(b"s")
        for number in HANDLERS:
            signal.signal(number, signal.SIG_IGN)
        manager.snapshot(directory / "final.pt")


def be_child(directory: Path, tick: Callable[[bytes], Any], kind: dict[str, Any]) -> None:
    """Run until the end, or a signal; then exit."""
    try:
        run(directory, tick, **kind)
    except (Ended, SystemExit, TimeoutError):
        os._exit(ENDED)


def run_and_signal(
    directory: Path, chance: random.Random, number: int | None, kind: dict[str, Any]
) -> tuple[bool, bool]:
    """Fork a run and send it a signal. Returns whether it was sent, and whether it ended the run."""
    reader, writer = os.pipe()
    child = fork(lambda: (os.close(reader), be_child(directory, lambda what: os.write(writer, what), kind)))
    os.close(writer)
    is_begun = False
    after = chance.randrange(1, 60)
    while number is not None and after > 0 and (seen := os.read(reader, 1)):
        is_begun = is_begun or seen == b"o"
        after -= is_begun  # the handlers are there
    is_sent = number is not None and not after
    if number is not None and is_sent:
        time.sleep(LONGEST_DELAY_S * chance.random())  # chance, not synchronisation
        os.kill(child, number)
    status = wait(child)
    os.close(reader)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, ENDED):
        raise SystemExit(f"a run failed with {code}: {kind}, signal {number}, {directory}")
    return is_sent, code == ENDED


def wait(child: int) -> int:
    """Wait for its end. Raises SystemExit: it hangs."""
    limit = time.monotonic() + LONG_S
    while time.monotonic() < limit:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGABRT)  # faulthandler says where it is
    os.waitpid(child, 0)
    raise SystemExit("a run hangs")


class Expected:
    """Plain torch."""

    def __init__(self) -> None:
        self.model, self.optimizer, _ = make(0.1)
        self.losses: list[float] = []
        for number in range(STEPS):
            self.optimizer.zero_grad()
            loss = loss_of(self.model, number)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())

    def check(self, directory: Path) -> None:
        for line in (directory / "losses").read_text().splitlines():
            number, loss = line.split()
            assert float.fromhex(loss) == self.losses[int(number)], f"the loss of step {number} differs in {directory}"
        final = torch.load(directory / "final.pt", weights_only=True)
        for name, tensor in self.model.state_dict().items():
            assert is_same(final["model"][name], tensor), f"{name} differs in {directory}"
        for number, state in self.optimizer.state_dict()["state"].items():
            for name, value in state.items():
                assert is_same(final["optimizer"]["state"][number][name], value), f"{name} differs in {directory}"


def main(directory: Path, seed: int, signals: int) -> None:
    torch.set_num_threads(1)
    swapper.SwapManager  # noqa: B018  # imported here and not in every child
    expected = Expected()
    chance = random.Random(seed)
    kinds = find_kinds(directory)
    chance.shuffle(kinds)
    sent = children = runs = ended = 0
    while sent < signals:
        kind = kinds[runs % len(kinds)]
        place = directory / f"run-{runs}"
        place.mkdir()
        while not (place / "final.pt").exists():
            children += 1  # of which each eighth comes to its end
            number = chance.choice(list(HANDLERS)) if children % 8 and sent < signals else None
            is_sent, is_ended = run_and_signal(place, chance, number, dict(kind))
            sent, ended = sent + is_sent, ended + is_ended
        expected.check(place)
        shutil.rmtree(place)
        runs += 1
        print(f"{sent} signals, the last of {kind}", file=sys.stderr, flush=True)
    print(f"{sent} signals, of which {ended} ended a run, {runs} runs of {len(kinds)} kinds, all exact")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

"""Ends training programs drawn from a seed early, by kills and by transfers that fail, resumes them, and compares bit for bit.

Usage: tools/fuzz ends [--minutes N] [--cases N] [--seed N] [--program JSON]

A program is one of programs.py. It runs once to its end. Then it begins anew for each of its ends: it is killed at a system call
that changes one of its files, or some of its transfers fail and it closes. Another process resumes: what was committed must be
what plain torch has after that step, and so must all that the rest of the loop does.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from e2e.killed_run import fork
from e2e.late_errors import FailingEngine, Faults, any_faults
from e2e.racing_loops import Drive
from e2e.stopped_calls import run_until

import swapper
from fuzz import programs
from fuzz.cases import Kind, Program, outcome, run
from fuzz.programs import REFUSALS, Training
from swapper.modules import resources

NOT_HERE = {"park", "resume", "resume otherwise", "step twice"}
"""Actions that commit a step once more, with what has changed since, or take two steps."""


def draw(seed: str) -> Program:
    """Return the program of a seed."""
    program, chance = programs.draw(seed), random.Random(f"{seed} ends")
    program["loop"] = [action for action in program["loop"] if action[0] not in NOT_HERE]
    program["options"]["commit_every"] = chance.choice(["free", 1, 1, 2])
    ends = [[chance.choice(["kill", "kill", "torn", "fail"]), chance.random()] for _ in range(3)]
    return {**program, "hurries": None, "ends": ends}


class EndedTraining(Training):
    """The twins of a program, whose swapped one may end and resume."""

    def __init__(self, program: Program, directory: Path, drive: Drive | None) -> None:
        super().__init__(program, directory, drive)
        self.pair.backend = "threads"  # so that transfers are system calls of the process

    def run_to_end(self, states: Path, faults: Faults | None = None) -> None:
        """Run all, and write what the run is at its beginning and after each action. With `faults`, until an error."""
        lines: list[str] = []

        def note() -> None:
            lines.append(json.dumps({"step": self.pair.manager.step, **self.layout()}))
            states.write_text("\n".join(lines))

        engines: list[FailingEngine] = []
        if faults is not None:
            open_engine = resources.open_engine

            def open_failing(*of: Any, **how: Any) -> Any:
                engines.append(FailingEngine(open_engine(*of, **how), faults))
                return engines[-1]

            resources.open_engine = open_failing  # type: ignore[assignment]
        self.pair.offload()
        self._begin()
        for engine in engines:
            engine.is_armed = True
        try:
            note()
            self.go_on(after_each=note)
            self.finish()
        except swapper.SwapperError:
            if not any(engine.failed for engine in engines):
                raise
            with suppress(swapper.SwapperError):
                self.pair.close()

    def resume_and_compare(self, states: Path) -> None:
        """Resume what has ended, and do the rest of the loop."""
        found = [json.loads(line) for line in states.read_text().splitlines()]
        steps = [state.pop("step") for state in found]
        budget = self.pair.smallest_budget(self.probe) + self.pair.room_bytes
        layouts = [layout for number, layout in enumerate(found) if layout not in found[:number]]
        while True:
            try:
                self.resume(layouts.pop(), budget)
                break
            except swapper.StateError:  # another layout was committed
                self.pair.close()
                if not layouts:
                    raise
        step = self.pair.manager.step
        assert step in steps, f"step {step} of {steps} was committed"
        done = steps.index(step)
        for number in range(done):
            self.do(number, self.plain.model, None)
        self.plain.model.zero_grad()
        self.plain.kept.clear()
        try:
            self.compare()
        except AssertionError as error:
            raise AssertionError(f"[{done} resumed] {error}") from error
        self.go_on(done)
        self.finish()


def run_case(program: Program, directory: Path) -> str | None:
    """Return what went wrong, None if nothing did; REFUSED and why, if swapper or what it is compared with cannot do it."""

    def run_one(work: Callable[[EndedTraining], None], at: int = -1, torn: bool = False) -> tuple[str | None, int]:
        """Do `work` in a child, which is killed at this one of its calls. Returns what went wrong, and the calls."""
        answer = directory / "answer"
        answer.unlink(missing_ok=True)

        def act() -> None:
            problem = outcome(lambda: work(EndedTraining(program, place, None)), REFUSALS)
            if problem is not None:
                answer.write_text(problem)

        status, calls = run_until(act, fork, place / "run", at, torn)
        was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if answer.exists():
            return answer.read_text(), len(calls)
        return None if status == 0 or (was_killed and at >= 0) else f"a child ended with {status}", len(calls)

    place, states = directory / "whole", directory / "states"
    place.mkdir()
    problem, calls = run_one(lambda training: training.run_to_end(states))
    if problem is not None:
        return problem
    for number, (how, share) in enumerate(program["ends"]):
        shutil.rmtree(place)
        place = directory / f"{how}-{number}"
        place.mkdir()
        if how == "fail":
            faults = any_faults(random.Random(share))
            problem, _ = run_one(lambda training, faults=faults: training.run_to_end(directory / "ended", faults))
        else:
            problem, _ = run_one(lambda training: training.run_to_end(directory / "ended"), int(share * calls), how == "torn")
        if problem is None:
            problem, _ = run_one(lambda training: training.resume_and_compare(states))
        if problem is not None:
            return f"after {how} {share}: {problem}"
    return None


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with a part less."""
    if len(program["ends"]) > 1:
        yield from ({**program, "ends": [end]} for end in program["ends"])
    yield from programs.smaller(program)


ENDS = Kind("ends", __doc__ or "", draw, run_case, smaller)


if __name__ == "__main__":
    sys.exit(run(ENDS, sys.argv[1:]))

"""Kills training programs drawn from a seed, or has their transfers fail, goes on with them, and compares bit for bit.

Usage: tools/fuzz ends [--minutes N] [--cases N] [--seed N] [--program JSON]

A program is one of programs.py, or of ranks.py. It runs once to its end. Then it begins again for each of its ends: it is killed
at a system call that changes one of its files, or when an action has failed with one of its transfers, and another process resumes;
or the loop goes on itself after the error. Of ranks that happens to one: the others are killed too, or find out. What was
committed, or what is there after the error, must be what plain torch has after that step, and so must all that the rest of the loop
does.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from e2e.killed_ranks import joined
from e2e.killed_run import fork
from e2e.late_errors import FailingEngine, Faults, any_faults
from e2e.racing_loops import Drive
from e2e.stopped_calls import run_until

import swapper
from fuzz import programs, ranks
from fuzz.cases import REFUSED, Kind, Program, outcome, run
from fuzz.program_passes import PASSES
from fuzz.programs import REFUSALS, Training
from fuzz.ranks import RankTraining, report, reshard, told
from swapper.modules import resources

NOT_HERE = {"park", "resume", "resume otherwise", "step twice"}
"""Actions that change the layout of a run's commits, or take two steps."""
NEXT_STEP = {*PASSES, *ranks.OWN_PASSES, "closure", "scaled", "step"}
"""Actions at whose beginning the last step is committed, with what has changed since."""
COMMITS = {"add group", "snapshot"}
"""Actions that commit the last step: at their beginning, at their end, or both."""
HALF_DONE = {
    *("adversarial", "sharpness", "inner step", "save and load", "initialise", "swap average", "gather and write"),
    *("from vector", "write", "optimizer state", "freeze", "add group", "scaled", "schedule"),
}
"""Actions that may have changed something when they fail."""


def draw(seed: str) -> Program:
    """Return the program of a seed."""
    chance = random.Random(f"{seed} ends")
    has_ranks = chance.random() < 0.4
    program = ranks.draw(seed) if has_ranks else programs.draw(seed)
    not_here = NOT_HERE
    if has_ranks:  # what a new model has not: see ranks.draw
        not_here = not_here | ({"interrupted"} if program["spread"] not in ranks.WHOLE else set())
        kinds = ranks.WITH_BUFFERS if program["spread"] == "ddp" else ()
        program["layers"] = [layer for layer in program["layers"] if not any(kind in layer for kind in kinds)]
    program["loop"] = [action for action in program["loop"] if action[0] not in not_here]
    program["options"]["commit_every"] = chance.choice(["free", 1, 1, 2])
    ends = [
        [chance.choice(["kill", "kill", "torn", "fail", "go on"]), chance.random()]
        for _ in range(2 if has_ranks else 3)
    ]
    if has_ranks:
        ends = [[*end, chance.randrange(program["size"]), chance.random() < 0.5] for end in ends]
    return {**program, "hurries": None, "ends": ends}


class EndedTraining(Training):
    """The twins of a program, whose swapped one may end and resume."""

    def __init__(self, program: Program, directory: Path, drive: Drive | None) -> None:
        super().__init__(program, directory, drive)
        self.pair.backend = "threads"  # so that transfers are system calls of the process
        self._names = [name for name, _ in program["loop"]]
        self._doing = 0

    def run_to_end(self, states: Path, faults: Faults | None = None, goes_on: bool = False) -> None:
        """Run all, and write what the run is at its beginning and after each action. With `faults` until an error, or beyond it."""

        def note() -> None:
            manager = self.pair.manager
            every = manager.current.run.committer._every
            with states.open("a") as file:
                file.write(json.dumps({"step": manager.step, "every": every, **self.layout()}) + "\n")

        engines = [] if faults is None else open_failing_engines(faults)
        self.pair.offload()
        self._begin()
        for engine in engines:
            engine.is_armed = True
        note()
        try:
            self.go_on(after_each=note)
            self.finish()
            return
        except swapper.SwapperError as error:
            if not any(engine.failed for engine in engines) and not self._is_of_another(error):
                raise
        for engine in engines:
            engine.is_armed = False
        for left in reversed(range(8)):  # what was under way fails later
            if not goes_on or self._is_half_done() or self._any(self.pair.manager.current.has_failed):
                os.kill(os.getpid(), signal.SIGKILL)  # closing would commit what has changed since the step
            with suppress(swapper.SwapperError) if left else nullcontext():
                self._go_on_after_error(read_states(states))
                return

    def _go_on_after_error(self, states: list[dict[str, Any]]) -> None:
        self.swapped.optimizer.zero_grad()
        self.swapped.model.zero_grad()
        fresh = self._make_pair(self.pair.directory, wait=True, **self.program["options"])
        self.pair.plain, self.pair.plain_optimizer = fresh.plain, fresh.plain_optimizer
        self.plain.model, self.plain.optimizer = fresh.plain, fresh.plain_optimizer
        step = self.pair.manager.step
        self._go_on_after([number for number, state in enumerate(states) if state["step"] == step], states)

    def do(self, number: int, model: Any, _: Any) -> Any:
        self._doing = number
        return super().do(number, model, _)

    def finish(self) -> None:
        self._doing = len(self._names)
        super().finish()

    def _is_half_done(self) -> bool:
        """Return whether the action that has failed may have changed something: also buffers, by a forward."""
        if self._doing == len(self._names) or self._names[self._doing] in HALF_DONE:
            return True
        return any(True for _ in self.plain.model.buffers())

    def _is_of_another(self, error: swapper.SwapperError) -> bool:
        """Return whether an error comes from another rank's."""
        return False

    def _every(self, value: Any) -> list[Any]:
        """Return a value of each rank, which all come here."""
        return [value]

    def _any(self, is_so: bool) -> bool:
        return any(self._every(is_so))

    def resume_and_compare(self, states: Path, ended: Path) -> None:
        """Resume what has ended, and do the rest of the loop."""
        found = read_states(states)
        steps = [state.pop("step") for state in found]
        budget = self.pair.smallest_budget(self.probe) + self.pair.room_bytes
        layouts = [layout for number, layout in enumerate(found) if layout not in found[:number]]
        while True:
            try:
                self.resume(layouts.pop(0), budget)
                break
            except (swapper.CheckpointError, swapper.StateError):  # another layout was committed
                self.pair.close()
                if not layouts:
                    raise
        step = self.pair.manager.step
        assert step in steps and step >= max(self._every(self._least(ended))), f"step {step} of {steps} was committed"
        assert len(set(self._every(step))) == 1, f"ranks have resumed from {self._every(step)}"
        is_new = self.pair.manager.current.run.committer.committed is None
        self._go_on_after([0] if is_new else self._committed_after(steps, step), found)

    def _go_on_after(self, candidates: list[int], states: list[dict[str, Any]]) -> None:
        """Go on where plain torch has what the swapped one has: after one of these numbers of actions.

        Args:
            states: what the run was after each number.
        """
        self.plain.kept.clear()
        self.swapped.kept.clear()
        self.swapped.directory = self._every(Path(tempfile.mkdtemp(prefix="resumed-", dir=self.directory)))[0]
        begun = done = 0
        for done in candidates:
            for number in range(begun, done):
                self.do(number, self.plain.model, None)
            parameters = list(self.plain.model.parameters())
            gradients = [parameter.grad for parameter in parameters]
            self.plain.model.zero_grad()
            failure, begun = self._difference(done), done
            if not self._any(failure is not None):
                break
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        else:
            raise failure or AssertionError("[resumed] another rank differs")
        self.plain.kept.clear()
        for name, parameter in self.pair.swapped.named_parameters():
            parameter.requires_grad_(states[done]["trained"][name])
        self.go_on(done)
        self.finish()

    def _difference(self, done: int) -> AssertionError | None:
        """Return what is not as in plain torch after this number of actions."""
        try:
            self.compare()
        except AssertionError as error:
            failure = AssertionError(f"[{done} resumed] {error}")
            failure.__cause__ = error
            return failure
        return None

    def _least(self, ended: Path) -> int:
        """Return a step that must have been committed: each is before the next but one begins, with two exceptions."""
        if any("max norm" in layer for layer in self.program["layers"]) or "snapshot" in self._names:
            return 0
        states = read_states(ended) if ended.exists() else []
        every = states[-1]["every"] if states else None
        return 0 if every is None else max(states[-1]["step"] - 1, 0) // every * every

    def _committed_after(self, steps: list[int], step: int) -> list[int]:
        """Return how many actions may have been done when `step` was committed."""
        of_step, names = [number for number, one in enumerate(steps) if one == step], self._names
        nexts = [number for number in of_step if names[number : number + 1] and names[number] in NEXT_STEP]
        begins = [number for number in of_step if names[number : number + 1] and names[number] in COMMITS]
        ends = [number for number in of_step[1:] if names[number - 1] in COMMITS]
        closed = [number for number in of_step if number == len(names)]
        again = [number for end in ends for number in nexts if number >= end]  # with what the script has changed since
        return sorted({*nexts[:1], *begins, *ends, *again, *closed})


class EndedRankTraining(EndedTraining, RankTraining):
    """The twins of a program, on one of its ranks."""

    def do(self, number: int, model: Any, _: Any) -> Any:
        found = super().do(number, model, _)
        reshard(model)  # what is asked of a model's parameters next is asked of its shards
        return found

    def _is_half_done(self) -> bool:
        """Return whether an action has failed in which the others do not learn of it, or as `EndedTraining`."""
        is_step = self._doing < len(self._names) and self._names[self._doing] == "step"
        return not is_step or super()._is_half_done()

    def _is_of_another(self, error: swapper.SwapperError) -> bool:
        return "another rank" in str(error)

    def _every(self, value: Any) -> list[Any]:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, value)
        return every

    def _go_on_after(self, candidates: list[int], states: list[dict[str, Any]]) -> None:
        self._doing = len(self._names)  # of the others, one that fails now does not wait for any
        super()._go_on_after(candidates, states)


def open_failing_engines(faults: Faults) -> list[FailingEngine]:
    """Have managers of this process get engines whose transfers fail, once they are armed. Returns those that were opened."""
    engines: list[FailingEngine] = []
    open_engine = resources.open_engine

    def open_failing(*of: Any, **how: Any) -> Any:
        engines.append(FailingEngine(open_engine(*of, **how), faults))
        return engines[-1]

    resources.open_engine = open_failing  # type: ignore[assignment]
    return engines


def read_states(path: Path) -> list[dict[str, Any]]:
    """Return what a run has written of itself. A kill may have cut the last line."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def run_case(program: Program, directory: Path) -> str | None:
    """Return what went wrong, None if nothing did; REFUSED and why, if swapper or what it is compared with cannot do it."""

    def run_one(
        work: Callable[[EndedTraining], None],
        at: int = -1,
        torn: bool = False,
        may_end: bool = False,
        who: int = 0,
        noticed: Path | None = None,
    ) -> tuple[str | None, int, bool]:
        """Do `work` in a child, or in one for each rank, killed at this one of its calls.

        Args:
            may_end: it may be killed.
            who: the rank that is.
            noticed: if this file is there by then, the others end by themselves. (Who joins a group waits for one that has ended.)

        Returns:
            What went wrong, the number of its calls, and if it was killed.
        """
        said = Path(tempfile.mkdtemp(dir=directory))
        paths = [said / f"rank-{rank}" for rank in range(size or 1)]
        others = []

        def act(rank: int) -> None:
            kind = EndedRankTraining if size else EndedTraining
            report(paths[rank], lambda: outcome(lambda: work(kind(program, place, None)), REFUSALS))

        def start(rank: int, act: Callable[[], None]) -> int:
            return fork(partial(joined, rank, size, said / "meeting", act) if size else act)

        def start_all(prepared: Callable[[], None]) -> int:
            others.extend(start(rank, partial(act, rank)) for rank in range(size or 1) if rank != who)
            return start(who, prepared)

        status, calls = run_until(partial(act, who), start_all, place / "run", at, torn)
        was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        for other in others:
            with suppress(ProcessLookupError, ChildProcessError):  # `run_until` has waited for it
                if was_killed and not (noticed is not None and noticed.exists()):
                    os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
        return told(paths, was_killed and may_end), len(calls), was_killed

    size = program.get("size", 0)
    place = directory / "whole"  # of the run that nothing ends
    place.mkdir()

    def states_of(run: str, rank: int) -> Path:
        return directory / f"{run}-states-{rank}"

    problem, calls, _ = run_one(lambda training: training.run_to_end(states_of("whole", training.rank)))
    if problem is not None:
        return problem
    for number, (how, share, *of_rank) in enumerate(program["ends"]):
        shutil.rmtree(place)
        place = directory / f"{how}-{number}"
        place.mkdir()
        who, is_noticed = of_rank or (0, False)
        is_killed = how in ("kill", "torn")
        faults = None if is_killed else any_faults(random.Random(share))

        def run_and_end(training: EndedTraining, run: str, who: int, faults: Faults | None, goes_on: bool) -> None:
            training.run_to_end(states_of(run, training.rank), faults if training.rank == who else None, goes_on)

        def go_on(training: EndedTraining, run: str) -> None:
            training.resume_and_compare(states_of("whole", training.rank), states_of(run, training.rank))

        problem, _, was_killed = run_one(
            partial(run_and_end, run=place.name, who=who, faults=faults, goes_on=how == "go on"),
            at=int(share * calls) if is_killed else -1,
            torn=how == "torn",
            may_end=True,
            who=who,
            noticed=states_of(place.name, who) if is_noticed else None,
        )
        if problem is None and (was_killed or how != "go on"):  # one that went on has other gradients than `states`
            problem, *_ = run_one(partial(go_on, run=place.name))
        if problem is not None:
            return problem if problem.startswith(REFUSED) else f"after {how} {share}: {problem}"
    return None


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with a part less."""
    if len(program["ends"]) > 1:
        yield from ({**program, "ends": [end]} for end in program["ends"])
    yield from (ranks if "size" in program else programs).smaller(program)


ENDS = Kind("ends", __doc__ or "", draw, run_case, smaller)


if __name__ == "__main__":
    sys.exit(run(ENDS, sys.argv[1:]))

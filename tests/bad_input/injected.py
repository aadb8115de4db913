"""The program that raises an exception at instructions of swapper's code, one after another, while a model is trained.

Usage: injected.py DIRECTORY WAY UPDATE PLACES SEED. WAY "signal": a trace function sends a signal before an instruction, which
Python handles there and then, by a handler that raises. WAY "thread": it raises the exception itself, where Python raises what
another thread sends (PyThreadState_SetAsyncExc): after calls, whatever section the code is in. PLACES is how many of a step's
instructions are tried, or 0 for all, or the name of the file whose instructions are. After each, the step is whole, or as if it
had never begun, or the session says that it has failed: then the manager is closed, and the run resumed from its last commit.
The plain twin says how each looks.
"""

from __future__ import annotations

import dis
import gc
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from e2e.twins import adamw, assert_same, leased_pages, smallest_budget
from torch import nn

import swapper

SOURCE = str(Path(swapper.__file__).parent)
NUMBER = signal.SIGUSR1
WIDTH = 128


class Injected(Exception):
    """What is raised."""


def raise_injected(number: int, frame: FrameType | None) -> None:
    raise Injected


class Injector:
    """Raises Injected at the instruction with number `at` of those in swapper's files, or in those whose names end with `file`."""

    def __init__(self, at: int, way: str, file: str = "") -> None:
        self.at = at
        self._file = file
        self.count = 0
        self.where = ""
        self._is_by_signal = way == "signal"
        self._calls: dict[CodeType, frozenset[int]] = {}  # offsets that follow a call

    def _follows_call(self, frame: FrameType) -> bool:
        code = frame.f_code
        if code not in self._calls:
            found, before = set(), ""
            for instruction in dis.get_instructions(code):
                if before.startswith("CALL") or instruction.opname.startswith("JUMP_BACKWARD"):
                    found.add(instruction.offset)
                before = instruction.opname
            self._calls[code] = frozenset(found)
        return frame.f_lasti in self._calls[code]

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not (frame.f_code.co_filename.startswith(SOURCE) and frame.f_code.co_filename.endswith(self._file)):
            return None
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and (self._is_by_signal or self._follows_call(frame)):
            self.count += 1
            if self.count == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                if not self._is_by_signal:
                    raise Injected
                signal.raise_signal(NUMBER)
        return self._trace

    def run(self, action: Callable[[], Any]) -> BaseException | None:
        """Do `action`; returns what it raised."""
        sys.settrace(self._trace)
        try:
            action()
        except BaseException as error:
            return error
        finally:
            sys.settrace(None)
        return None


def is_ours(error: BaseException | None) -> bool:
    """Return whether `error` is the exception that was injected, or a StateError chained to it."""
    while error is not None and not isinstance(error, Injected):
        error = error.__cause__ or error.__context__
    return error is not None


class Run:
    """A model, and the same with plain torch."""

    def __init__(self, directory: Path, update: str, way: str) -> None:
        torch.manual_seed(0)
        self.directory, self.update, self.way = directory, update, way
        self.plain = self._make_model()
        self.plain_optimizer = adamw(self.plain.parameters())
        self.steps = 0
        self.states = [self._plain_state()]
        self.resumed = 0
        model = self._make_model()
        self.budget = smallest_budget(directory, model, adamw(model.parameters()), **self._options)
        self.open()

    def _make_model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.LayerNorm(WIDTH))

    def _plain_state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.plain.state_dict().items()}

    @property
    def _options(self) -> dict[str, Any]:
        return {"params": "nvme", "optimizer_state": "nvme", "update": self.update}

    def open(self) -> None:
        model = self._make_model()
        self.manager = swapper.SwapManager(self.directory, host_memory=self.budget, resume="auto")
        self.model, self.optimizer = self.manager.offload(model, adamw(model.parameters()), **self._options)

    def batch(self, number: int) -> torch.Tensor:
        return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))

    def step(self, model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        model(self.batch(number)).square().mean().backward()
        optimizer.step()

    def step_swapped(self) -> None:
        self.step(self.model, self.optimizer, self.manager.step)

    def follow(self) -> None:
        """Have plain torch take the steps that the manager has taken."""
        while self.steps < self.manager.step:
            self.step(self.plain, self.plain_optimizer, self.steps)
            self.steps += 1

    def check(self) -> None:
        """Assert that the manager has the parameters and the state of its step; resume first if its session has failed."""
        self.follow()
        try:
            self._compare()
        except swapper.StateError as error:
            assert "resume from the last commit" in str(error), error
            self.resume()
            assert self.manager.step == self.steps or self.manager.step == self.steps - 1, (
                self.manager.step,
                self.steps,
            )
            if self.manager.step < self.steps:
                self.step_swapped()
            self._compare()

    def resume(self) -> None:
        """Close, and go on from the last commit."""
        self.manager.close()
        del self.model, self.optimizer
        self.open()
        self.resumed += 1

    def _compare(self) -> None:
        self.optimizer.zero_grad()
        with torch.no_grad():
            assert_same(self.model(self.batch(-1)), self.plain(self.batch(-1)), "the output")
        state = self.optimizer.state_dict()["state"]
        for number, expected in self.plain_optimizer.state_dict()["state"].items():
            assert_same(dict(state[number]), expected, f"state {number}")
        self.manager.current.run.pager.check()
        if self.way == "thread":
            self.manager.current.run.model.passes.abandon()  # as the next step does: a lease may have no holder
        assert leased_pages(self.manager) == [], self.manager.current.run.pager.describe()


def main(directory: Path, way: str, update: str, places: str, seed: int) -> None:
    signal.signal(NUMBER, raise_injected)
    chance = random.Random(seed)
    run = Run(directory, update, way)
    for _ in range(2):
        run.step_swapped()
        run.check()
    file = "" if places.isdigit() else places
    counter = Injector(-1, way, file)
    assert counter.run(run.step_swapped) is None
    run.check()
    count = counter.count
    tried = count if file else int(places) or count
    chosen = sorted(chance.sample(range(1, count + 1), min(tried, count)))
    raised = 0
    for number, at in enumerate(chosen):
        injector = Injector(at, way, file)
        error = injector.run(run.step_swapped)
        raised += error is not None
        print(at, injector.where, type(error).__name__, flush=True)
        assert error is None or is_ours(error), error
        del error
        if number % 16 == 15:
            run.follow()
            if run.manager.current.has_failed:
                run.check()
            before = run.manager.step
            run.resume()
            assert run.manager.step == before, (run.manager.step, before)
        run.check()
        if number % 50 == 0:
            gc.collect()
    print(f"{len(chosen)} of {count} instructions, {raised} raised, resumed {run.resumed} times: all exact")
    run.manager.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))

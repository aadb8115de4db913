"""A run whose drive fails again and again, and recovers, as a program: whatever it then commits is one step, and not of two.

Usage: late_errors.py DIRECTORY SEED CASES. A case is a placement, a time of the updates, a state codec, an error (EIO, ENOSPC),
at once or late, and what the loop does after it: it repeats the iteration, takes a snapshot, compares the model in memory,
closes the manager and resumes, or is killed and resumes. Reads, writes or both fail, a few or many at a time, once or often.
What a run says to be the loss of a step, what is in memory after an error, and its last snapshot must equal those of a run
without errors.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import swapper
from e2e.keywords import for_manager
from e2e.killed_run import WORDS, batch, find_kinds, fork, is_same, make
from swapper import _C
from swapper.modules import resources

STEPS = 5
LIMIT_S = 120
"""A run takes about a second. One that takes this long hangs."""
ERRORS = ("eio", "enospc")
STAY = ("repeat", "snapshot", "compare")
LEAVE = ("close", "kill")
CODEC = "8bit"


@dataclass(frozen=True)
class Faults:
    """The transfers of a process that fail, among those of `calls`, counted from the first step on. No read fails with ENOSPC.

    Attributes:
        waits: how many succeed before each burst.
        lengths: how many fail in each.
        is_late: they fail up to 2 ms after they were submitted, when the loop is somewhere else, and not at once.
    """

    calls: tuple[str, ...]
    error: str
    waits: tuple[int, ...]
    lengths: tuple[int, ...]
    is_late: bool = False

    def fail(self, count: int) -> bool:
        """Return whether the transfer after `count` others fails."""
        for wait, length in zip(self.waits, self.lengths, strict=True):
            count -= wait
            if count < 0:
                return False
            count -= length
            if count < 0:
                return True
        return False


class FailingEngine:
    """Passes transfers on to an engine, and those that are to fail to one whose transfers all do."""

    def __init__(self, engine: Any, faults: Faults) -> None:
        self._engine, self._faults = engine, faults
        self._failing = _C.Engine(chaos={"seed": 1, faults.error: 1, "delay": faults.is_late})
        self._count = 0
        self.is_armed = False
        self.failed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def read(self, *of: Any, **how: Any) -> Any:
        return self._next("read").read(*of, **how)

    def write(self, *of: Any, **how: Any) -> Any:
        return self._next("write").write(*of, **how)

    def _next(self, call: str) -> Any:
        """Return the engine that is to carry out the next transfer."""
        is_counted = self.is_armed and call in self._faults.calls
        fails = is_counted and self._faults.fail(self._count)
        self._count += is_counted
        self.failed += fails
        return self._failing if fails else self._engine

    def close(self) -> None:
        self._failing.close()
        self._engine.close()


class Expected:
    """A run without errors: the losses of its steps, and the model before each and after the last."""

    def __init__(self, directory: Path, codec: str | None) -> None:
        path = directory / f"expected-{codec}"
        path.mkdir()
        self.losses: list[float] = []
        self.models: list[dict[str, torch.Tensor]] = []
        if codec is None:
            model, optimizer, _ = make()
            for number in range(STEPS + 1):
                self.models.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
                if number < STEPS:
                    self.losses.append(train_step(model, optimizer, number))
            self.optimizer = optimizer.state_dict()
            return
        child = fork(lambda: train_encoded(path, codec))
        if os.waitpid(child, 0)[1]:
            raise SystemExit("the run without errors failed")
        self.losses, self.models = torch.load(path / "expected.pt", weights_only=True)
        self.optimizer = torch.load(path / "final.pt", weights_only=True)["optimizer"]


def train_encoded(directory: Path, codec: str) -> None:
    model, optimizer, _ = make(dtype=torch.bfloat16)
    losses, models = [], []
    with swapper.SwapManager(directory, host_memory="1GiB") as manager:
        options = {"params": "host", "optimizer_state": "host", "master_weights": torch.float32, "state_codec": codec}
        model, optimizer = manager.offload(model, optimizer, **options)
        for number in range(STEPS + 1):
            models.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            if number < STEPS:
                losses.append(train_step(model, optimizer, number))
        manager.snapshot(directory / "final.pt").wait()
    torch.save((losses, models), directory / "expected.pt")


def train_step(model: Any, optimizer: Any, number: int) -> float:
    words = batch(number)
    loss = cross_entropy(model(words).float().view(-1, WORDS), words.view(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class Run:
    """One process of a case: it trains to the end, or until an error after which it closes or is killed."""

    def __init__(
        self, directory: Path, kind: dict[str, Any], faults: Faults, afterwards: list[str], expected: Expected
    ) -> None:
        self._directory, self._kind, self._faults = directory, kind, faults
        self._afterwards = afterwards
        self._expected = expected
        self._engines: list[FailingEngine] = []

    def __call__(self) -> None:
        open_engine = resources.open_engine
        resources.open_engine = lambda *of, **how: self._failing(open_engine(*of, **how))  # type: ignore[assignment]
        try:
            self._train()
        except swapper.SwapperError as error:  # of `close`: then nothing more is committed
            if not any(engine.failed for engine in self._engines):
                raise
            self._say(f"closed with {type(error).__name__}: {error}")

    def _failing(self, engine: Any) -> Any:
        self._engines.append(FailingEngine(engine, self._faults))
        return self._engines[-1]

    def _train(self) -> None:
        options = dict(self._kind)
        kinds = ("params", "optimizer_state", "gradients", "update", "state_codec", "master_weights")
        placed = {name: options.pop(name) for name in kinds if name in options}
        model, optimizer, _ = make(dtype=torch.bfloat16 if "master_weights" in placed else torch.float32)
        with swapper.SwapManager(self._directory, resume="auto", **for_manager(options)) as manager:
            model, optimizer = manager.offload(model, optimizer, **placed)
            for engine in self._engines:
                engine.is_armed = True
            while manager.step < STEPS:
                number = manager.step
                try:
                    loss = train_step(model, optimizer, number)
                except swapper.SwapperError as error:
                    self._say(f"error at {number}, {manager.step}: {type(error).__name__}: {error}")
                    with contextlib.suppress(swapper.SwapperError):
                        optimizer.zero_grad()
                    if not self._go_on(manager, model, error):
                        return
                else:
                    self._check(f"loss of {number}", loss, self._expected.losses[number])
                    self._say(f"step {number}")
            for engine in self._engines:
                engine.is_armed = False
            manager.snapshot(self._directory / "final.pt").wait()

    def _go_on(self, manager: Any, model: Any, error: swapper.SwapperError) -> bool:
        """Do what comes after an error. Return False if the manager is to be closed."""
        what = self._afterwards.pop() if self._afterwards else "repeat"
        self._say(what)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "snapshot":
            with contextlib.suppress(swapper.SwapperError):
                manager.snapshot(self._directory / "between.pt").wait()
        elif (
            what == "compare" and not manager.current.has_failed
        ):  # parameters that stay in memory are then of two steps
            self._compare(manager, model)
        return what != "close" and not manager.current.has_failed

    def _compare(self, manager: Any, model: Any) -> None:
        try:
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        except swapper.SwapperError:
            return
        for name, tensor in self._expected.models[manager.step].items():
            self._check(f"{name} after {manager.step}", state[name], tensor)

    def _check(self, what: str, found: Any, expected: Any) -> None:
        if not is_same(found, expected):
            raise AssertionError(f"{what}: {found}, expected {expected}")

    def _say(self, what: str) -> None:
        with (self._directory / "said").open("a") as file:
            file.write(what.replace("\n", " ") + "\n")


def check_snapshot(path: Path, expected: Expected) -> None:
    """Check that a snapshot is of one step: that which it says it is."""
    saved = torch.load(path, weights_only=True)
    for name, tensor in expected.models[saved["swapper"]["step"]].items():
        assert torch.equal(saved["model"][name], tensor), f"{path.name}: {name}"
    if saved["swapper"]["step"] == STEPS:
        for number, state in expected.optimizer["state"].items():
            for key, value in state.items():
                assert is_same(saved["optimizer"]["state"][number][key], value), f"{path.name}: {key} of {number}"


def try_case(
    directory: Path, kind: dict[str, Any], all_faults: list[Faults], afterwards: list[str], expected: Expected
) -> str:
    """Run a case to its end in as many processes as it needs; a process without faults is the last. Return what was said.

    Raises:
        AssertionError: something is not as in the run without errors.
    """
    directory.mkdir()
    said = directory / "said"
    none = Faults((), "eio", (), ())
    for faults in [*all_faults, none, none]:
        if (directory / "final.pt").exists():
            break
        child = fork(
            lambda faults=faults: (signal.alarm(LIMIT_S), Run(directory, kind, faults, afterwards, expected)())
        )
        _, status = os.waitpid(child, 0)
        if status and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            raise AssertionError(f"a run ended with {status}: {said.read_text() if said.exists() else ''}")
    for name in ("between.pt", "final.pt"):
        if (directory / name).exists():
            check_snapshot(directory / name, expected)
    assert (directory / "final.pt").exists()
    text = said.read_text()
    shutil.rmtree(directory)
    return text


def any_faults(chance: random.Random) -> Faults:
    calls = chance.choice([("write",), ("write",), ("read",), ("read", "write")])
    count, most = chance.choice([(1, 120), (4, 60), (32, 40)])
    waits = tuple(chance.randrange(most) for _ in range(count))
    lengths = (1, 1, 3) if count > 4 else (1, 1, 3, 8, 30)
    error = chance.choice(ERRORS if "write" in calls else ERRORS[:1])
    return Faults(calls, error, waits, tuple(chance.choice(lengths) for _ in waits), chance.random() < 0.7)


def any_afterwards(chance: random.Random) -> list[str]:
    """Return what is done after each error, the last one first."""
    leave = chance.choice((0, 0.1, 0.4))
    return [chance.choice(LEAVE if chance.random() < leave else STAY) for _ in range(40)]


def main(directory: Path, seed: int, cases: int) -> None:
    torch.set_num_threads(1)
    chance = random.Random(seed)
    codecs: dict[str | None, Expected] = {codec: Expected(directory, codec) for codec in (None, CODEC)}
    kinds = []
    for codec in codecs:
        place = directory / f"kinds-{codec}"
        place.mkdir()
        kinds += [(codec, kind) for kind in find_kinds(place, codec or "exact")]
    outcomes: Counter[str] = Counter()
    wrong = 0
    for case in range(cases):
        if case % len(kinds) == 0:
            chance.shuffle(kinds)
        codec, kind = kinds[case % len(kinds)]
        all_faults = [any_faults(chance) for _ in range(chance.choice((1, 2, 3)))]
        afterwards = any_afterwards(chance)
        try:
            said = try_case(directory / f"case-{case}", kind, all_faults, list(afterwards), codecs[codec])
        except AssertionError as error:
            wrong += 1
            print(f"case {case}: {kind}, {all_faults}, {afterwards}: {error}", file=sys.stderr, flush=True)
            continue
        outcomes.update(line.split()[0] for line in said.splitlines())
    print(f"{cases} cases of {len(kinds)} kinds, {wrong} wrong: {dict(outcomes)}")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

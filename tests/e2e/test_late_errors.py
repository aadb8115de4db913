"""Errors that come late, of writes whose call returned long ago, leave no state of two steps. See late_errors.py."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import devices
import pytest
import torch

import swapper
from e2e import late_errors, third_party
from e2e.killed_run import batch, make
from e2e.late_errors import train_step
from e2e.models import Net, loss_of, tokens
from e2e.processes import run_python
from e2e.twins import Twins, scalers_of, smallest_budget
from swapper.errors import InvariantError


class Failing:
    """A function of a run that raises `error`, else what an earlier write's failure does, at its n-th call from now on."""

    def __init__(self, run: Any, name: str, error: Exception | None = None) -> None:
        self._error = error
        owner = run.pager if hasattr(run.pager, name) else run.model.gradients
        self._function, self._drop = getattr(owner, name), run.pager._drop if name == "wait" else None
        self._left = -1
        setattr(owner, name, self)

    def at(self, number: int) -> None:
        self._left = number

    @property
    def has_failed(self) -> bool:
        return self._left < 0

    def __call__(self, argument: Any) -> None:
        self._left -= 1
        if self._left == -1:
            if self._drop is not None:
                self._drop(argument)
            raise self._error or swapper.IoError("write", "turn-0.swap", 0, 4096, errno.EIO)
        self._function(argument)


class Runs:
    """A run, and the same with plain torch."""

    def __init__(self, directory: Path, update: str) -> None:
        self.plain, self.plain_optimizer, _ = make()
        self._directory = directory
        self._options = {"params": "nvme", "optimizer_state": "nvme", "gradients": "host", "update": update}
        model, optimizer, _ = make()
        self._budget = smallest_budget(directory, model, optimizer, **self._options)
        self.taken = 0
        self.open()

    def open(self) -> None:
        model, optimizer, _ = make()
        self.manager = swapper.SwapManager(self._directory, host_memory=self._budget, resume="auto")
        self.model, self.optimizer = self.manager.offload(model, optimizer, **self._options)

    def resume(self) -> None:
        """Close, and go on from the last commit, which is of the step before or of the last one."""
        self.manager.close()
        del self.model, self.optimizer  # of this process, which hold the directory's files
        self.open()
        assert self.manager.step == self.taken

    def step(self) -> None:
        loss = train_step(self.model, self.optimizer, self.taken)
        assert loss == train_step(self.plain, self.plain_optimizer, self.taken)
        self.taken += 1

    def fail_to_snapshot(self, failing: Failing, number: int) -> None:
        failing.at(0)
        with contextlib.suppress(swapper.SwapperError):
            self.manager.snapshot(self._directory / f"between-{number}.pt").wait()
        failing.at(-1)

    def check(self) -> None:
        state = self.model.state_dict()
        for name, tensor in self.plain.state_dict().items():
            assert torch.equal(state[name], tensor), name
        state = self.optimizer.state_dict()["state"]
        for of, values in self.plain_optimizer.state_dict()["state"].items():
            assert all(torch.equal(state[of][key], value) for key, value in values.items()), of


WAYS = [
    (update, name, then)
    for update in ("step", "deferred", "backward")
    for name in ("lease", "wait", "make_ready")
    for then in ("repeat", "snapshot, repeat", "close", "snapshot, close")
]


@pytest.mark.parametrize(("update", "name", "then"), WAYS)
def test_after_an_error_at_any_place_of_a_step_the_run_is_exact(
    tmp_path: Path, update: str, name: str, then: str
) -> None:
    runs = Runs(tmp_path, update)
    for _ in range(2):
        runs.step()
    failing = Failing(runs.manager.current.run, name)
    for number in itertools.count():
        failing.at(number)
        try:
            loss = train_step(runs.model, runs.optimizer, runs.taken)
            has_failed = False
        except swapper.IoError:
            has_failed = True
            assert runs.manager.step == runs.taken
            with contextlib.suppress(swapper.IoError):
                runs.optimizer.zero_grad()
            if "snapshot" in then:
                runs.fail_to_snapshot(failing, number)
            if "close" in then:
                runs.resume()
                failing = Failing(runs.manager.current.run, name)
            loss = train_step(runs.model, runs.optimizer, runs.taken)
        assert loss == train_step(runs.plain, runs.plain_optimizer, runs.taken), f"{name} {number}"
        runs.taken += 1
        if not has_failed:
            break
        runs.step()  # the step that the next error falls in is deferred again: no graph is left of the failed forward
    failing.at(-1)
    runs.check()
    runs.resume()
    runs.check()
    runs.manager.close()
    assert number > 5


@pytest.mark.parametrize("name", ["lease", "wait", "make_ready"])
def test_an_error_between_two_groups_of_a_deferred_step_keeps_the_update_of_the_first(
    tmp_path: Path, name: str
) -> None:
    runs = Runs(tmp_path, "deferred")
    runs.step()
    failing = Failing(runs.manager.current.run, name)
    for number in range(2, 100, 2 if name == "make_ready" else 5):
        runs.step()
        failing.at(number)
        try:
            runs.optimizer.state_dict()
        except swapper.IoError:
            failing.at(-1)
            runs.check()
        else:
            break
    assert number > 4
    runs.resume()
    runs.check()
    runs.manager.close()


def fail_at_each_call(pair: Twins, step: Callable[..., Any], failures: list[int]) -> None:
    """Train with an error at one call after the other, until none is left: `step` adds those that failed to `failures`."""
    pair.train(partial(step, number=-1), steps=2)
    for number in itertools.count():
        pair.train(partial(step, number=number), steps=1)
        if number not in failures:
            break
    assert number > 2
    pair.finish()


@devices.without_device("there an error of a page that is fetched ahead is raised at its next use, and not by the step")
def test_a_step_under_a_gradient_scaler_that_fails_and_is_taken_again_is_unscaled_once(
    twins: Callable[..., Twins],
) -> None:
    """torch's fused optimizers leave unscaling to the step: the scaler does not know that the one that failed has done it."""
    pair = twins(Net(depth=2), partial(torch.optim.AdamW, lr=1e-2, fused=True), gradients="host")
    scalers, failures = scalers_of(pair, 1024.0), list[int]()
    failing = Failing(pair.manager.current.run, "lease")

    def step(model: Any, optimizer: Any, number: int) -> torch.Tensor:
        loss, scaler = loss_of(model, tokens()), scalers[id(model)]
        scaler.scale(loss).backward()
        failing.at(number if model is pair.swapped else -1)
        try:
            scaler.step(optimizer)
        except swapper.IoError:
            failures.append(number)
            scaler.step(optimizer)
        failing.at(-1)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    fail_at_each_call(pair, step, failures)


def test_a_step_that_writes_to_its_gradients_and_fails_is_taken_again_from_those_of_backward(
    twins: Callable[..., Twins],
) -> None:
    pair = twins(Net(depth=2), third_party.Normalizing, gradients="host")
    failures = list[int]()
    failing = Failing(pair.manager.current.run, "make_ready")

    def step(model: Any, optimizer: Any, number: int) -> torch.Tensor:
        loss = loss_of(model, tokens())
        loss.backward()
        failing.at(number if model is pair.swapped else -1)
        try:
            optimizer.step()
        except swapper.IoError:
            failures.append(number)
            optimizer.step()
        failing.at(-1)
        optimizer.zero_grad()
        return loss.detach()

    fail_at_each_call(pair, step, failures)


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_a_broken_invariant_in_an_update_ends_the_session_by_name(tmp_path: Path, update: str) -> None:
    """A repetition would meet it again, and what memory has is not to be committed."""
    runs = Runs(tmp_path, update)
    losses = [train_step(runs.plain, runs.plain_optimizer, number) for number in range(4)]
    for number in range(2):
        assert train_step(runs.model, runs.optimizer, number) == losses[number]
    failing = Failing(runs.manager.current.run, "make_ready", InvariantError("a page was lost"))
    failing.at(0)
    with pytest.raises(InvariantError, match="a page was lost"):
        train_step(runs.model, runs.optimizer, 2)
    for use in (lambda: runs.model(batch(2)), runs.optimizer.state_dict, runs.optimizer.step):
        with pytest.raises(swapper.StateError, match=r"failed half-way \(a page was lost\).*resume"):
            use()
    runs.taken = 1 if update == "deferred" else 2  # its last step was still open
    runs.resume()
    for number in range(runs.taken, 4):
        assert train_step(runs.model, runs.optimizer, number) == losses[number]
    runs.check()
    runs.manager.close()


class Changed:
    """A run whose parameters, which have masters, are changed from outside before each step."""

    def __init__(self, directory: Path, codec: str) -> None:
        directory.mkdir()
        self._directory = directory
        self._options = {
            "params": "nvme",
            "optimizer_state": "nvme",
            "master_weights": torch.float32,
            "state_codec": codec,
        }
        model, optimizer, _ = make(dtype=torch.bfloat16)
        self._budget = smallest_budget(directory, model, optimizer, **self._options)
        self.resumed = 0
        self.open()

    def open(self) -> None:
        model, optimizer, _ = make(dtype=torch.bfloat16)
        self.manager = swapper.SwapManager(self._directory, host_memory=self._budget, resume="auto")
        self.model, self.optimizer = self.manager.offload(model, optimizer, **self._options)

    def change(self) -> None:
        chance = torch.Generator().manual_seed(self.manager.step)
        for module in self.model[:2]:
            with self.manager.gather(module.parameters(), write=True), torch.no_grad():
                module.weight.copy_(torch.randn(module.weight.shape, generator=chance))

    def change_after_error(self) -> None:
        try:
            self.change()
        except swapper.StateError as error:
            assert "a change of parameters with fp32 masters failed half-way" in str(error)
            before = self.manager.step
            self.manager.close()
            del self.model, self.optimizer
            self.open()
            assert self.manager.step in (
                before - 1,
                before,
            )  # a change after a step belongs to its commit, which failed
            while self.manager.step < before:
                self.change()
                self.step()
            self.resumed += 1
            self.change()

    def step(self) -> float:
        return train_step(self.model, self.optimizer, self.manager.step)


@pytest.mark.parametrize("codec", ["exact", "8bit"])
def test_masters_follow_a_change_from_outside_or_the_session_fails(tmp_path: Path, codec: str) -> None:
    expected, run = Changed(tmp_path / "expected", codec), Changed(tmp_path / "run", codec)
    for number in itertools.count():
        failing = Failing(run.manager.current.run, "lease")
        failing.at(number)
        try:
            run.change()
        except swapper.IoError:
            run.change_after_error()
        else:
            break
        failing.at(-1)
        expected.change()
        assert run.step() == expected.step(), number
    assert run.resumed > 0
    run.manager.close()
    expected.manager.close()


def test_random_errors_leave_no_state_of_two_steps(tmp_path: Path) -> None:
    done = run_python(Path(late_errors.__file__), tmp_path, 1, 4)
    assert done.returncode == 0 and "4 cases" in done.stdout and " 0 wrong" in done.stdout, done.stderr

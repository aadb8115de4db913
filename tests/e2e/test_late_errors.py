"""Errors that come late, of writes whose call returned long ago, leave no state of two steps. See late_errors.py."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

import swapper
from e2e import late_errors
from e2e.killed_run import make
from e2e.late_errors import train_step
from e2e.processes import run_python
from e2e.twins import smallest_budget


class Failing:
    """A verb of the pager that raises what an earlier write's failure does, at its n-th call from now on."""

    def __init__(self, pager: Any, verb: str) -> None:
        self._pager, self._verb, self._function = pager, verb, getattr(pager, verb)
        self._left = -1
        setattr(pager, verb, self)

    def at(self, number: int) -> None:
        self._left = number

    @property
    def has_failed(self) -> bool:
        return self._left < 0

    def __call__(self, access: Any) -> None:
        self._left -= 1
        if self._left == -1:
            if self._verb == "wait":
                self._pager._drop(access)
            raise swapper.IoError("write", "turn-0.swap", 0, 4096, errno.EIO)
        self._function(access)


@pytest.mark.parametrize(
    ("update", "verb"),
    [
        pytest.param(update, verb, marks=() if (update, verb) == ("deferred", "lease") else pytest.mark.slow)
        for update in ("step", "deferred", "backward")
        for verb in ("lease", "wait")
    ],
)
def test_after_an_error_at_any_lease_the_iteration_is_repeated_exactly(tmp_path: Path, update: str, verb: str) -> None:
    plain, plain_optimizer, _ = make()
    model, optimizer, _ = make()
    budget = smallest_budget(tmp_path, model, optimizer, params="nvme", optimizer_state="nvme", update=update)
    number = failed = 0
    with swapper.SwapManager(tmp_path, host_memory=budget) as manager:
        model, optimizer = manager.offload(
            model, optimizer, params="nvme", optimizer_state="nvme", gradients="host", update=update
        )
        for _ in range(2):
            assert train_step(model, optimizer, number) == train_step(plain, plain_optimizer, number)
            number += 1
        failing = Failing(manager.current.run.pager, verb)
        while True:
            failing.at(failed)
            before = manager.step
            try:
                loss = train_step(model, optimizer, number)
            except swapper.IoError:
                assert manager.step == before
                optimizer.zero_grad()
                loss = train_step(model, optimizer, number)
            assert loss == train_step(plain, plain_optimizer, number), f"{verb} {failed}"
            number += 1
            failed += 1
            if not failing.has_failed:
                break
        failing.at(-1)
        state = model.state_dict()
        for name, tensor in plain.state_dict().items():
            assert torch.equal(state[name], tensor), name
        manager.snapshot(tmp_path / "end.pt").wait()
    saved = torch.load(tmp_path / "end.pt", weights_only=True)["optimizer"]["state"]
    for of, values in plain_optimizer.state_dict()["state"].items():
        assert all(torch.equal(saved[of][key], value) for key, value in values.items()), of


@pytest.mark.slow
def test_random_errors_leave_no_state_of_two_steps(tmp_path: Path) -> None:
    done = run_python(Path(late_errors.__file__), tmp_path, 1, 4)
    assert done.returncode == 0 and "4 cases" in done.stdout and " 0 wrong" in done.stdout, done.stderr

"""Runs that read frozen parameters from the user's file, and go on: with the file where it is now, and with no other."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import swapper
from e2e.external_files import found_in, frozen, half_frozen, saved, trained
from e2e.models import train_step
from swapper.durability.verify import verify


class Run:
    """One script that is started again and again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = half_frozen()
        self.path = saved(self.model, directory / "base.safetensors")
        self.options: dict[str, Any] = {"external": swapper.ExternalWeights(path=self.path)}

    def train(self, steps: int) -> list[float]:
        model = copy.deepcopy(self.model)
        found = []
        with swapper.SwapManager(self.directory, "16MiB", resume="auto", rng=True) as manager:
            torch.manual_seed(0)
            model, optimizer = manager.offload(model, trained(model), params="nvme", **self.options)
            while len(found) < steps:
                found.append(train_step(model, optimizer).item())
        return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_run_goes_on_wherever_the_file_is_meanwhile(run: Run) -> None:
    plain = copy.deepcopy(run.model)
    torch.manual_seed(0)
    optimizer = trained(plain)
    expected = [train_step(plain, optimizer).item() for _ in range(4)]
    found = run.train(2)
    assert verify(run.directory)[0].faults == []
    moved = shutil.move(run.path, run.directory / "moved.safetensors")
    faults = verify(run.directory)[0].faults
    assert [fault.path for fault in faults] == [str(run.path)]
    run.options["external"] = swapper.ExternalWeights(path=moved)
    assert found + run.train(2) == expected
    assert found_in(run.directory / "rank-0-of-1", frozen(plain)) == []


def test_a_run_that_goes_on_after_a_restart_of_the_system(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """All checksums are compared then; what is external has none."""
    run.train(1)
    monkeypatch.setattr("swapper.durability.recovery.boot_id", lambda: "another one")
    assert run.train(1)


def test_another_file_is_refused(run: Run) -> None:
    run.train(1)
    os.utime(run.path, ns=(1, 1))
    assert any("changed since the commit" in fault.what for fault in verify(run.directory)[0].faults)
    with pytest.raises(swapper.CheckpointError, match=r"reads frozen parameters from .*base.safetensors as of then"):
        run.train(1)


def test_a_run_that_goes_on_must_be_given_the_file(run: Run) -> None:
    run.train(1)
    run.options.clear()
    with pytest.raises(swapper.CheckpointError, match=r"base.safetensors: pass external="):
        run.train(1)


def test_a_run_that_has_its_own_copy_goes_on_with_that(run: Run) -> None:
    options, run.options = run.options, {}
    run.train(1)
    run.options = options
    with pytest.raises(swapper.CheckpointError, match=r"leave external= \(.*base.safetensors\) out"):
        run.train(1)

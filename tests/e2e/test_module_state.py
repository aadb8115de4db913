"""Commits have what a state_dict has besides parameters: a run that goes on has it as it was."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapper
from e2e.twins import assert_same
from swapper.durability.commit import read_commit

WIDTH = 128
STOPS = (1, 2, 4, 6)


class Counting(nn.Module):
    """Keeps values in every form that a module can: they change in forwards, and forwards depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("past_data", torch.zeros(WIDTH))
        self.register_buffer("grows", torch.zeros(0))
        self.register_buffer("made_later", None)
        self.register_buffer("phase", torch.ones(2, 3, dtype=torch.complex64).t())
        self.register_buffer("mask", torch.ones(64, 64).tril())
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.past_data.data.lerp_(hidden.detach().mean(0), 0.5)  # leaves the version as it was
        self.grows = torch.cat([self.grows, hidden.detach().mean().view(1)])
        self.made_later = self.past_data.square() if self.made_later is None else self.made_later + 1
        self.phase.mul_(1j)
        remembered = self.grows.mean() + self.made_later + self.phase.real.mean()
        return hidden * self.scale + self.past_data + remembered / self.calls

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm1d(WIDTH, affine=False, momentum=None),
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 4 * WIDTH)),
        nn.BatchNorm1d(4 * WIDTH),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4 * WIDTH, WIDTH)),
        Counting(),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    torch.manual_seed(number)
    loss: torch.Tensor = model(torch.randn(8, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def besides(model: nn.Module) -> dict[str, Any]:
    """Return what the model's state_dict has besides parameters; of a closed run too."""
    found: dict[str, Any] = {f"{len(model) - 1}._extra_state": model[-1].get_extra_state()}
    scratch = model[-1].scratch
    return found | {name: buffer for name, buffer in model.named_buffers() if buffer is not scratch}


PLACES = {
    "nvme": {"params": "nvme", "optimizer_state": "nvme"},
    "host": {"params": "host", "optimizer_state": "host"},
    "deferred": {"params": "nvme", "optimizer_state": "nvme", "update": "deferred"},
    "backward": {"params": "nvme", "optimizer_state": "nvme", "update": "backward"},
}


def park(manager: swapper.SwapManager, model: nn.Module, optimizer: Any) -> None:
    """The next commit is of another session."""
    with manager.parked():
        pass


def nothing(manager: swapper.SwapManager, model: nn.Module, optimizer: Any) -> None:
    """Between two steps."""


@pytest.mark.parametrize("between", [nothing, park])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_goes_on_has_its_buffers_and_extra_state(
    tmp_path: Path, place: str, between: Callable[..., None]
) -> None:
    plain, optimizer = make()
    expected = [step(plain, optimizer, number) for number in range(STOPS[-1])]
    losses = []
    for stop in STOPS:
        commits = swapper.CommitPolicy(every=1)
        with swapper.SwapManager(tmp_path, host_memory="32MiB", resume="auto", commits=commits) as manager:
            model, paged = manager.offload(*make(), **PLACES[place])
            while manager.step < stop:
                losses.append(step(model, paged, manager.step))
                between(manager, model, paged)
    assert_same(losses, expected)
    assert_same(besides(model), besides(plain))


def test_several_models_have_theirs(tmp_path: Path) -> None:
    plain, optimizer = make()
    other, _ = make()
    for number in range(4):
        step(plain, optimizer, number)
        other(torch.randn(8, WIDTH))
    for stop in (2, 4):
        with swapper.SwapManager(tmp_path, host_memory="32MiB", resume="auto") as manager:
            (mine, paged), (average, _) = make(), make()
            models = {"policy": mine, "average": average}
            models, paged = manager.offload(models, paged, params="nvme", optimizer_state="nvme")
            while manager.step < stop:
                torch.manual_seed(manager.step)
                hidden = torch.randn(8, WIDTH)
                torch.manual_seed(manager.step)
                with torch.no_grad():
                    average(hidden)
                step(mine, paged, manager.step)
    assert_same(besides(mine), besides(plain))
    assert average[-1].calls == mine[-1].calls == 4


def test_what_is_as_the_script_makes_it_takes_no_space(tmp_path: Path) -> None:
    with swapper.SwapManager(tmp_path, host_memory="32MiB") as manager:
        model, optimizer = manager.offload(*make(), params="nvme", optimizer_state="nvme")
        step(model, optimizer, 0)
        directory = manager.current.directory.path
    record = read_commit(directory)
    assert record is not None
    assert record.modules.keys() == besides(model).keys() - {"4.mask"}


def test_a_model_without_what_the_run_has_is_refused(tmp_path: Path) -> None:
    with swapper.SwapManager(tmp_path, host_memory="32MiB") as manager:
        model, optimizer = manager.offload(*make(), params="nvme", optimizer_state="nvme")
        step(model, optimizer, 0)
    model, optimizer = make()
    del model[-1].past_data
    with (
        swapper.SwapManager(tmp_path, host_memory="32MiB", resume="auto") as manager,
        pytest.raises(swapper.CheckpointError, match=r"the commit has 4\.past_data"),
    ):
        manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")


def test_what_a_commit_cannot_have_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Counting())
    model.register_buffer("sparse", torch.eye(4).to_sparse())
    model[1].calls = object()
    with swapper.SwapManager(tmp_path, host_memory="32MiB") as manager:
        with caplog.at_level(logging.WARNING, "swapper"):
            manager.offload(model, torch.optim.AdamW(model.parameters()), params="nvme", optimizer_state="nvme")
    told = [record.getMessage().split(" (")[0] for record in caplog.records]
    assert [text for text in told if "commits are" in text] == [
        "commits are without sparse",
        "commits are without 1._extra_state",
    ]

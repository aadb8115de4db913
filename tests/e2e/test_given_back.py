"""`close` gives the budget back at once: memory by its place, objects by reference; Python's collector is off throughout."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and what it imports keeps the frames that there are
from torch import nn

import swapper
from e2e.given_back import arena_addresses, arena_bytes, bytes_at, no_collector
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import adamw, before_each_update, named_budget

CAPPED = Path(__file__).resolve().parents[2] / "tools" / "capped"
NOT_PERMITTED = 77
SLACK = 64 << 10
A_GROUP = 1 << 20
WAYS: list[dict[str, Any]] = [
    *({"params": params, "optimizer_state": state} for params, state in itertools.product(("host", "nvme"), repeat=2)),
    {"update": "deferred"},
    {"update": "backward"},
    {"gradients": "nvme"},
    {"master_weights": torch.float32},
]


def name_of(way: dict[str, Any]) -> str:
    return "-".join(f"{value}" for value in way.values())


def usable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a closed model that did not live on NVMe."""
    return {name: p for name, p in model.named_parameters() if type(p) is nn.Parameter}


def kept_bytes(model: nn.Module) -> int:
    """Return what a closed model's usable parameters take at swapper's places."""
    return sum(-(-p.nbytes // 4096) * 4096 for p in usable(model).values())


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_close_gives_the_budget_back_though_the_model_and_the_manager_are_still_there(tmp_path: Path, way: Any) -> None:
    plain, make = Net(), adamw if "master_weights" not in way else None
    with no_collector():
        model = copy.deepcopy(plain)
        manager = swapper.SwapManager(tmp_path, host_memory="64MiB")
        _, optimizer = manager.offload(model, adamw(model.parameters()), **way)
        views = {name: p.detach() for name, p in usable(model).items()}  # of which the user keeps an alias
        run(model, optimizer)
        assert arena_bytes() > 1 << 20
        addresses = arena_addresses()
        manager.close()
        assert arena_bytes() == 0
        assert bytes_at(addresses) <= kept_bytes(model) + SLACK
        assert_alike(model, plain, views, trained=make)
        del views


def run(model: nn.Module, optimizer: Any) -> None:
    torch.manual_seed(0)
    for _ in range(2):
        train_step(model, optimizer)


def assert_alike(model: nn.Module, plain: nn.Module, views: dict[str, torch.Tensor], trained: Any = adamw) -> None:
    """Assert that what stayed usable is ordinary memory with the bytes of plain torch, in place, also in forked children."""
    if trained is not None:
        run(plain, trained(plain.parameters()))
        for name, parameter in usable(model).items():
            assert torch.equal(parameter, plain.get_parameter(name)), name
    for name, view in views.items():
        with torch.no_grad():
            model.get_parameter(name).add_(1)
        assert torch.equal(view, model.get_parameter(name))
    child = os.fork()
    if child == 0:
        os._exit(sum(int(not torch.isfinite(p).all()) for p in usable(model).values()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_gradients_that_somebody_has_stay_as_plain_tensors(tmp_path: Path) -> None:
    model = Net()
    with no_collector():
        manager = swapper.SwapManager(tmp_path, host_memory="64MiB")
        manager.offload(model, adamw(model.parameters()), params="nvme", gradients="host")
        loss_of(model, tokens()).backward()
        before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        assert before
        addresses = arena_addresses()
        manager.close()
        assert arena_bytes() == 0
        held = bytes_at(addresses)
        assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters() if name in before)
        for parameter in model.parameters():
            parameter.grad = None
        assert bytes_at(addresses) <= held - sum(gradient.nbytes for gradient in before.values()) + SLACK


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_nothing_of_ours_keeps_a_closed_model(tmp_path: Path, way: Any) -> None:
    with no_collector():
        model = Net()
        manager = swapper.SwapManager(tmp_path, host_memory="64MiB")
        optimizer = manager.offload(model, adamw(model.parameters()), **way)[1]
        run(model, optimizer)
        manager.close()
        ghosts = [weakref.ref(thing) for thing in (model, *model.parameters())]
        optimizer.param_groups.clear()  # torch's own optimizers are in a cycle with themselves
        del model, optimizer
        assert all(ghost() is None for ghost in ghosts)  # though the manager is still there


def test_what_is_left_of_a_closed_manager_says_so(tmp_path: Path) -> None:
    model = Net()
    manager = swapper.SwapManager(tmp_path, host_memory="64MiB")
    _, optimizer = manager.offload(model, adamw(model.parameters()))
    run(model, optimizer)
    session, state = manager.current.run, optimizer.state
    assert session is not None
    offloaded, placed = session.model, session.placed
    manager.close()
    uses = (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.state,
        lambda: len(state),
        lambda: offloaded.updates,
        lambda: placed.groups,
        lambda: manager.snapshot(tmp_path / "x.pt"),
    )
    for use in uses:
        with pytest.raises(swapper.StateError, match="the manager is closed"):
            use()


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_an_exception_that_is_kept_keeps_no_memory(tmp_path: Path, way: Any) -> None:
    """Its traceback has the frames of swapper's own functions, and those everything that swapper has."""
    model = Net()
    with no_collector():
        manager = swapper.SwapManager(tmp_path, host_memory="64MiB")
        _, optimizer = manager.offload(model, adamw(model.parameters()), **way)
        run(model, optimizer)
        swept = manager.current.run.model._sweep
        before_each_update(swept, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError) as kept:
            run(model, optimizer)
            loss_of(model, tokens())  # of a deferred step
        addresses = arena_addresses()
        optimizer.zero_grad()
        del swept
        with contextlib.suppress(swapper.SwapperError):
            manager.close()
        assert arena_bytes() == 0
        frames = (
            sum(p.nbytes for p in model.parameters()) + A_GROUP
        )  # they have the gradients, and what was being updated
        assert bytes_at(addresses) <= kept_bytes(model) + frames
        assert kept.tb is not None


@pytest.mark.parametrize("kept", ["nothing", "a gradient"])
@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_a_backward_that_failed_leaves_nothing_mapped(tmp_path: Path, way: Any, kept: str) -> None:
    """Autograd's engine has the rest of such a graph until the next backward of the thread."""

    def fail_in_backward() -> None:
        model = Net()
        manager = swapper.SwapManager(tmp_path, host_memory="64MiB")
        _, optimizer = manager.offload(model, adamw(model.parameters()), **way)
        run(model, optimizer)
        pager, name = manager.current.run.pager, "blocks.1.up.weight"

        def fail(access: Any = None) -> None:
            if access is None or (access.key is not None and access.key[:2] == ("grad", name)):
                raise swapper.IoError("read", "scratch", 0, 4096, 5)
            type(pager).acquire(pager, access)

        if way.get("gradients") == "nvme":
            vars(pager)["acquire"] = fail
        else:
            model.get_parameter(name).register_hook(lambda gradient: fail())
        with pytest.raises(swapper.IoError):
            loss_of(model, tokens()).backward()
        vars(pager).pop("acquire", None)
        if kept == "nothing":
            optimizer.zero_grad()
        with contextlib.suppress(swapper.SwapperError):  # of a step that was begun in the backward
            manager.close()
        assert arena_bytes() == 0

    with no_collector():
        fail_in_backward()
        gc.collect()
        assert arena_addresses() == []


@pytest.mark.whole
@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_an_offload_that_failed_half_way_keeps_no_memory(tmp_path: Path, way: Any) -> None:
    with torch.device("meta"):
        model = Net()
    filled: list[nn.Module] = []

    def fill(module: nn.Module) -> None:
        filled.append(module)
        if len(filled) > 3:
            raise ArithmeticError("half-way")

    with no_collector():
        manager = swapper.SwapManager(tmp_path, host_memory="64MiB")
        with pytest.raises(ArithmeticError) as kept:
            manager.offload(model, adamw(model.parameters()), init=fill, **way)
        assert arena_bytes() == 0
        manager.close()
        assert kept.tb is not None


@pytest.mark.skipif(not os.environ.get("SWAPPER_TEST_ALL"), reason="writes 1.2 GB: SWAPPER_TEST_ALL=1 runs it")
def test_four_runs_in_turn_take_the_memory_of_one(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("runs_in_turn.py")), str(tmp_path), "180"]
    run = subprocess.run(
        [str(CAPPED), "--memory", "900MB", "--directory", str(tmp_path), "--", *command], capture_output=True, text=True
    )
    if run.returncode == NOT_PERMITTED:
        pytest.skip(run.stderr.strip())
    assert "all four" in run.stdout, run.stderr


@pytest.mark.parametrize("budget", ["smallest", "64MiB"])
def test_unloading_gives_the_budget_back(tmp_path: Path, budget: str) -> None:
    reference = Net()
    torch.save(reference.state_dict(), tmp_path / "net.pt")
    with no_collector(), torch.no_grad():
        with torch.device("meta"):
            model = Net()
        if budget == "smallest":
            with pytest.raises(swapper.BudgetError) as refused:
                swapper.load(model, tmp_path / "net.pt", host_memory=1)
            budget = f"{named_budget(refused.value)}B"
        swapper.load(model, tmp_path / "net.pt", host_memory=budget)
        batch = tokens()
        for _ in range(2):
            assert torch.equal(model(batch), reference(batch))
        kept = [p for p in model.parameters() if type(p) is nn.Parameter][
            :2
        ]  # whoever has a weight that stays has it for good
        expected = [p.clone() for p in kept]
        addresses = arena_addresses()
        swapper.loaded(model).unload()
        assert arena_bytes() == 0
        assert bytes_at(addresses) <= 2 * max((p.nbytes for p in reference.parameters()), default=0) + SLACK
        assert all(torch.equal(one, other) for one, other in zip(kept, expected, strict=True))
        kept.clear()
        assert bytes_at(addresses) <= SLACK

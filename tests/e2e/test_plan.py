"""The plan says what will happen, and does nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e.keywords import for_manager, for_offload
from e2e.models import Net, layers, layers_step, train_step
from e2e.twins import Twins, adamw
from swapper.forecast.compute import ComputeTimes
from swapper.forecast.step import simulate
from swapper.paging.virtual_drive import DriveRates
from swapper.train.layout.train_placement import without_gradients

MakeTwins = Callable[..., Twins]


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"params": "host"},
        {"optimizer_state": "host"},
        {"room_bytes": 1 << 20},
        {"commit_every": None, "room_bytes": 1 << 20},
        {"commit_every": 3},
        {"commit_every": 3, "room_bytes": 2 << 20},
        {"commit_every": 2, "params": "host", "room_bytes": 2 << 20},
        {"gradients": "nvme"},
    ],
    ids=str,
)
def test_a_step_moves_what_was_planned(twins: MakeTwins, options: dict[str, object], master: bool) -> None:
    pair = twins(layers(), master=master, wait=True, **options)
    plan = pair.plan()
    pair.offload()
    manager = pair.manager
    assert manager is not None
    assert plan.budget.pool_bytes == manager.counters.pool_bytes
    assert plan.places == {
        "param": options.get("params", "nvme"),
        "state": options.get("optimizer_state", "nvme"),
        "grad": options.get("gradients", "host"),
    }
    pair.train(layers_step, steps=6)
    before = manager.counters.snapshot()
    pair.train(layers_step, steps=6)
    after = manager.counters.snapshot()
    read, written = ((after[name] - before[name]) / 6 for name in ("bytes_read", "bytes_written"))
    on_the_way = manager.counters.pool_bytes / 6  # when the counting began, or ended
    planned_read = plan.traffic.total_read_bytes
    planned = plan.traffic.total_written_bytes + (plan.commit_bytes / plan.commit_every if plan.commit_every else 0)
    assert read - planned_read <= 0.02 * read + on_the_way
    assert written - planned <= 0.02 * written + on_the_way
    # Where the drive is late, pages stay until they are used again: not read, nor written unless a commit is due each step.
    stayed = manager.counters.pool_bytes
    assert planned_read - read <= 0.02 * read + on_the_way + stayed
    assert planned - written <= 0.02 * written + on_the_way + (0 if plan.commit_every == 1 else stayed)
    assert sum(path.stat().st_blocks * 512 for path in pair.run_files()) == pytest.approx(
        plan.space_bytes - plan.scratch_bytes, rel=0.02
    )


def test_planning_changes_nothing(tmp_path: Path) -> None:
    model = Net()
    optimizer = adamw(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        text = str(manager.plan(model, optimizer))
        assert [path.name for path in tmp_path.rglob("*") if path.suffix == ".swap"] == []
    for word in ("parameters", "host memory", "drive space", "a step reads", "commits", "wear"):
        assert word in text
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    assert not optimizer.state


def test_a_budget_that_is_too_small_is_refused_by_the_plan_too(tmp_path: Path) -> None:
    model = Net()
    with (
        swapper.SwapManager(tmp_path, host_memory=4096) as manager,
        pytest.raises(swapper.BudgetError, match="at least"),
    ):
        manager.plan(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")


# --- what was planned is what is done -----------------------------------------------------------------------------------

MIB = 1 << 20
ON_DEVICE = {"device_memory": 16 * MIB, "update_on": "device"}
SAID: list[dict[str, Any]] = [
    {},
    {"params": "nvme", "optimizer_state": "nvme"},
    {"params": "host", "optimizer_state": "nvme", "commit_every": 2},
    {"params": "nvme", "optimizer_state": "nvme", "gradients": "nvme", "update": "deferred"},
    {"params": "nvme", "master_weights": torch.float32, "commit_every": None},
    {"device": "late", "optimizer_state": "device", **ON_DEVICE},
    {"device": "late", "params": "nvme", "gradients": "auto", **ON_DEVICE},
]


@pytest.mark.parametrize("said", SAID, ids=str)
def test_offload_does_what_a_plan_says(tmp_path: Path, said: dict[str, Any]) -> None:
    said = dict(said)
    policy = for_manager({name: said.pop(name) for name in ("commit_every",) if name in said})
    if "device" in said:
        said["device"] = HostDevice(said["device"])
    for resume in ("error", "auto"):  # a new run, and one that is gone on from
        model = Net()
        optimizer = adamw(model.parameters())
        with swapper.SwapManager(tmp_path, "16MiB", resume=resume, **policy) as manager:
            plan = manager.plan(model, optimizer, **for_offload(said))
            told = str(plan)
            same, paged = manager.offload(model, optimizer, plan)
            assert same is model
            run, counters = manager.current.run, manager.counters
            assert run.plan is plan and str(run.plan) == told
            assert counters.pool_bytes == plan.budget.pool_bytes == plan.budget.frame_count * plan.budget.page_bytes
            assert counters.resident_bytes == plan.budget.resident_bytes
            planned = [*plan.make_sections(), *plan.make_grad_sections(0)]
            made = [*run.sections, *run._grad_sections]
            assert [(s.plan, s.resident, len(s.pages)) for s in made] == [
                (s.plan, s.resident, len(s.pages)) for s in planned
            ]
            assert {page.nbytes for s in made for page in s.pages} <= {page.nbytes for s in planned for page in s.pages}
            files = list(tmp_path.rglob("*.swap"))
            assert (
                sum(path.stat().st_size for path in files)
                <= plan.turns * (plan.layout.tail_offset + MIB) + plan.scratch_bytes
            )
            begin = manager.step
            train_step(model, paged)
            assert manager.step == begin + 1


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(8, 8)
    return model, adamw(model.parameters())


def add_layer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.extra = nn.Linear(8, 8)


def add_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    optimizer.add_param_group({"params": [group["params"].pop()]})


def replace_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.weight = nn.Parameter(torch.zeros(8, 8))


def freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.weight.requires_grad_(False)


def narrow(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.weight.data = model.weight.data.half()


@pytest.mark.whole
@pytest.mark.parametrize("change", [add_layer, add_group, replace_parameter, freeze, narrow])
def test_a_plan_of_what_has_changed_since_is_refused(tmp_path: Path, change: Callable[..., None]) -> None:
    model, optimizer = linear()
    with swapper.SwapManager(tmp_path, "8MiB") as manager:
        plan = manager.plan(model, optimizer)
        change(model, optimizer)
        with pytest.raises(swapper.SwapperError) as told:
            manager.offload(model, optimizer, plan)
        assert "changed since manager.plan: plan again" in str(told.value) or change is replace_parameter
        assert type(model.weight) is nn.Parameter and not list(tmp_path.rglob("*.swap"))
        if change is not replace_parameter:  # of which the optimizer does not know
            manager.offload(model, optimizer, manager.plan(model, optimizer))


def test_a_plan_for_something_else_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = linear()
    several = {"a": model, "b": nn.Linear(8, 8)}
    (tmp_path / "one").mkdir()
    with swapper.SwapManager(tmp_path / "one", "8MiB") as manager, swapper.SwapManager(tmp_path, "8MiB") as other:
        plan = manager.plan(model, optimizer)
        with pytest.raises(swapper.StateError, match=r"manager of .*one/rank-0-of-1, and this one has .*/rank-0-of-1"):
            other.offload(model, optimizer, plan)
        with pytest.raises(
            swapper.StateError, match=r"for another model \(Linear\) than the one that is given \(Net\)"
        ):
            manager.offload(Net(), optimizer, plan)
        with pytest.raises(swapper.StateError, match=r"for another optimizer \(AdamW\) .* \(SGD\)"):
            manager.offload(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
        with pytest.raises(swapper.StateError, match=r"for another optimizer \(AdamW\) .* \(NoneType\)"):
            manager.offload(model, None, plan)
        with pytest.raises(swapper.StateError, match=r"for another model \(Linear\) .* \(dict\)"):
            manager.offload(several, optimizer, plan)
        for options in (
            {"params": "nvme"},
            {"device_memory": "1GiB"},
            {"accelerator": swapper.Accelerator(update_on="auto")},
        ):
            with pytest.raises(swapper.ConfigError, match=rf"{next(iter(options))} with a plan"):
                manager.offload(model, optimizer, plan, **options)
        with pytest.raises(swapper.ConfigError, match=r"plan='nvme' is not known: give manager\.plan"):
            manager.offload(model, optimizer, "nvme")  # type: ignore[arg-type]
        manager.offload(dict(several), optimizer, manager.plan(several, optimizer))


@pytest.mark.whole
@pytest.mark.parametrize(
    "said, match",
    [
        ({"accelerator": "device"}, r"accelerator='device' is not known: say accelerator=swapper.Accelerator\("),
        ({"external": "base.pt"}, r"external='base.pt' is not known: say external=swapper.ExternalWeights\(path"),
        ({"params": "floppy"}, "params='floppy' is not known"),
        ({"update": "never"}, "update='never' is not known"),
        ({"accelerator": swapper.Accelerator(update_on="device")}, "update_on='device' needs a device"),
    ],
    ids=str,
)
def test_both_verbs_refuse_the_same(tmp_path: Path, said: dict[str, Any], match: str) -> None:
    model, optimizer = linear()
    with swapper.SwapManager(tmp_path, "8MiB") as manager:
        for verb in (manager.plan, manager.offload):
            with pytest.raises(swapper.ConfigError, match=match):
                verb(model, optimizer, **said)


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("placement", [{}, {"params": "host"}, {"gradients": "nvme"}], ids=str)
def test_a_predicted_step_moves_what_is_planned_and_takes_the_time_of_what_limits_it(
    tmp_path: Path, placement: dict[str, object], update: str
) -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with swapper.SwapManager(tmp_path, host_memory="10MiB") as manager:
        options: dict[str, object] = {"params": "nvme", "optimizer_state": "nvme", "update": update, **placement}
        plan = manager.plan(model, optimizer, **options)  # type: ignore[arg-type]
    rate = float(1 << 20)
    nothing = dict.fromkeys((group.index for group in plan.inventory.groups), 0.0)
    moved = simulate(plan, DriveRates(rate, rate, 2 * rate), ComputeTimes(nothing, nothing))
    drive_s = max(moved.read_bytes, moved.written_bytes) / rate
    pool_s = plan.budget.pool_bytes / rate  # what a step leaves to the next
    assert abs(moved.read_bytes - plan.traffic.total_read_bytes) <= plan.budget.pool_bytes
    assert drive_s - pool_s <= moved.wall_s <= 1.3 * drive_s + pool_s
    assert moved.total.computing_s == pytest.approx(0.0, abs=1e-9)
    long = dict.fromkeys(nothing, 1000.0)
    computed = simulate(plan, DriveRates(rate, rate, 2 * rate), ComputeTimes(long, long))
    assert computed.total.computing_s == pytest.approx(2000.0 * len(long))
    assert computed.wall_s <= computed.total.computing_s + drive_s + pool_s


def test_a_prediction_needs_to_know_the_drive(tmp_path: Path) -> None:
    model = layers()
    with swapper.SwapManager(tmp_path, host_memory="8MiB") as manager:
        plan = manager.plan(model, torch.optim.AdamW(model.parameters()), params="nvme", optimizer_state="nvme")
    with pytest.raises(swapper.ConfigError, match=r"swapper tune.*drive_read="):
        plan.predict(tokens=64)
    with pytest.raises(swapper.ConfigError, match="drive_write='fast'"):
        plan.predict(tokens=64, drive_read="1GB", drive_write="fast")
    with pytest.raises(swapper.ConfigError, match="tokens=0"):
        plan.predict(tokens=0, drive_read="1GB", drive_write="1GB")
    with pytest.raises(swapper.ConfigError, match="drive_write='7Gb': Gb could mean bits or bytes"):
        plan.predict(tokens=64, drive_read="1GB/s", drive_write="7Gb")
    predicted = plan.predict(tokens=64, drive_read="1MB/s", drive_write="1MB")
    assert predicted.total.computing_s > 0 and predicted.total.update_s > 0
    assert predicted.total.wait_s > 0.5 * plan.traffic.total_read_bytes / 10**6


def test_an_inventory_that_stays_as_it_is_keeps_what_it_has_found_out(tmp_path: Path) -> None:
    """To find the kinds of groups of a large model takes longer than the rest of a plan."""
    model = layers()
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        inventory = manager.plan(model, adamw(model.parameters())).inventory
    assert without_gradients(inventory, ()) is inventory and inventory.with_state_staying(frozenset()) is inventory
    group = inventory.groups[0].index
    assert inventory.with_state_staying(frozenset({group})).staying_state == {group}
    assert all(plan.group != group for plan in without_gradients(inventory, {group}).grad_plans)

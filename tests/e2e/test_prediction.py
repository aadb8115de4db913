"""A prediction measures what a session does, changes nothing, and is shown with what came."""

from __future__ import annotations

import gc
import random
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import swapper
from e2e.models import LAYER_WIDTH, layers, layers_step
from e2e.twins import adamw
from swapper.bench.plain import Gpt, GptConfig, make_optimizers
from swapper.infer.planning.lease_costs import measure_lease_costs
from swapper.modules.groups import partition
from swapper.modules.guarded import guarded_parameters
from swapper.modules.operations import (
    SCRATCH_BYTES,
    ColdCaches,
    OperationTimes,
    RecordedOperation,
    TensorForm,
    middle,
    part_of,
    record,
)
from swapper.modules.paging_costs import measure_paging_costs
from swapper.paging.dry_run import Task
from swapper.paging.virtual_drive import PagingCosts
from swapper.train.planning.compute_times import ComputeTimes
from swapper.train.planning.update_times import Trial, fixed_seconds

RATES: dict[str, Any] = {"drive_read": "1GB", "drive_write": "1GB"}
CONFIG = GptConfig(vocabulary=128, context=16, layers=3, width=64)
TOKENS = torch.arange(16).view(1, 16)


class Names(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim" and not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_recording_has_the_operations_of_a_step_and_leaves_the_model_alone(dtype: torch.dtype) -> None:
    model = Gpt(CONFIG).to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters, state = list(model.parameters()), (torch.get_rng_state(), random.getstate())
    groups, units = partition(model)
    recording = record(model, units, (TOKENS, TOKENS), {}, True)
    assert all(mine is given for mine, given in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in parameters) and not model._forward_hooks
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
    with Names() as names:
        model(TOKENS, TOKENS).backward()
    recorded: Counter[str] = Counter()
    for counts in recording.counts.values():
        for operation, count in counts.items():
            recorded[str(operation.function)] += count
    assert recorded == names.counts
    layer = [
        {k.function: n for k, n in recording.counts["backward", g.index].items()} for g in groups if "layers" in g.name
    ]
    assert len(layer) == CONFIG.layers and all(one == layer[0] for one in layer[1:-1])


def test_a_recording_knows_the_most_that_is_in_memory_at_once() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2.0).exp().exp().sum()  # both results of exp are saved; the product is not

    x = torch.zeros(1 << 20, requires_grad=True)
    nbytes = x.nbytes
    forward, both = (max(record(Chain(), (), (x,), {}, train).live_bytes.values()) for train in (False, True))
    assert forward == 2 * nbytes and 3 * nbytes <= both <= 5 * nbytes


def test_what_an_operation_takes_while_it_runs_counts_too() -> None:
    def apart(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * 8)[: len(x)] * 2.0

    def in_place(x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.cat([x] * 8)[: len(x)])

    x = TensorForm((4 << 20,), (1,), torch.float32)
    _, tree = _pytree.tree_flatten(((x,), {}), is_leaf=lambda leaf: isinstance(leaf, TensorForm))
    times = OperationTimes()
    takes, takes_too, takes_nothing = (
        RecordedOperation(function, (x,), tree) for function in (apart, in_place, torch.ops.aten.exp.default)
    )
    assert times.workspace_bytes(takes) == pytest.approx(8 * x.nbytes, rel=0.1)
    assert times.workspace_bytes(takes_too) == pytest.approx(8 * x.nbytes, rel=0.1)
    assert times.workspace_bytes(takes_nothing) < x.nbytes // 8
    assert times.peak_bytes({takes: 10, takes_nothing: 2 * x.nbytes}) == times.workspace_bytes(takes) + 10


def test_memory_counts_gradients_that_stay_beside_all_activations_and_holes_where_they_are_copied(
    tmp_path: Path,
) -> None:
    model = Gpt(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        for params in ("host", "nvme"):
            plan = manager.plan(model, optimizer, params=params, optimizer_state="nvme", gradients="host")
            assert plan.memory["gradients"] >= gradient_bytes and "activations" not in plan.memory
            compute = plan.with_gradients(plan.measure_compute(16, (TOKENS, TOKENS)))
            plan.predict_on(plan.drive_rates(**RATES), replace(compute, activation_bytes=24 << 20))
            assert plan.memory["activations"] == 24 << 20
            assert plan.memory.get("allocator", 0) == (0 if params == "host" else 12 << 20)


def test_an_operation_that_is_too_large_is_measured_on_a_part_of_it() -> None:
    float32 = torch.float32
    forms = TensorForm((1 << 14, 1024), (1024, 1), float32), TensorForm((1024, 1 << 15), (1, 1024), float32)
    _, tree = _pytree.tree_flatten((forms, {}), is_leaf=lambda leaf: isinstance(leaf, TensorForm))
    part, share = part_of(RecordedOperation(torch.ops.aten.mm.default, forms, tree))
    rows, columns = part.forms
    assert all(form.nbytes <= SCRATCH_BYTES // 4 for form in part.forms) and rows.shape[1] == columns.shape[0]
    assert share == rows.shape[0] * rows.shape[1] * columns.shape[1] / ((1 << 14) * 1024 * (1 << 15))
    assert columns.stride == (1, columns.shape[0])
    assert OperationTimes().seconds(part) > 0


def test_an_operation_that_cannot_run_alone_is_named(caplog: pytest.LogCaptureFixture) -> None:
    _, tree = _pytree.tree_flatten(((1,), {}))
    assert OperationTimes().seconds(RecordedOperation(torch.ops.aten.mm.default, (1,), tree)) == 0
    assert "aten.mm.default cannot be measured alone" in caplog.text


def test_caches_are_emptied_without_threads_of_torch() -> None:
    """They would spin on the processors that what is measured next needs."""
    with Names() as names:
        caches = ColdCaches()
        names.counts.clear()
        caches.make()
    assert not names.counts


@pytest.mark.parametrize(
    "measure", [partial(measure_paging_costs, has_checksums=True), partial(measure_lease_costs, makes=True)]
)
def test_a_trial_of_paging_finds_what_threads_take_and_leaves_nothing_behind(measure: Any) -> None:
    def everything() -> tuple[set[int], set[str], int]:
        threads = {(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}
        return {id(one) for one in guarded_parameters()}, threads, len(list(Path("/proc/self/fd").iterdir()))

    before = everything()
    costs = measure(64 << 10)
    gc.collect()
    assert costs.access_s > 0 and costs.page_s + costs.mapped_byte_s > 0 and costs.transfer_s > 0
    assert everything() == before


def test_of_several_rounds_the_median_of_each_number_counts() -> None:
    costs = PagingCosts(page_s=1e-4, takes_turns=False)
    rounds = [
        ComputeTimes({0: seconds, 1: 2.0}, {0: 9.0 - seconds}, 0.0, paging=replace(costs, page_s=seconds))
        for seconds in (1.0, 7.0, 3.0)
    ]
    assert middle(rounds) == ComputeTimes({0: 3.0, 1: 2.0}, {0: 6.0}, 0.0, paging=replace(costs, page_s=3.0))


def test_what_is_fixed_of_an_update_is_of_its_slice_and_of_its_pieces() -> None:
    assert fixed_seconds(Trial(5.0, 1, 1), Trial(13.0, 1, 9)) == (4.0, 1.0)
    assert fixed_seconds(Trial(5.0, 1, 1), Trial(18.0, 2, 10)) == (4.0, 1.0)  # two slices of small pages
    assert fixed_seconds(Trial(5.0, 1, 1), Trial(45.0, 9, 9)) == (5.0, 0.0)  # each in a slice of its own
    assert fixed_seconds(Trial(5.0, 1, 1), Trial(4.0, 1, 9)) == (5.0, 0.0)  # a disturbed trial
    compute = ComputeTimes({}, {}, 0.0, {0: 2.0}, piece_s=1.0, slice_s=4.0)
    assert compute.of(Task("step", 0, [], updated=3, pieces=2)) == 3 * 2.0 + 4.0 + 2 * 1.0
    assert compute.faster(2).of(Task("step", 0, [], updated=3, pieces=2)) == 6.0


@pytest.mark.parametrize("codec", ["exact", "8bit"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_prediction_measures_the_update_of_each_optimizer(tmp_path: Path, kind: str, codec: str) -> None:
    model = Gpt(CONFIG).to(torch.bfloat16)
    optimizers = make_optimizers(model.named_parameters(), 1e-3, kind)
    before = [{id(p): p for group in one.param_groups for p in group["params"]} for one in optimizers]
    with swapper.SwapManager(tmp_path, host_memory="8MiB") as manager:
        plan = manager.plan(
            model, optimizers, params="nvme", optimizer_state="nvme", master_weights=torch.float32, state_codec=codec
        )
        compute = plan.measure_compute(16, (TOKENS, TOKENS))
        predicted = plan.predict(16, example={"tokens": TOKENS, "targets": TOKENS}, **RATES)
    assert compute.group_update_s.keys() == {group.index for group in plan.inventory.groups}
    assert all(seconds >= 0 for seconds in compute.group_update_s.values()) and compute.slice_s > 0 <= compute.piece_s
    assert sum(compute.forward_s.values()) > 0 and sum(compute.backward_s.values()) > 0
    assert predicted.total.update_s > 0 and compute.activation_bytes is not None
    assert all(not one.state for one in optimizers)
    assert [{id(p): p for g in one.param_groups for p in g["params"]} for one in optimizers] == before
    parts = plan.memory
    assert (
        parts["what stays"] + parts["gradients"] + parts["pool"] == plan.budget.resident_bytes + plan.budget.pool_bytes
    )


def test_what_was_predicted_is_shown_beside_what_came(tmp_path: Path) -> None:
    model = layers()
    with swapper.SwapManager(tmp_path, host_memory="10MiB") as manager:
        plan = manager.plan(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        predicted = plan.predict(4, example=(torch.zeros(4, LAYER_WIDTH),), **RATES)
        assert "predicted" in str(plan) and "peak memory" in str(plan)
        model, optimizer = manager.offload(model, plan.request.given[1], plan)
        for _ in range(3):
            layers_step(model, optimizer)
        achieved = manager.stats()
    assert achieved.predicted is predicted and predicted.help is not None
    assert abs(achieved.read_bytes - predicted.read_bytes) <= plan.budget.pool_bytes
    assert abs(achieved.written_bytes - predicted.written_bytes) <= plan.budget.pool_bytes
    shown = str(achieved).splitlines()
    assert sum(line.startswith("  predicted") for line in shown) == len(achieved.phases) + 1
    assert f"bound by {achieved.bound}" in shown and f"predicted: {predicted.help}" in shown


def test_an_offloaded_model_and_what_is_not_measured_are_refused(tmp_path: Path) -> None:
    model = layers()
    with swapper.SwapManager(tmp_path, host_memory="10MiB") as manager:
        on_device = manager.plan(model, adamw(model.parameters()), device=HostDevice())
        with pytest.raises(swapper.UnsupportedError, match="predict does not go with a device"):
            on_device.predict(tokens=64, **RATES)
        plan = manager.plan(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        manager.offload(model, plan.request.given[1], plan)
        with pytest.raises(swapper.StateError, match=r"offloaded already: predict its step before manager\.offload"):
            plan.predict(4, example=(torch.zeros(4, LAYER_WIDTH),), **RATES)


@pytest.mark.slow
def test_a_model_that_cannot_be_recorded_counts_its_products(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = layers()
    with swapper.SwapManager(tmp_path, host_memory="10MiB") as manager:
        plan = manager.plan(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        predicted = plan.predict(4, **RATES)  # takes no integers
    assert "could not be recorded" in caplog.text and predicted.phases["forward"].computing_s > 0


def test_of_two_settings_the_fastest_is_planned_and_why_is_said(tmp_path: Path) -> None:
    """Of more: test_the_fastest_setting_is_the_one_whose_step_is_shortest."""
    model, example = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), (torch.zeros(4, 64),)
    slow: dict[str, Any] = {"drive_read": "1MB", "drive_write": "1MB", "tokens": 4, "example": example}
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        plan = manager.fastest(model, adamw(model.parameters()), params="nvme", updates=["step", "deferred"], **slow)
        assert plan.places["param"] == "nvme" and "the fastest of" in plan.found.why and "; next " in plan.found.why
        assert plan.found.step is not None and plan.found.step.total.update_s > 0 and "chosen" in str(plan)
        with pytest.raises(swapper.ConfigError, match="colour: not an option"):
            manager.fastest(model, tokens=4, colour="red")
        with pytest.raises(swapper.ConfigError, match="state_codecs='8bit': give a list"):
            manager.fastest(model, state_codecs="8bit", **slow)
    with swapper.SwapManager(tmp_path / "small", host_memory=1) as manager, pytest.raises(swapper.BudgetError):
        manager.fastest(model, **slow)


@pytest.mark.slow
def test_the_fastest_setting_is_the_one_whose_step_is_shortest(tmp_path: Path) -> None:
    model = layers()
    optimizer = adamw(model.parameters())
    example = (torch.zeros(4, LAYER_WIDTH),)
    slow: dict[str, Any] = {"drive_read": "1MB", "drive_write": "1MB"}  # bytes decide
    with swapper.SwapManager(tmp_path / "all", host_memory="1GiB") as manager:
        everything = manager.fastest(model, optimizer, tokens=4, example=example, **slow)
        assert everything.places == {"param": "host", "state": "host", "grad": "host"}
    with swapper.SwapManager(tmp_path, host_memory="10MiB") as manager:
        plan = manager.fastest(model, optimizer, tokens=4, example=example, params="nvme", **slow)
        assert plan.found.step is not None and "the fastest of" in plan.found.why and "chosen" in str(plan)
        compute = plan.with_gradients(plan.measure_compute(4, example))
        for update in ("step", "deferred"):
            other = manager.plan(model, optimizer, params="nvme", optimizer_state="nvme", update=update)
            assert plan.found.step.wall_s <= other.simulate(other.drive_rates(**slow), compute).wall_s * 1.03
        with pytest.raises(swapper.ConfigError, match="colour: not an option"):
            manager.fastest(model, optimizer, tokens=4, colour="red")
        with pytest.raises(swapper.ConfigError, match="state_codecs='8bit': give a list"):
            manager.fastest(model, optimizer, tokens=4, state_codecs="8bit", **slow)
        model, optimizer = manager.offload(model, optimizer, plan)
        layers_step(model, optimizer)
    with swapper.SwapManager(tmp_path / "small", host_memory="1MiB") as manager, pytest.raises(swapper.BudgetError):
        manager.fastest(layers(), None, tokens=4, example=example, params="host", **slow)


@pytest.mark.slow
@pytest.mark.parametrize("codecs", [("exact",), ("8bit", "exact")], ids=str)
@pytest.mark.parametrize("host_bytes", [10 << 20, 16 << 20, 64 << 20], ids=str)
def test_what_is_chosen_is_what_is_predicted_and_what_is_done(
    tmp_path: Path, host_bytes: int, codecs: tuple[str, ...]
) -> None:
    model = layers()
    optimizer, example = adamw(model.parameters()), (torch.zeros(4, LAYER_WIDTH),)
    with swapper.SwapManager(tmp_path, host_memory=host_bytes) as manager:
        plan = manager.fastest(
            model, optimizer, tokens=4, example=example, state_codecs=codecs, updates=("deferred", "step", "backward"),
            drive_read="20MB", drive_write="10MB",
        )  # fmt: skip
        said = re.match(
            r"parameters on (\w+), state on (\w+), update='(\w+)'(?:, state in (\w+))?, ([\d.]+) s: the (fastest|simplest)",
            plan.found.why,
        )
        assert said is not None and plan.found.why in str(plan), plan.found.why
        predicted, options = plan.found.step, plan.request.options
        assert predicted is not None and said[5] == f"{predicted.wall_s:.3f}"
        assert said.groups("exact")[:4] == (
            plan.places["param"],
            plan.places["state"],
            options.update,
            options.state_codec,
        )
        others = [float(seconds) for seconds in re.findall(r"(?:next|slowest) .*?, ([\d.]+) s", plan.found.why)]
        assert others and (said[6] == "simplest" or predicted.wall_s <= min(others) + 5e-4)
        assert predicted.wall_s <= min(others) * 1.0101 + 5e-4
        again = manager.plan(
            model, optimizer, params=said[1], optimizer_state=said[2], update=said[3], state_codec=said[4] or "exact"
        )
        assert (again.places, again.budget, again.traffic) == (plan.places, plan.budget, plan.traffic)
        assert plan.found.compute is not None
        assert again.simulate(plan.drive_rates("20MB", "10MB"), plan.found.compute).wall_s == predicted.wall_s
        model, optimizer = manager.offload(model, optimizer, plan)
        layers_step(model, optimizer)
        assert manager.current.run.plan is plan and manager.stats().predicted is predicted

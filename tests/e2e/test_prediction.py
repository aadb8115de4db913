"""A prediction measures what a session does, changes nothing, and is shown with what came."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e.models import LAYER_WIDTH, layers, layers_step
from e2e.twins import adamw
from swapper.bench.plain import Gpt, GptConfig, make_optimizers
from swapper.forecast.compute import measure_step
from swapper.forecast.measured_pass import measure_pass
from swapper.forecast.step import drive_rates, simulate
from swapper.modules.groups import partition
from swapper.runtime.free_memory import kept_free_bytes

RATES: dict[str, Any] = {"drive_read": "1GB", "drive_write": "1GB"}
CONFIG = GptConfig(vocabulary=128, context=16, layers=3, width=64)
TOKENS = torch.arange(16).view(1, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_measured_pass_has_the_time_of_each_group_and_leaves_the_model_alone(dtype: torch.dtype, where: str) -> None:
    model = Gpt(CONFIG).to(dtype).to(where)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters, state = list(model.parameters()), (torch.get_rng_state(), random.getstate())
    groups, units = partition(model)
    measured = measure_pass(model, units, (TOKENS, TOKENS), {}, True)
    assert all(mine is given for mine, given in zip(model.parameters(), parameters, strict=True))
    assert where == "meta" or all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in parameters) and not model._forward_hooks
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
    layers_of = [group.index for group in groups if "layers" in group.name]
    for phase in ("forward", "backward"):
        assert all(measured.seconds[phase, index] > 0 for index in layers_of)
    assert measured.seconds.keys() <= {(phase, g.index) for phase in ("forward", "backward") for g in groups}
    alone = measure_pass(model, units, (TOKENS,), {}, False)
    assert {phase for phase, _ in alone.seconds} == {"forward"}


def test_time_counts_for_the_module_that_takes_it_in_forward_and_in_backward() -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            work(3)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            work(6)
            return gradients[0]

    class SlowLinear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Slow.apply(super().forward(x))

    def work(times: int) -> None:
        for _ in range(times):
            sum(range(100_000))

    model = nn.Sequential(nn.Linear(8, 8), SlowLinear(8, 8), nn.Linear(8, 8))
    groups, units = partition(model)
    slow = next(group.index for group in groups if group.name.startswith("1"))
    seconds = measure_pass(model, units, (torch.zeros(1, 8),), {}, True).seconds
    for phase in ("forward", "backward"):
        others = sum(of for (one, group), of in seconds.items() if one == phase and group != slow)
        assert seconds[phase, slow] > others


def test_a_measured_pass_knows_the_most_that_is_in_memory_at_once() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2.0).exp().exp().sum()  # both results of exp are saved; the product is not

    x = torch.zeros(16 << 20, requires_grad=True)
    forward, both = (measure_pass(Chain(), (), (x,), {}, train).peak_bytes for train in (False, True))
    assert forward is not None and both is not None
    assert 1.9 * x.nbytes <= forward <= 3.1 * x.nbytes and 2.9 * x.nbytes <= both <= 5.1 * x.nbytes


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
            plan.found.activation_bytes = 24 << 20
            assert plan.memory["activations"] == 24 << 20
            assert plan.memory.get("allocator", 0) == (0 if params == "host" else kept_free_bytes(64 << 20))


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
        compute = measure_step(plan, 16, (TOKENS, TOKENS))
        predicted = plan.predict(16, example={"tokens": TOKENS, "targets": TOKENS}, **RATES)
    assert compute.update_s.keys() == {group.index for group in plan.inventory.groups}
    assert all(seconds >= 0 for seconds in compute.update_s.values())
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


def test_an_offloaded_model_is_refused(tmp_path: Path) -> None:
    model = layers()
    with swapper.SwapManager(tmp_path, host_memory="10MiB") as manager:
        plan = manager.plan(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        manager.offload(model, plan.request.given[1], plan)
        with pytest.raises(swapper.StateError, match=r"offloaded already: predict its step before manager\.offload"):
            plan.predict(4, example=(torch.zeros(4, LAYER_WIDTH),), **RATES)


@pytest.mark.parametrize("update_on", ["device", "cpu"])
def test_a_step_on_a_device_is_predicted_from_what_it_reaches(tmp_path: Path, update_on: str) -> None:
    model = layers()
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        plan = manager.plan(
            model, adamw(model.parameters()), device=HostDevice("at once", 256 << 20), optimizer_state="host",
            accelerator=swapper.Accelerator(update_on=update_on),
        )  # fmt: skip
        predicted = plan.predict(4, example=(torch.zeros(4, LAYER_WIDTH),))  # nothing is on a drive
    assert predicted.phases["forward"].wall_s > 0 and predicted.phases["backward"].wall_s > 0
    assert predicted.upload_s > 0 and predicted.download_s > 0 and predicted.savings


def test_the_fastest_setting_on_a_device_is_planned(tmp_path: Path) -> None:
    model = layers()
    device = HostDevice("at once", 256 << 20)
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        plan = manager.fastest(
            model, adamw(model.parameters()), tokens=4, example=(torch.zeros(4, LAYER_WIDTH),), device=device,
            optimizer_state="host", accelerator=swapper.Accelerator(update_on="device"),
        )  # fmt: skip
        assert plan.on_device is not None and "of 2" in plan.found.why
        model, optimizer = manager.offload(model, plan.request.given[1], plan)
        layers_step(model, optimizer)


def test_a_model_that_cannot_run_counts_its_products(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = layers()
    with swapper.SwapManager(tmp_path, host_memory="10MiB") as manager:
        plan = manager.plan(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        predicted = plan.predict(4, **RATES)  # takes no integers
    assert "did not run with the example" in caplog.text and predicted.phases["forward"].computing_s > 0


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
        compute = measure_step(plan, 4, example)
        rates = drive_rates(None, ("1MB", "1MB"))
        for update in ("step", "deferred"):
            other = manager.plan(model, optimizer, params="nvme", optimizer_state="nvme", update=update)
            assert plan.found.step.wall_s <= simulate(other, rates, compute).wall_s * 1.03
        with pytest.raises(swapper.ConfigError, match="colour: not an option"):
            manager.fastest(model, optimizer, tokens=4, colour="red")
        with pytest.raises(swapper.ConfigError, match="state_codecs='8bit': give a list"):
            manager.fastest(model, optimizer, tokens=4, state_codecs="8bit", **slow)
        model, optimizer = manager.offload(model, optimizer, plan)
        layers_step(model, optimizer)
    with swapper.SwapManager(tmp_path / "small", host_memory="1MiB") as manager, pytest.raises(swapper.BudgetError):
        manager.fastest(layers(), None, tokens=4, example=example, params="host", **slow)


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
        model, optimizer = manager.offload(model, optimizer, plan)
        layers_step(model, optimizer)
        assert manager.current.run.plan is plan and manager.stats().predicted is predicted

"""Several optimizers of one model: each steps its own parameters as in plain torch, bit for bit, and a training step is whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from devices import device_of_tests
from infer.host_device import ORDERS
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

import swapper
from e2e.models import Net, train_step
from e2e.several import Several, SeveralTwins, by_turns, muon_and_adamw, needs_muon, several
from e2e.several_run import swapped
from e2e.twins import assert_same

__all__ = ["several"]

MakeTwins = Callable[..., SeveralTwins]
TOKENS = torch.arange(8).view(1, 8)


def fixed_step(model: Any, optimizer: Any) -> torch.Tensor:
    """Take a step without random numbers."""
    loss = model(TOKENS).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def adamw_and_sgd(parameters: list[nn.Parameter], number: int) -> Any:
    return AdamW(parameters, lr=1e-3) if number == 0 else SGD(parameters, lr=1e-2, momentum=0.9)


OPTIMIZERS = {
    "muon and adamw": pytest.param(muon_and_adamw, marks=needs_muon),
    "adamw and sgd": pytest.param(by_turns(adamw_and_sgd)),
    "three": pytest.param(by_turns(lambda parameters, number: AdamW(parameters, lr=10.0 ** -(2 + number)), 3)),
}


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("gradients", ["host", "nvme"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_several_optimizers_equal_plain_torch(several: MakeTwins, make: Any, gradients: str, update: str) -> None:
    pair = several(Net(depth=8), make, gradients=gradients, update=update)
    pair.train(train_step, steps=4)
    assert pair.manager is not None and pair.manager.step == 4
    pair.finish()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_on_a_device_that_copies_images_anew_for_each_use(several: MakeTwins, update: str, order: str) -> None:
    options = {"device": device_of_tests(order), "device_memory": 6 << 20, "update_on": "device"}
    pair = several(Net(depth=12), by_turns(adamw_and_sgd), update=update, **options)
    pair.train(train_step, steps=4)
    pair.finish()


@pytest.mark.parametrize("codec", ["exact", "split"])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_they_have_fp32_masters(several: MakeTwins, make: Any, update: str, codec: str) -> None:
    pair = several(Net(depth=8).to(torch.bfloat16), make, master=True, update=update, state_codec=codec)
    pair.train(train_step, steps=3)
    assert pair.manager is not None
    coded = pair.manager.current.running("a test").plan.inventory.codecs
    assert any(coded.values()) == (codec == "split")
    pair.finish()


@pytest.mark.parametrize("placement", [("host", "nvme"), ("host", "host"), ("nvme", "host")])
def test_they_work_in_every_placement(several: MakeTwins, placement: tuple[str, str]) -> None:
    params, state = placement
    pair = several(Net(), by_turns(adamw_and_sgd), params=params, optimizer_state=state)
    pair.train(train_step, steps=3)
    pair.finish(paged=False)


def test_each_has_schedulers_groups_and_a_state_of_its_own(several: MakeTwins) -> None:
    pair = several(Net(), by_turns(adamw_and_sgd))
    schedulers = {
        id(model): [StepLR(optimizer, 1 + number, 0.5) for number, optimizer in enumerate(optimizers)]
        for model, optimizers in ((pair.plain, pair.plain_optimizer), (pair.swapped, pair.optimizer))
    }

    def run(model: Any, optimizers: Any) -> list[Any]:
        train_step(model, optimizers)
        for scheduler in schedulers[id(model)]:
            scheduler.step()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        states = [
            {names[id(p)]: {key: value.sum().item() for key, value in state.items()} for p, state in one.state.items()}
            for one in optimizers
        ]
        return [[group["lr"] for group in optimizers.param_groups], states]

    pair.train(run, steps=3)
    for original, paged in zip(pair.original, pair.optimizer, strict=True):
        assert paged.param_groups is original.param_groups
    pair.finish()


@pytest.mark.skipif(bool(devices.NAME), reason="a gradient that has left the device has no views")
@pytest.mark.parametrize("number", [0, 1])
def test_one_that_steps_at_once_leaves_the_others_settings_to_their_deferred_steps(
    several: MakeTwins, number: int
) -> None:
    """A view of a gradient that the script keeps has its optimizer step at once."""
    pair = several(Net(), by_turns(adamw_and_sgd), update="deferred")

    def run(model: Any, optimizers: Any) -> None:
        model(TOKENS).square().mean().backward()
        kept = optimizers[number].param_groups[0]["params"][-1].grad[:1]
        optimizers.step()
        for group in optimizers.param_groups:
            group["lr"] *= 0.5
        del kept
        optimizers.zero_grad()

    pair.train(run, steps=3)
    pair.finish()


def test_the_state_of_one_is_not_the_others(several: MakeTwins) -> None:
    pair = several(Net(), by_turns(adamw_and_sgd))
    pair.train(train_step, steps=1)
    adamw, sgd = pair.optimizer
    parameter = adamw.param_groups[0]["params"][0]
    assert parameter in adamw.state and parameter not in sgd.state and not sgd.state[parameter]
    with pytest.raises(swapper.StateError, match=r"the state of optimizers\[1\] \(SGD\) was given a parameter"):
        sgd.state[parameter] = {"momentum_buffer": torch.zeros(parameter.shape)}

    def edit(_: Any, optimizers: Any) -> None:
        for parameter in optimizers[1].param_groups[0]["params"]:
            optimizers[1].state[parameter]["momentum_buffer"].mul_(2)
        optimizers[0].state.clear()

    pair.both(edit)
    pair.train(train_step, steps=2)
    pair.finish()


def test_state_dicts_of_each_are_taken_over_and_given(several: MakeTwins) -> None:
    pair = several(Net(), by_turns(adamw_and_sgd))
    pair.train(train_step, steps=2)
    for ours, theirs in zip(pair.optimizer, pair.plain_optimizer, strict=True):
        ours.load_state_dict(theirs.state_dict())
    for ours, theirs in zip(by_turns(adamw_and_sgd)(pair.plain.parameters()), pair.optimizer, strict=True):
        ours.load_state_dict(theirs.state_dict())
    pair.train(train_step, steps=1)
    pair.finish()


def test_clipping_and_plans_see_all(several: MakeTwins) -> None:
    pair = several(Net(), by_turns(adamw_and_sgd), gradients="nvme")

    def run(model: Any, optimizers: Any) -> torch.Tensor:
        loss = model(TOKENS).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizers.step()
        optimizers.zero_grad()
        return norm

    pair.train(run, steps=3)
    assert pair.manager is not None
    read = pair.manager.current.run.plan.traffic.total_read_bytes
    assert pair.manager.stats().read_bytes == pytest.approx(read, rel=0.1)
    pair.finish()


@pytest.mark.parametrize("update", ["step", "deferred"])
def test_a_gradscaler_steps_each(several: MakeTwins, update: str, gradients_that_stay: dict[str, str]) -> None:
    """In one iteration one of the optimizers has infinite gradients, in another both: plain torch skips those steps."""
    pair = several(Net(), by_turns(adamw_and_sgd), update=update, **gradients_that_stay)
    scalers = {id(model): torch.amp.GradScaler("cpu", init_scale=64.0) for model in (pair.plain, pair.swapped)}
    iteration = iter([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])

    def run(model: Any, optimizers: Any) -> Any:
        scaler, number = scalers[id(model)], next(iteration)
        scaler.scale(model(TOKENS).square().mean()).backward()
        for index, optimizer in enumerate(optimizers):
            if (number, index) in ((1, 0), (3, 0), (3, 1)):
                optimizer.param_groups[0]["params"][0].grad.fill_(torch.inf)
            if number == 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
        optimizers.zero_grad()
        return scaler.get_scale()

    pair.train(run, steps=5)
    assert pair.manager is not None and pair.manager.step == 4  # both were skipped in one
    pair.finish()


# --- updates in backward ----------------------------------------------------------------------------------------------


def test_after_a_backward_each_steps_and_may_change_its_settings_and_gradients(several: MakeTwins) -> None:
    pair = several(Net(), by_turns(adamw_and_sgd), update="backward")
    schedulers = {
        id(model): [StepLR(optimizer, 1 + number, 0.5) for number, optimizer in enumerate(optimizers)]
        for model, optimizers in ((pair.plain, pair.plain_optimizer), (pair.swapped, pair.optimizer))
    }

    def run(model: Any, optimizers: Any) -> torch.Tensor:
        loss = model(TOKENS).square().mean()
        loss.backward()
        for optimizer, scheduler in zip(optimizers, schedulers[id(model)], strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=bool(devices.NAME))  # zeros would change what has left a device
        return loss.detach()

    pair.train(run, steps=4)
    pair.finish()


def test_after_a_backward_nothing_can_be_used_until_all_have_stepped(several: MakeTwins, tmp_path: Path) -> None:
    pair = several(Net(), by_turns(adamw_and_sgd), update="backward")
    pair.train(train_step, steps=2)
    assert pair.manager is not None
    manager = pair.manager
    pair.both(lambda model, optimizers: model(TOKENS).square().mean().backward())
    pair.both(lambda model, optimizers: optimizers[0].step())
    for use in (
        lambda: pair.swapped(TOKENS),
        lambda: pair.swapped.state_dict()["head.weight"].clone(),
        lambda: pair.optimizer[0].state_dict(),
        lambda: manager.snapshot(tmp_path / "middle.pt"),
        lambda: pair.optimizer[0].step(),
    ):
        with pytest.raises(swapper.StateError, match=r"step\(\) of each optimizer has not been called|has stepped"):
            use()
    pair.both(lambda model, optimizers: optimizers[1].step())
    pair.both(lambda model, optimizers: optimizers.zero_grad())
    pair.train(train_step, steps=1)
    pair.finish()


@pytest.mark.parametrize("place", devices.PLACES)
@pytest.mark.parametrize("what", ["a setting", "a gradient", "a scaler"])
@pytest.mark.parametrize("number", [0, 1])
def test_what_a_backward_has_used_cannot_be_changed(several: MakeTwins, number: int, what: str, place: str) -> None:
    pair = several(Net(), by_turns(adamw_and_sgd), update="backward", **devices.PLACES[place]())
    pair.train(train_step, steps=2)
    pair.both(lambda model, optimizers: model(TOKENS).square().mean().backward())
    changed = pair.optimizer[number].param_groups[0]
    gradients = [parameter.grad for parameter in changed["params"]]
    before = changed["lr"]
    with pytest.raises(swapper.StateError, match="update='backward'"):
        if what == "a setting":
            changed["lr"] = 1.0
            pair.optimizer[0].step()
        elif what == "a gradient":
            changed["params"][-1].grad = torch.zeros(gradients[-1].shape)
            pair.optimizer[0].step()
        else:
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            scaler.scale(torch.ones(()))
            scaler.step(pair.optimizer[number])
    changed["lr"] = before
    for parameter, gradient in zip(changed["params"], gradients, strict=True):
        parameter.grad = gradient
    pair.both(lambda model, optimizers: optimizers.step())  # undone, if it was begun, and taken again
    pair.both(lambda model, optimizers: optimizers.zero_grad())
    pair.train(train_step, steps=1)
    pair.finish(paged=place == "in host memory")


def test_a_backward_whose_updates_fail_is_undone_for_all(several: MakeTwins) -> None:
    pair = several(Net(), by_turns(lambda parameters, number: Failing(parameters, lr=1e-3)), update="backward")
    pair.train(train_step, steps=2)
    Failing.calls_left = 3
    with pytest.raises(ZeroDivisionError):
        pair.swapped(TOKENS).square().mean().backward()
    Failing.calls_left = None
    pair.optimizer.zero_grad()
    pair.train(train_step, steps=2)
    pair.finish()


@pytest.mark.parametrize(("update", "is_changed"), [("backward", False), ("step", False), ("step", True)])
def test_a_manager_closed_before_all_have_stepped_keeps_the_step_before(
    tmp_path: Path, update: str, is_changed: bool
) -> None:
    """`is_changed`: by hand, too late for that step's commit; there is none of a mix of two steps that has it."""

    def offloaded(manager: swapper.SwapManager) -> tuple[nn.Module, Several]:
        torch.manual_seed(0)
        model = Net()
        optimizers = list(by_turns(adamw_and_sgd)(model.parameters()))
        _, paged = manager.offload(model, optimizers, params="nvme", optimizer_state="nvme", update=update)
        return model, Several(paged)

    with swapper.SwapManager(tmp_path, host_memory="16MiB") as manager:
        model, optimizers = offloaded(manager)
        fixed_step(model, optimizers)
        with manager.gather(model):
            before = {name: value.clone() for name, value in model.state_dict().items()}
        if is_changed:
            model(TOKENS)
            with torch.no_grad():
                model.norm.bias.add_(1)
        model(TOKENS).square().mean().backward()
        optimizers[0].step()
    with swapper.SwapManager(tmp_path, host_memory="16MiB", resume="auto") as manager:
        model, _ = offloaded(manager)
        assert manager.step == 1
        with manager.gather(model):
            assert_same(dict(model.state_dict()), before)


def test_a_gan_does_not_go_with_updates_in_backward(tmp_path: Path) -> None:
    with swapped(tmp_path, "gan", "backward") as (training, manager):
        with pytest.raises(swapper.UnsupportedError, match=r"one_step does not go with update='backward'"):
            training.iteration(0)
        training.context = nullcontext
        with pytest.raises(swapper.StateError, match=r"step\(\) of each optimizer has not been called.*update='step'"):
            training.iteration(0)
        assert manager.step == 0


# --- a training step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "update", "first"), [("gan", "step", 2), ("pair", "deferred", 3), ("pair", "backward", 1)]
)
def test_a_run_killed_within_training_steps_resumes_from_a_whole_one(
    tmp_path: Path, kind: str, update: str, first: int
) -> None:
    command = [sys.executable, "-m", "e2e.several_run", str(tmp_path), kind, update, str(first)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= 2


def test_a_gan_says_where_its_training_step_ends(tmp_path: Path) -> None:
    with swapped(tmp_path, "gan", "step") as (training, manager):
        training.context = nullcontext
        with pytest.raises(
            swapper.StateError,
            match=r"optimizers\[1\] \(SGD\) is about to step again before optimizers\[0\] "
            r"\(AdamW\) has stepped.*with manager.one_step\(\)",
        ):
            training.iteration(0)
        with pytest.raises(
            swapper.StateError, match=r"snapshot in the middle of a training step.*until optimizers\[0\]"
        ):
            manager.snapshot(tmp_path / "middle.pt")
        with pytest.raises(swapper.StateError, match="training more parameters in the middle of a training step"):
            training.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        assert manager.step == 0
        training.optimizers[0].step()
        assert manager.step == 1
        with manager.one_step():
            with pytest.raises(swapper.StateError, match=r"one_step inside manager.one_step"), manager.one_step():
                pass
            for optimizer in (*training.optimizers, *training.optimizers):
                optimizer.step()
            with pytest.raises(swapper.StateError, match=r"snapshot in the middle of .* until manager.one_step ends"):
                manager.snapshot(tmp_path / "middle.pt")
        assert manager.step == 2
        manager.snapshot(tmp_path / "whole.pt").wait()


def test_one_optimizer_may_take_several_steps_as_one(tmp_path: Path) -> None:
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    expected = AdamW(plain.parameters(), lr=1e-3)
    with swapper.SwapManager(tmp_path, host_memory="16MiB") as manager:
        model, optimizer = manager.offload(model, AdamW(model.parameters(), lr=1e-3), params="nvme")
        for _ in range(2):
            with manager.one_step():
                for _ in range(2):
                    assert torch.equal(fixed_step(model, optimizer), fixed_step(plain, expected))
        assert manager.step == 2


def test_a_failed_one_step_is_continued(tmp_path: Path) -> None:
    with swapped(tmp_path, "gan", "step") as (training, manager):
        generator, discriminator = training.optimizers
        with pytest.raises(ZeroDivisionError), manager.one_step():
            discriminator.step()
            raise ZeroDivisionError
        assert manager.step == 0
        with manager.one_step():
            generator.step()
        assert manager.step == 1
        with manager.one_step():
            pass
        assert manager.step == 1


@pytest.mark.parametrize("update", ["step", "deferred"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_step_that_fails_is_undone_and_taken_again(several: MakeTwins, failing: int, update: str) -> None:
    """Its own part only: what the other optimizer has done in the training step stays."""
    pair = several(Net(), by_turns(lambda parameters, number: Failing(parameters, lr=1e-3)), update=update)
    pair.train(train_step, steps=2)
    pair.both(lambda model, optimizers: model(TOKENS).square().mean().backward())
    for number, (ours, theirs) in enumerate(zip(pair.optimizer, pair.plain_optimizer, strict=True)):
        theirs.step()
        if number == failing:
            Failing.calls_left = 2
            with pytest.raises(ZeroDivisionError):
                ours.step()
                pair.swapped(TOKENS)  # updates that are deferred
            Failing.calls_left = None
            if update == "deferred":
                continue  # the next forward repeats what is left
        ours.step()
    pair.both(lambda model, optimizers: optimizers.zero_grad())
    pair.train(train_step, steps=1)
    pair.finish()


class Failing(AdamW):
    """Fails in a later call of a step, if told to."""

    calls_left: int | None = None

    def step(self, closure: Any = None) -> Any:
        if Failing.calls_left is not None:
            Failing.calls_left -= 1
            if Failing.calls_left < 0:
                raise ZeroDivisionError
        return super().step(closure)


def test_the_second_step_of_an_optimizer_in_a_training_step_cannot_be_undone(tmp_path: Path) -> None:
    model = Net()
    with swapper.SwapManager(tmp_path, host_memory="16MiB") as manager:
        optimizers = by_turns(lambda parameters, number: Failing(parameters, lr=1e-3))(model.parameters())
        _, (one, other) = manager.offload(model, list(optimizers), params="nvme", optimizer_state="nvme")
        model(TOKENS).square().mean().backward()
        with pytest.raises(ZeroDivisionError), manager.one_step():
            one.step()
            other.step()
            Failing.calls_left = 2
            try:
                one.step()
            finally:
                Failing.calls_left = None
        with pytest.raises(swapper.StateError, match="failed half-way"):
            other.step()


# --- what is given ----------------------------------------------------------------------------------------------------


class Container:
    """Holds optimizers, as torchtitan's OptimizersContainer."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def test_a_container_is_given_back_with_its_members_replaced(tmp_path: Path) -> None:
    model = Net()
    container = Container(list(by_turns(adamw_and_sgd)(model.parameters())))
    originals = list(container.optimizers)
    with swapper.SwapManager(tmp_path, host_memory="16MiB") as manager:
        with pytest.raises(swapper.ConfigError):
            manager.offload(model, container, update="never")
        assert container.optimizers == originals
        _, given_back = manager.offload(model, container)
        assert given_back is container
        assert all(isinstance(member, swapper.PagedOptimizer) for member in container.optimizers)
        model(TOKENS).square().mean().backward()
        container.step()
        assert manager.step == 1
        with pytest.raises(swapper.StateError, match="was taken over by"):
            originals[1].step()


def test_a_plan_is_carried_out_and_names_the_optimizers_that_it_is_for(tmp_path: Path) -> None:
    model = Net()
    optimizers = list(by_turns(adamw_and_sgd)(model.parameters()))
    with swapper.SwapManager(tmp_path, host_memory="16MiB") as manager:
        plan = manager.plan(model, optimizers, params="nvme", optimizer_state="nvme")
        with pytest.raises(swapper.StateError, match="the plan is for another optimizer"):
            manager.offload(model, optimizers[:1], plan)
        _, paged = manager.offload(model, optimizers, plan)
        assert [type(one) for one in paged] == [swapper.PagedOptimizer] * 2


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    model = Net()
    adamw, sgd = by_turns(adamw_and_sgd)(model.parameters())
    shared = SGD([model.head.weight], lr=1e-2)
    stranger = SGD([nn.Parameter(torch.zeros(3))], lr=1e-2)
    with swapper.SwapManager(tmp_path, host_memory="16MiB") as manager:
        for error, given, options, says in (
            (swapper.ConfigError, [], {}, "no optimizer in its list"),
            (swapper.ConfigError, [adamw, adamw], {}, "the same optimizer twice"),
            (swapper.UnsupportedError, [adamw, 3], {}, "takes a torch.optim.Optimizer; int"),
            (
                swapper.UnsupportedError,
                [adamw, sgd, shared],
                {},
                r"parameter head.weight is in .* and in group 0 of optimizers\[2\]",
            ),
            (
                swapper.UnsupportedError,
                [adamw, stranger],
                {},
                r"parameter 0 of group 0 of optimizers\[1\] \(SGD\) .* is not one of",
            ),
            (
                swapper.UnsupportedError,
                [adamw, sgd],
                {"device": "cpu", "accelerator": swapper.Accelerator(update_on="device", update_with="kernel")},
                "update_with='kernel' does not go with several",
            ),
        ):
            with pytest.raises(error, match=says):
                manager.offload(model, given, **options)
        manager.offload(model, [adamw, sgd])


def test_parameters_stay_with_their_optimizer(several: MakeTwins) -> None:
    pair = several(Net(), by_turns(lambda parameters, number: AdamW(parameters, lr=1e-3)))
    pair.train(train_step, steps=1)
    one, other = (optimizer.param_groups[0]["params"] for optimizer in pair.optimizer)
    moved = one.pop()
    other.append(moved)
    with pytest.raises(
        swapper.StateError, match=r"is in group 0 of optimizers\[1\] \(AdamW\), and was in optimizers\[0\]"
    ):
        pair.optimizer[1].step()
    one.append(other.pop())
    pair.train(train_step, steps=1)
    pair.finish()


def test_parameters_are_trained_later_by_one_of_several(several: MakeTwins) -> None:
    def freeze_and_split(parameters: Any) -> Any:
        *given, _head = parameters
        return by_turns(adamw_and_sgd)(given)

    pair = several(Net(), freeze_and_split, budget=16 << 20)
    pair.train(train_step, steps=2)
    for model, optimizers in ((pair.plain, pair.plain_optimizer), (pair.swapped, pair.optimizer)):
        optimizers[1].add_param_group({"params": [model.head.weight], "lr": 1e-3})
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


# --- snapshots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_a_snapshot_has_a_state_dict_for_each(several: MakeTwins, tmp_path: Path, update: str) -> None:
    pair = several(Net(), by_turns(adamw_and_sgd), update=update)
    pair.train(train_step, steps=2)
    assert pair.manager is not None
    pair.manager.snapshot(tmp_path / "two.pt").wait()
    found = torch.load(tmp_path / "two.pt", weights_only=True)
    model = Net()
    model.load_state_dict(found["model"])
    optimizers = by_turns(adamw_and_sgd)(model.parameters())
    for optimizer, state in zip(optimizers, found["optimizer"], strict=True):
        optimizer.load_state_dict(state)
    for _ in range(2):
        assert torch.equal(fixed_step(model, optimizers), fixed_step(pair.plain, pair.plain_optimizer))
    if update == "step":
        exported = tmp_path / "all.pt"
        for arguments in (
            ["export", tmp_path / "two.pt", exported, "--to", "torch", "--what", "all"],
            ["verify", exported],
        ):
            subprocess.run([Path(sys.executable).with_name("swapper"), *arguments], check=True, timeout=300)
        assert_same(torch.load(exported)["optimizer"], torch.load(tmp_path / "two.pt")["optimizer"])


def test_a_run_resumes_with_the_same_optimizers_only(tmp_path: Path) -> None:
    def offload(*kinds: Any) -> None:
        model = Net()
        with swapper.SwapManager(tmp_path, host_memory="16MiB", resume="auto") as manager:
            parameters = list(model.parameters())
            optimizers = [kind(parameters[number :: len(kinds)], lr=1e-3) for number, kind in enumerate(kinds)]
            _, paged = manager.offload(model, optimizers, params="nvme", optimizer_state="nvme")
            train_step(model, Several(paged))

    offload(AdamW, AdamW)
    for kinds in ((AdamW,), (AdamW, torch.optim.Adam), (AdamW, AdamW, AdamW)):
        with pytest.raises(swapper.CheckpointError, match=r"of another model or optimizer|param_groups"):
            offload(*kinds)
    offload(AdamW, AdamW)

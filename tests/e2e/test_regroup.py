"""More to train than at offload: groups are added, frozen parameters are trained, exactly as in plain torch."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e import killed_run, regrouped_run
from e2e.leaks import held_by_swapper
from e2e.models import Net, loss_of, tokens, train_step
from e2e.processes import run_python
from e2e.several import by_turns
from e2e.several import several as several
from e2e.stopped_calls import why_not
from e2e.twins import Twins, adamw, assert_same, fail_in_the_middle, named_budget
from swapper.durability.committer import Committer
from swapper.paging.host_memory import HostMemory
from swapper.paging.layout import Slot, TensorSpec
from swapper.paging.store.swap_files import Store
from swapper.train.gradients.grads import GradientStash
from swapper.train.layout.content import CommittedFiles
from swapper.train.layout.slices import TensorLocation

MakeTwins = Callable[..., Twins]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def freeze_body(model: nn.Module) -> nn.Module:
    """Only the head and the last norm are trained at first."""
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    model.norm.requires_grad_(True)
    return model


def backward(model: Any, _: Any = None) -> torch.Tensor:
    loss = loss_of(model, tokens())
    loss.backward()
    return loss.detach()


def clip(pair: Twins, model: Any, max_norm: float) -> torch.Tensor:
    if model is pair.swapped:
        return pair.manager.clip_grad_norm_(max_norm)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def unfreeze(block: int, **settings: Any) -> Callable[[Any, Any], None]:
    def run(model: Any, optimizer: Any) -> None:
        model.blocks[block].requires_grad_(True)
        optimizer.add_param_group({"params": model.blocks[block].parameters(), **settings})

    return run


@pytest.mark.parametrize("gradients", ["host", "nvme"])
@pytest.mark.parametrize("state", ["host", "nvme"])
@pytest.mark.parametrize("params", ["host", "nvme"])
@pytest.mark.parametrize("make", [adamw, sgd])
def test_progressive_unfreezing_is_bit_equal(
    twins: MakeTwins, make: Any, params: str, state: str, gradients: str
) -> None:
    pair = twins(
        freeze_body(Net()), make, room_bytes=16 << 20, params=params, optimizer_state=state, gradients=gradients
    )
    groups = pair.optimizer.param_groups
    pair.train(train_step, steps=2)
    for block, settings in ((3, {}), (2, {"lr": 1e-4}), (0, {"weight_decay": 0.1})):
        pair.both(unfreeze(block, **settings))
        assert pair.optimizer.param_groups is groups is pair.original.param_groups
        pair.train(train_step, steps=2)
    assert len(groups) == 4
    pair.finish(paged=False)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "not cut": lambda parameters: torch.optim.Adafactor(parameters),
    "state from the start": lambda parameters: torch.optim.Adagrad(parameters),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_other_optimizers_and_a_scheduler_it_is_bit_equal(twins: MakeTwins, name: str) -> None:
    pair = twins(freeze_body(Net()), OPTIMIZERS[name], room_bytes=8 << 20)
    schedulers = {
        id(model): torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for model, optimizer in ((pair.plain, pair.plain_optimizer), (pair.swapped, pair.optimizer))
    }
    pair.manager.register(scheduler=schedulers[id(pair.swapped)])

    def step(model: Any, optimizer: Any) -> tuple[torch.Tensor, list[float]]:
        loss = train_step(model, optimizer)
        schedulers[id(model)].step()
        return loss, [group["lr"] for group in optimizer.param_groups]

    pair.train(step, steps=2)
    pair.both(unfreeze(1, lr=1e-2))
    pair.train(step, steps=2)
    pair.finish(paged=False)


@pytest.mark.parametrize("gradients", ["host", "nvme"])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_with_masters_it_is_bit_equal(twins: MakeTwins, update: str, gradients: str) -> None:
    model = freeze_body(Net()).to(torch.bfloat16)
    pair = twins(model, master=True, room_bytes=8 << 20, gradients=gradients, update=update)
    pair.train(train_step, steps=2)
    pair.both(unfreeze(1))
    pair.train(train_step, steps=2)
    pair.both(unfreeze(2, lr=1e-2))
    pair.train(train_step, steps=3)
    pair.finish(paged=False)


@pytest.mark.parametrize("gradients", ["host", "nvme"])
def test_gradients_of_before_are_there_still(twins: MakeTwins, gradients: str) -> None:
    """A backward, a group, another backward that adds to it, clipping, the step; and gradients that a step has left."""
    pair = twins(freeze_body(Net()), room_bytes=8 << 20, gradients=gradients)

    def step(model: Any, optimizer: Any) -> torch.Tensor:
        backward(model)
        unfreeze(0 if len(optimizer.param_groups) > 1 else 1)(model, optimizer)
        backward(model)
        norm = clip(pair, model, 0.1)
        optimizer.step()
        return norm

    pair.train(step, steps=2)
    pair.both(unfreeze(2))
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@pytest.mark.parametrize("gradients", ["host", "nvme"])
def test_a_frozen_parameter_of_a_group_is_trained_from_when_it_requires_gradients(
    twins: MakeTwins, gradients: str
) -> None:
    model = freeze_body(Net())
    pair = twins(model, room_bytes=8 << 20, gradients=gradients, select=lambda model: list(model.parameters()))
    pair.train(train_step, steps=2)
    for block in (3, 1):
        for each in (pair.plain, pair.swapped):
            each.blocks[block].requires_grad_(True)
        pair.train(train_step, steps=2)
    assert "blocks.3.up.weight" in pair.manager.trained and "blocks.2.up.weight" not in pair.manager.trained
    pair.finish(paged=False)


def test_what_is_frozen_again_keeps_its_state(twins: MakeTwins) -> None:
    pair = twins(freeze_body(Net()), room_bytes=8 << 20)
    pair.train(train_step, steps=2)
    for each in (pair.plain, pair.swapped):
        each.head.requires_grad_(False)
    pair.both(unfreeze(1))
    pair.train(train_step, steps=2)
    for each in (pair.plain, pair.swapped):
        each.head.requires_grad_(True)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@pytest.mark.parametrize(
    ("update", "gradients"), [("step", "host"), ("step", "nvme"), ("deferred", "host"), ("backward", "nvme")]
)
@pytest.mark.parametrize("name", ["AdamW", *OPTIMIZERS])
def test_what_is_frozen_at_offload_keeps_the_state_that_it_has(
    twins: MakeTwins, name: str, update: str, gradients: str
) -> None:
    make = {"AdamW": adamw, **OPTIMIZERS}[name]
    options = {"update": update, "gradients": gradients, "room_bytes": 8 << 20}
    pair = twins(Net(), make, select=lambda model: list(model.parameters()), wait=True, **options)
    for _ in range(2):
        pair.both(train_step)
    freeze(pair, True)
    pair.offload()
    pair.assert_same_state()
    pair.train(train_step, steps=2)
    pair.assert_same_state()
    freeze(pair, False)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


FROZEN_LOADS: dict[str, dict[str, Any]] = {
    **{update: {"update": update} for update in ("step", "deferred", "backward")},
    "gradients on NVMe": {"gradients": "nvme"},
    "masters": {"master": True},
    "a device": {"device": "late", "device_memory": "8MiB"},
}


def trained_before(make: Callable[[Iterable[nn.Parameter]], Any] = adamw) -> dict[str, Any]:
    """Return the state of an optimizer that has trained all of a Net."""
    model = Net()
    optimizer = make(model.parameters())
    for _ in range(2):
        train_step(model, optimizer)
    return optimizer.state_dict()


@pytest.mark.parametrize("name", ["AdamW", *OPTIMIZERS])
@pytest.mark.parametrize("options", FROZEN_LOADS)
def test_state_that_is_loaded_for_frozen_parameters_is_there_when_they_are_trained(
    twins: MakeTwins, options: str, name: str
) -> None:
    make, given = {"AdamW": adamw, **OPTIMIZERS}[name], dict(FROZEN_LOADS[options])
    if "device" in given:
        given["device"] = HostDevice(given["device"])
    if "master" in given and name not in ("AdamW", "sgd"):
        pytest.skip("PlainMasters has no equal of it")
    model = Net().bfloat16() if "master" in given else Net()
    pair = twins(model, make, select=lambda model: list(model.parameters()), room_bytes=8 << 20, wait=True, **given)
    freeze(pair, True)
    pair.offload()
    pair.train(train_step, steps=1)
    state = trained_before(make)

    def load(_: Any, optimizer: Any) -> None:
        getattr(optimizer, "inner", optimizer).load_state_dict(copy.deepcopy(state))

    pair.both(load)
    pair.assert_same_state()
    pair.train(train_step, steps=2)
    freeze(pair, False)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_state_of_frozen_parameters_is_loaded_to_each_of_several_optimizers(several: Callable[..., Twins]) -> None:
    make = by_turns(lambda parameters, number: (adamw, sgd)[number](parameters))
    model = freeze_blocks(Net(), True)
    pair = several(model, make, select=lambda model: list(model.parameters()), room_bytes=8 << 20)
    pair.train(train_step, steps=1)
    state = trained_before(make)
    pair.both(lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(state)))
    pair.assert_same_state()
    freeze(pair, False)
    pair.train(train_step, steps=2)


def test_state_of_frozen_parameters_that_does_not_fit_changes_nothing(twins: MakeTwins) -> None:
    pair = twins(freeze_blocks(Net(), True), select=lambda model: list(model.parameters()), optimizer_state="host")
    pair.train(train_step, steps=1)
    trained, state = pair.manager.trained, trained_before()
    with pytest.raises(swapper.BudgetError):
        pair.optimizer.load_state_dict(state)
    assert pair.manager.trained == trained and not any(pair.original.state.values())
    pair.assert_same_state()
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


def test_what_never_had_state_and_is_frozen_gets_no_space(twins: MakeTwins) -> None:
    pair = twins(freeze_body(Net()), select=lambda model: list(model.parameters()))
    assert {name.split(".")[0] for name in pair.manager.trained} == {"head", "norm"}
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_a_resumed_run_keeps_the_state_of_what_is_frozen_since(twins: MakeTwins) -> None:
    pair = twins(Net(), commit_every=1, room_bytes=8 << 20)
    pair.train(train_step, steps=2)
    for is_frozen in (True, False):
        freeze(pair, is_frozen)
        pair.resume(freeze_blocks(Net(), is_frozen))
        pair.assert_same_state()
        pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_what_a_resumed_run_does_not_train_gets_no_space_by_the_state_of_the_script(twins: MakeTwins) -> None:
    """A script that trains before it offloads has state when it resumes too: the run's counts."""
    pair = twins(freeze_blocks(Net(), True), commit_every=1, select=lambda model: list(model.parameters()))
    pair.train(train_step, steps=2)
    before, trained = freeze_blocks(Net(), True), pair.manager.trained

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given = list(parameters)
        optimizer = adamw(given)
        for parameter in given:
            optimizer.state[parameter] = {"step": torch.tensor(1.0)} | {
                key: torch.ones_like(parameter) for key in ("exp_avg", "exp_avg_sq")
            }
        return optimizer

    pair.resume(before, make)
    assert pair.manager.trained == trained
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def freeze_blocks(model: Net, is_frozen: bool) -> Net:
    for part in (model.blocks[1], model.blocks[3].down, model.norm):
        part.requires_grad_(not is_frozen)
    return model


def freeze(pair: Twins, is_frozen: bool) -> None:
    for model in (pair.plain, pair.swapped):
        freeze_blocks(model, is_frozen)


def test_a_group_may_be_added_before_it_requires_gradients(twins: MakeTwins) -> None:
    pair = twins(freeze_body(Net()), room_bytes=8 << 20)
    pair.both(lambda model, optimizer: optimizer.add_param_group({"params": list(model.blocks[1].parameters())}))
    pair.train(train_step, steps=2)
    for each in (pair.plain, pair.swapped):
        each.blocks[1].requires_grad_(True)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@pytest.mark.parametrize("commit_every", [None, 1, 3])
def test_however_the_run_commits_its_old_files_go(twins: MakeTwins, commit_every: int | None) -> None:
    pair = twins(freeze_body(Net()), room_bytes=8 << 20, commit_every=commit_every)
    pair.train(train_step, steps=2)
    count = len(pair.run_files())
    pair.both(unfreeze(1))
    assert len(pair.run_files()) == count
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_snapshots_of_before_and_after_are_whole(twins: MakeTwins, tmp_path: Path) -> None:
    pair = twins(freeze_body(Net()), room_bytes=8 << 20)
    pair.train(train_step, steps=1)
    pair.manager.snapshot(tmp_path / "before.pt")
    before = {name: value.clone() for name, value in pair.plain.state_dict().items()}
    pair.both(unfreeze(1))
    pair.train(train_step, steps=1)
    pair.manager.snapshot(tmp_path / "after.pt").wait()
    for path, model in (("before.pt", before), ("after.pt", pair.plain.state_dict())):
        assert_same(dict(torch.load(tmp_path / path)["model"]), dict(model))
    after = torch.load(tmp_path / "after.pt")["optimizer"]
    assert_same(after["state"], pair.plain_optimizer.state_dict()["state"])
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


def test_the_memory_of_two_runs_is_never_there_at_one_time(twins: MakeTwins, monkeypatch: pytest.MonkeyPatch) -> None:
    others = held_by_swapper()
    pair = twins(freeze_body(Net()), room_bytes=8 << 20, gradients="nvme")
    pair.train(train_step, steps=1)
    before: list[list[str]] = []
    attach = HostMemory.attach

    def watched(*arguments: Any, **options: Any) -> Any:
        before.append([thing for thing in held_by_swapper() if thing.startswith("mapping") and thing not in others])
        return attach(*arguments, **options)

    monkeypatch.setattr(HostMemory, "attach", watched)
    unfreeze(1)(pair.swapped, pair.optimizer)
    assert before[0] == []


# --- refused ------------------------------------------------------------------------------------------------------------


def test_a_parameter_of_another_model_is_refused_and_nothing_changes(twins: MakeTwins) -> None:
    pair = twins(freeze_body(Net()))
    pair.train(train_step, steps=1)
    with pytest.raises(swapper.UnsupportedError, match="not one of the model's"):
        pair.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="more than one"):
        pair.optimizer.add_param_group({"params": [pair.swapped.head.weight]})
    assert len(pair.optimizer.param_groups) == 1
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


def test_a_budget_that_is_too_small_is_refused_and_the_named_one_works(twins: MakeTwins) -> None:
    pair = twins(freeze_body(Net()))
    pair.train(train_step, steps=1)
    blocks = pair.swapped.blocks.requires_grad_(True)
    with pytest.raises(swapper.BudgetError) as caught:
        pair.optimizer.add_param_group({"params": blocks.parameters()})
    blocks.requires_grad_(False)
    assert len(pair.optimizer.param_groups) == 1
    pair.train(train_step, steps=1)
    pair.finish(paged=False)
    again = twins(freeze_body(Net()), budget=named_budget(caught.value))
    again.train(train_step, steps=1)
    again.both(lambda model, _: model.blocks.requires_grad_(True) and None)
    again.both(lambda model, optimizer: optimizer.add_param_group({"params": model.blocks.parameters()}))
    again.train(train_step, steps=3)
    again.finish(paged=False)


def test_in_the_middle_of_a_step_it_is_refused(twins: MakeTwins) -> None:
    pair = twins(freeze_body(Net()), room_bytes=8 << 20)
    seen = []

    def add(*_: Any) -> None:
        try:
            unfreeze(1)(pair.swapped, pair.optimizer)
        except swapper.StateError as error:
            seen.append(str(error))

    handles = [pair.swapped.blocks[3].register_forward_hook(add), pair.swapped.head.weight.register_hook(add)]
    backward(pair.swapped)
    assert len(seen) == 2 and all("in the middle of a forward or backward" in message for message in seen)
    for handle in handles:
        handle.remove()
    with pair.manager.gather(pair.swapped.head), pytest.raises(swapper.StateError, match="gather"):
        unfreeze(1)(pair.swapped, pair.optimizer)


def test_a_graph_of_before_is_refused(twins: MakeTwins) -> None:
    pair = twins(freeze_body(Net()), room_bytes=8 << 20)
    loss = loss_of(pair.swapped, tokens())
    unfreeze(1)(pair.swapped, pair.optimizer)
    with pytest.raises(swapper.StateError, match="before the optimizer got more to train"):
        loss.backward()
    unfreeze(1)(pair.plain, pair.plain_optimizer)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


# --- when something goes wrong ------------------------------------------------------------------------------------------


def test_a_deferred_update_that_fails_as_a_group_is_added_can_be_done_again(twins: MakeTwins) -> None:
    model = Net()
    model.blocks[1].requires_grad_(False)
    pair = twins(model, room_bytes=12 << 20, update="deferred", commit_every=1)
    pair.train(train_step, steps=2)
    fail_in_the_middle(pair)
    with pytest.raises(RuntimeError, match="in the middle"):
        unfreeze(1)(pair.swapped, pair.optimizer)
    pair.swapped.blocks[1].requires_grad_(False)
    pair.train(train_step, steps=1)
    pair.both(unfreeze(1))
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


@pytest.mark.parametrize("gradients", ["host", "nvme"])
@pytest.mark.parametrize("state", ["host", "nvme"])
@pytest.mark.parametrize("failing", ["open", "fill", "gradients", "commit"])
def test_what_fails_half_way_leaves_the_run_as_it_was(
    twins: MakeTwins, monkeypatch: pytest.MonkeyPatch, failing: str, state: str, gradients: str
) -> None:
    pair = twins(freeze_body(Net()), room_bytes=12 << 20, optimizer_state=state, gradients=gradients, commit_every=1)
    pair.train(train_step, steps=2)
    pair.both(backward)
    files = pair.run_files()

    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise swapper.IoError("write", "the drive", 0, 4096, 28)

    target = {
        "open": (Committer, "__init__"),
        "fill": (CommittedFiles, "_file"),
        "gradients": (GradientStash, "empty_into"),
        "commit": (Store, "commit"),
    }[failing]
    count = 0

    def later(*_: Any, **__: Any) -> None:
        nonlocal count
        count += 1
        if failing != "commit" or count == 2:
            fail()

    original = getattr(*target)
    monkeypatch.setattr(*target, lambda *a, **k: (later(), original(*a, **k))[1])
    with pytest.raises(swapper.IoError):
        unfreeze(1)(pair.swapped, pair.optimizer)
    assert len(pair.optimizer.param_groups) == 1
    assert pair.run_files() == files
    pair.swapped.blocks[1].requires_grad_(False)
    pair.train(train_step, steps=2)
    pair.both(unfreeze(1))
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_reads_under_way_are_waited_for_where_the_next_one_cannot_be_asked_for(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=1)
    run = pair.manager.current.run
    run.pager.flush()
    section = next(section for section in run.sections if len(section.pages) > 1)
    content = run.carried(pair.original)._files
    asked: list[Any] = []

    class Noting:
        """Notes the reads, of which the first takes as long as the second file is looked for in vain."""

        def read(self, *arguments: Any, **options: Any) -> Any:
            asked.append(run.engine.read(*arguments, **options))
            content._paths = {}
            return asked[-1]

        def close(self) -> None:
            pass

    content._engine = Noting()
    target = torch.empty(section.plan.nbytes, dtype=torch.uint8)
    whole = TensorLocation(section, Slot(TensorSpec("all", "param", torch.uint8, (section.plan.nbytes,)), 0))
    with pytest.raises(KeyError):
        content.read(whole, 0, section.plan.nbytes, target)
    assert asked and all(ticket.done for ticket in asked)
    content.close()


# --- after a crash ------------------------------------------------------------------------------------------------------


def test_a_run_with_more_groups_is_gone_on_from_by_a_script_that_adds_them_before(tmp_path: Path) -> None:
    losses = regrouped_run.Expected().losses
    parts = [regrouped_run.run(tmp_path / "parts", tmp_path / "log", until=until) for until in (2, 3, 4, 99)]
    assert [loss for part in parts for loss in part] == losses


def test_a_script_that_does_not_add_the_run_s_groups_is_told_which(tmp_path: Path) -> None:
    regrouped_run.run(tmp_path, tmp_path / "log", until=3)
    model, optimizer = regrouped_run.make()
    with swapper.SwapManager(tmp_path, host_memory=regrouped_run.BUDGET, resume="auto") as manager:
        assert "5.weight" in manager.trained
        with pytest.raises(swapper.CheckpointError, match=r"at step 3 .* 5\.weight, 5\.bias.*manager\.trained"):
            manager.offload(model, optimizer)


def with_two_optimizers(directory: Path | None, die_after: int = 99) -> list[float]:
    """Train the biases by an optimizer of their own; layers come at steps 2 and 3. Without a directory by plain torch.

    Args:
        die_after: end the process after this number of groups were added, as a kill does.
    """
    model, _ = regrouped_run.make()
    optimizers: Any = [adamw([model[-1].weight]), sgd([model[-1].bias])]
    losses, added = [], 0

    def add(step: int, names: Collection[str]) -> None:
        nonlocal added
        layer = {2: 5, 3: 1}[step]
        for optimizer, part in zip(optimizers, ("weight", "bias"), strict=True):
            if f"{layer}.{part}" in names:
                parameter = model.get_parameter(f"{layer}.{part}").requires_grad_()
                optimizer.add_param_group({"params": [parameter], "lr": 1e-2})
                added += 1
                if added > die_after:
                    os._exit(9)

    def train(steps: Iterable[int], has: Callable[[str], bool]) -> None:
        for number in steps:
            if number in (2, 3):
                layer = {2: 5, 3: 1}[number]
                add(number, {name for name in (f"{layer}.weight", f"{layer}.bias") if not has(name)})
            loss = nn.functional.cross_entropy(model(batch := killed_run.batch(number)).flatten(0, 1), batch.flatten())
            loss.backward()
            with one_step():
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(loss.item())

    one_step: Callable[[], AbstractContextManager[Any]] = nullcontext
    if directory is None:
        train(range(5), lambda _: False)
        return losses
    with swapper.SwapManager(directory, host_memory=regrouped_run.BUDGET, resume="auto") as manager:
        added = -4  # what the run has is added again, and is no death
        for step in (2, 3):
            add(step, manager.trained)
        added = 0
        _, optimizers = manager.offload(model, optimizers, params="nvme", optimizer_state="nvme")
        one_step = manager.one_step
        train(range(manager.step, 5), lambda name: name in manager.trained)
    return losses


@pytest.mark.parametrize("die_after", range(4))
def test_killed_between_groups_of_two_optimizers_the_recipe_goes_on_exactly(tmp_path: Path, die_after: int) -> None:
    expected = with_two_optimizers(None)
    child = killed_run.fork(lambda: with_two_optimizers(tmp_path, die_after))
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 9
    found = with_two_optimizers(tmp_path)
    assert found == expected[-len(found) :] and 2 <= len(found) <= 3


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_killed_while_groups_are_added_a_run_goes_on_exactly(tmp_path: Path) -> None:
    done = run_python(Path(regrouped_run.__file__), tmp_path, 41, 29)
    assert done.returncode == 0, done.stderr
    assert "all exact" in done.stdout

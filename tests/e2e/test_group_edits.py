"""Edits of `optimizer.param_groups` between two steps: followed as plain torch follows them, or refused by name at the step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapper
from e2e.twins import Twins, assert_same

MakeTwins = Callable[..., Twins]
WIDTH = 160  # a layer's weight is larger than what stays in memory


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1e-1, momentum=0.9)


def three_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [*model[0].parameters(), *model[1].parameters()]},
        {"params": [*model[2].parameters()], "lr": 1e-3, "weight_decay": 0.5},
        {"params": [*model[3].parameters()], "lr": 1e-4},
    ]


def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
    loss = model(torch.randn(4, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    model.zero_grad()  # of all: an optimizer's own forgets what it has not in its groups
    return loss.detach()


def drop(model: nn.Module, groups: list[Any]) -> None:
    groups[0]["params"] = [p for p in groups[0]["params"] if p is not model[0].weight]


def drop_by_deleting(model: nn.Module, groups: list[Any]) -> None:
    del groups[1]["params"][0]


def empty(model: nn.Module, groups: list[Any]) -> None:
    groups[1]["params"].clear()


def move(model: nn.Module, groups: list[Any]) -> None:
    groups[1]["params"].append(groups[0]["params"].pop(0))


def reverse(model: nn.Module, groups: list[Any]) -> None:
    groups[0]["params"].reverse()


def exchange(model: nn.Module, groups: list[Any]) -> None:
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]


def replace(model: nn.Module, groups: list[Any]) -> None:
    groups[1] = {**groups[1], "params": tuple(model[2].parameters()), "lr": 0.5}


def pop(model: nn.Module, groups: list[Any]) -> None:
    groups.pop(1)


def delete(model: nn.Module, groups: list[Any]) -> None:
    del groups[0]


def insert(model: nn.Module, groups: list[Any]) -> None:
    groups.insert(0, {**groups[2], "params": [groups[0]["params"].pop()]})


def append(model: nn.Module, groups: list[Any]) -> None:
    groups.append({**groups[0], "params": groups[1]["params"][1:], "lr": 0.3})
    del groups[1]["params"][1:]


def reorder(model: nn.Module, groups: list[Any]) -> None:
    groups.reverse()


EDITS = [drop, drop_by_deleting, empty, move, reverse, exchange, replace, pop, delete, insert, append, reorder]


def assert_same_entries(pair: Twins) -> None:
    """Of the parameters that are in no group too, which no state_dict of plain torch can have."""
    for ours, theirs in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
        assert_same(dict(pair.optimizer.state[ours]), dict(pair.plain_optimizer.state[theirs]))


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("make", [adamw, sgd])
def test_edits_of_the_groups_are_followed_as_in_plain_torch(twins: MakeTwins, make: Any, update: str) -> None:
    """One after the other, each from the groups that there were at first."""
    pair = twins(layers(), make, select=three_groups, update=update)
    first = {id(o): [list(g["params"]) for g in o.param_groups] for o in (pair.plain_optimizer, pair.optimizer)}
    settings = [{k: v for k, v in group.items() if k != "params"} for group in pair.plain_optimizer.param_groups]
    pair.train(step, steps=1)
    for edit in EDITS:

        def change(model: nn.Module, optimizer: Any, edit: Any = edit) -> None:
            edit(model, optimizer.param_groups)

        def undo(_: nn.Module, optimizer: Any) -> None:
            lists = first[id(optimizer)]
            optimizer.param_groups[:] = [{**s, "params": list(p)} for s, p in zip(settings, lists, strict=True)]

        before = [p.detach().clone() for p in pair.plain.parameters()]
        pair.both(change)
        pair.train(step, steps=2)
        assert_same_entries(pair)
        pair.assert_same_parameters()
        if edit in (drop, drop_by_deleting, empty, pop, delete):
            assert any(torch.equal(a, b) for a, b in zip(before, pair.plain.parameters(), strict=True))
        else:
            pair.assert_same_state()
        pair.both(undo)
        pair.train(step, steps=1)
    pair.finish(paged=False)


@pytest.mark.whole
@pytest.mark.parametrize("params, state", [("host", "host"), ("nvme", "host"), ("host", "nvme")])
def test_edits_are_followed_wherever_things_live(twins: MakeTwins, params: str, state: str) -> None:
    pair = twins(layers(), adamw, select=three_groups, params=params, optimizer_state=state)
    pair.train(step, steps=1)
    for edit in (move, pop):
        pair.both(lambda model, optimizer, edit=edit: edit(model, optimizer.param_groups))
        pair.train(step, steps=2)
        assert_same_entries(pair)
    pair.assert_same_parameters()


@pytest.mark.whole
@pytest.mark.parametrize("whose", ["the returned one", "the user's own"])
def test_the_whole_list_of_groups_can_be_replaced(twins: MakeTwins, whose: str) -> None:
    pair = twins(layers(), select=three_groups)
    pair.train(step, steps=1)

    def replace_all(model: nn.Module, optimizer: Any) -> None:
        target = pair.original if whose == "the user's own" and model is pair.swapped else optimizer
        target.param_groups = [{**g, "lr": 0.1} for g in reversed(optimizer.param_groups[1:])]

    pair.both(replace_all)
    assert pair.optimizer.param_groups is pair.original.param_groups
    pair.train(step, steps=2)
    assert_same_entries(pair)
    pair.assert_same_parameters()


def test_a_state_dict_has_the_parameters_in_the_order_that_they_have_now(twins: MakeTwins) -> None:
    """Taken and given before the step that follows an edit."""
    pair = twins(layers(), select=three_groups)
    pair.train(step, steps=1)
    pair.both(lambda _, optimizer: optimizer.param_groups.reverse())
    pair.assert_same_state()
    earlier = copy.deepcopy(pair.plain_optimizer.state_dict())
    pair.train(step, steps=1)
    pair.both(lambda _, optimizer: optimizer.param_groups.reverse())
    pair.train(step, steps=1)
    pair.both(lambda _, optimizer: optimizer.param_groups.reverse())
    pair.both(lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(earlier)))
    pair.train(step, steps=2)
    pair.finish(paged=False)


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_what_joins_a_group_by_an_edit_is_trained(twins: MakeTwins, update: str) -> None:
    """Of the model's parameters; also one that left its group before, whose state is there still."""
    pair = twins(layers(), select=lambda model: three_groups(model)[:2], update=update)
    pair.train(step, steps=2)

    def join(model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["params"].append(model[3].weight)
        optimizer.param_groups[0]["params"].pop(0)

    pair.both(join)
    pair.train(step, steps=2)
    pair.both(
        lambda model, optimizer: optimizer.add_param_group({"params": [model[0].weight, model[3].bias], "lr": 0.1})
    )
    pair.train(step, steps=2)
    pair.finish(paged=False)


def stranger(model: nn.Module, groups: list[Any]) -> str:
    groups[0]["params"].append(nn.Parameter(torch.zeros(3)))
    return r"parameter 4 of group 0 of the optimizer \(shape \[3\]\) is not one of the offloaded model's"


def twice(model: nn.Module, groups: list[Any]) -> str:
    groups[2]["params"].append(model[0].weight)
    return r"parameter 0\.weight is in group 0 of the optimizer and in group 2"


def twice_in_one(model: nn.Module, groups: list[Any]) -> str:
    groups[1]["params"].append(model[2].bias)
    return r"parameter 2\.bias is in group 1 of the optimizer twice"


def lacking(model: nn.Module, groups: list[Any]) -> str:
    groups.append({"params": [groups[0]["params"].pop()]})
    return r"group 3 of the optimizer has no 'amsgrad'.*add_param_group"


def without_parameters(model: nn.Module, groups: list[Any]) -> str:
    del groups[1]["params"]
    return r"group 1 of the optimizer: 'params' is no list"


def generator(model: nn.Module, groups: list[Any]) -> str:
    groups[1]["params"] = model[2].parameters()
    return r"group 1 of the optimizer: 'params' is no list"


def other_state(model: nn.Module, groups: list[Any]) -> str:
    groups[0]["amsgrad"] = True
    groups[0]["params"].append(groups[1]["params"].pop())
    return "max_exp_avg_sq"


REFUSED = [stranger, twice, twice_in_one, lacking, without_parameters, generator, other_state]


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_edits_that_cannot_be_followed_are_refused_at_the_step_and_nothing_changes(
    twins: MakeTwins, update: str
) -> None:
    pair = twins(layers(), select=three_groups, update=update)
    pair.train(step, steps=2)
    groups = pair.optimizer.param_groups
    for edit in REFUSED:
        before = [dict(group, params=list(group["params"])) for group in groups]
        random_state = torch.get_rng_state()
        message = edit(pair.swapped, groups)
        with pytest.raises(swapper.StateError, match=message):
            step(pair.swapped, pair.optimizer)
        groups[:] = before
        pair.swapped.zero_grad()
        torch.set_rng_state(random_state)
        pair.train(step, steps=1)
    pair.finish(paged=False)


def test_a_parameter_that_moves_to_a_group_of_other_state_is_refused_by_name(twins: MakeTwins) -> None:
    def select(model: nn.Module) -> list[dict[str, Any]]:
        groups = three_groups(model)
        groups[1]["momentum"] = 0.0
        return groups

    pair = twins(layers(), sgd, select=select)
    pair.train(step, steps=2)
    groups = pair.optimizer.param_groups
    groups[0]["params"].append(groups[1]["params"].pop())
    with pytest.raises(swapper.StateError, match=r"2\.bias.*group 0.*momentum_buffer"):
        step(pair.swapped, pair.optimizer)
    groups[1]["params"].append(groups[0]["params"].pop())
    pair.swapped.zero_grad()
    pair.both(
        lambda _, optimizer: optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
    )
    pair.train(step, steps=2)  # to one that keeps less: what it has is left as it is
    pair.assert_same_parameters()
    assert_same_entries(pair)


def test_groups_that_change_between_backward_and_step_are_refused_with_updates_in_backward(backward: MakeTwins) -> None:
    pair = backward(layers(), select=three_groups)
    pair.train(step, steps=1)
    for edit in (move, pop, reorder):
        pair.swapped(torch.randn(4, WIDTH)).square().mean().backward()
        before = [dict(group, params=list(group["params"])) for group in pair.optimizer.param_groups]
        edit(pair.swapped, pair.optimizer.param_groups)
        with pytest.raises(swapper.StateError, match="was changed between backward and"):
            pair.optimizer.step()
        pair.optimizer.param_groups[:] = before
        pair.swapped.zero_grad()


def test_a_run_that_goes_on_has_the_groups_as_they_were_edited(tmp_path: Path) -> None:
    """The script builds them as at first; the run goes on as plain torch does that was never killed."""
    plain = layers()
    start = copy.deepcopy(plain)

    def edit(model: nn.Module, groups: list[Any]) -> None:
        move(model, groups)
        groups[2]["params"].clear()

    expected = adamw(three_groups(plain))
    batches = [torch.randn(4, WIDTH) for _ in range(4)]

    def train(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        model.zero_grad()

    for number, batch in enumerate(batches):
        train(plain, expected, batch)
        if number == 1:
            edit(plain, expected.param_groups)
    for begin, end in ((0, 3), (3, 3), (3, 4)):  # one goes on without a step of its own
        model = copy.deepcopy(start)
        optimizer = adamw(three_groups(model))
        with swapper.SwapManager(tmp_path, "64MiB", resume="auto") as manager:
            model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
            assert manager.step == begin
            for number in range(begin, end):
                train(model, optimizer, batches[number])
                if number == 1:
                    edit(model, optimizer.param_groups)
            if end == 4:
                with manager.gather(model):
                    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
                assert_same(optimizer.param_groups[1]["lr"], 1e-3)
    model = copy.deepcopy(start)
    with (
        swapper.SwapManager(tmp_path, "64MiB", resume="auto") as manager,
        pytest.raises(swapper.CheckpointError, match="has 3 param_groups, and this one has 4"),
    ):
        groups = [*three_groups(model), {"params": []}]
        manager.offload(model, adamw(groups), params="nvme", optimizer_state="nvme")


# --- settings, in every form -------------------------------------------------------------------------------------------


class Scaled(torch.optim.SGD):
    """Has an option of its own, as well as its groups."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.1)
        self.factor = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * self.factor)


def change_lr_tensor(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"].mul_(0.5)


def change_betas(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[1]["betas"] = (0.5, 0.9)
    optimizer.param_groups[2].update(weight_decay=0.25, eps=1e-3, maximize=True)


def freeze(model: nn.Module, optimizer: Any) -> None:
    model[1].requires_grad_(False)


def change_defaults(model: nn.Module, optimizer: Any) -> None:
    left = optimizer.param_groups[0]["params"].pop()
    optimizer.defaults["weight_decay"] = 0.125
    optimizer.defaults = {**optimizer.defaults, "lr": torch.tensor(0.5)}
    optimizer.add_param_group({"params": [left]})


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_settings_changed_in_any_form_act(twins: MakeTwins, update: str) -> None:
    def adamw_with_tensor(groups: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
        made.param_groups[0]["lr"] = torch.tensor(1e-2)
        return made

    pair = twins(layers(), adamw_with_tensor, select=three_groups, update=update)
    pair.train(step, steps=1)
    for edit in (change_lr_tensor, change_betas, freeze, change_defaults, change_lr_tensor):
        pair.both(edit)
        pair.train(step, steps=2)
        pair.assert_same_parameters()
    pair.finish(paged=False)


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_an_optimizers_own_options_act_where_they_are_changed(twins: MakeTwins, update: str) -> None:
    pair = twins(layers(), Scaled, select=three_groups, update=update)
    pair.train(step, steps=1)

    def change(model: nn.Module, optimizer: Any) -> float:
        optimizer.factor *= 0.5
        return optimizer.factor

    pair.both(change)
    pair.train(step, steps=2)
    assert pair.original.factor == 0.5
    pair.optimizer.of_the_users_own = 3  # is on the object that the user has
    assert not hasattr(pair.original, "of_the_users_own")
    with pytest.raises(AttributeError, match="'PagedOptimizer' object has no attribute 'nothing'"):
        _ = pair.optimizer.nothing
    pair.finish(paged=False)

"""Optimizers whose rules see more than an element, at once or later on: bit-equal to plain torch, or refused by name."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import swapper
from e2e import third_party
from e2e.optimizer_rules import RULES, TRIGGERS, Clock, Ruled
from e2e.twins import Twins
from swapper.train.optimizer import optimizer_probe
from swapper.train.optimizer.optimizer_probe import OptimizerProbe
from swapper.train.optimizer.own_code import is_known, may_be_elementwise

MakeTwins = Callable[..., Twins]
SHAPES = [(96, 128), (300,), (64, 32), (), (17, 5, 3), (40, 50), (512,), (96, 64)]
LATE = 7
COUPLED = ("norm of all", "clipped by all", "place", "count", "identity", "carried on", "random", "random by Python")


def layers() -> nn.ModuleList:
    model = nn.ModuleList()
    for shape in SHAPES:
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.randn(shape) * 0.1)
        model.append(layer)
    return model


def in_two_groups(rule: str, trigger: str) -> Callable[[Any], Ruled]:
    def make(parameters: Any) -> Ruled:
        listed = list(parameters)
        return Ruled([{"params": listed[:2]}, {"params": listed[2:]}], rule, trigger, LATE)

    return make


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_followed_or_refused_whenever_it_begins(twins: MakeTwins, rule: str, trigger: str) -> None:
    if (rule, trigger) == ("place", "loop"):
        pytest.skip("a rule on places that the training loop begins is found by nothing")
    Clock.now = 0
    pair = twins(layers(), in_two_groups(rule, trigger), wait=True, budget=32 << 20)

    def step(model: nn.Module, optimizer: Any) -> None:
        Clock.now += model is pair.plain
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()

    def train() -> None:
        pair.offload()
        pair.train(step, steps=LATE + 4)
        pair.finish(paged=False)

    if rule not in COUPLED:
        train()
        return
    with pytest.raises(swapper.UnsupportedError, match=r"Ruled cannot be paged: (what it does|its attribute 'chosen')"):
        train()


def patched_instance(parameters: Any) -> AdamW:
    optimizer = AdamW(parameters)
    step = optimizer.step
    optimizer.step = types.MethodType(lambda self, closure=None: step(closure), optimizer)  # type: ignore[method-assign]
    return optimizer


def patched_helper(parameters: Any) -> third_party.Lion:
    optimizer = third_party.Lion(parameters)
    optimizer._update = lambda p, state, group: p.sub_(p.grad)  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize(("make", "name"), [(patched_instance, "step"), (patched_helper, "_update")])
def test_a_method_that_was_replaced_on_the_instance_is_refused(
    tmp_path: Path, make: Callable[[Any], Any], name: str
) -> None:
    model = layers()
    with (
        swapper.SwapManager(tmp_path, "64MiB") as manager,
        pytest.raises(swapper.UnsupportedError, match=rf"'{name}' was replaced on the instance.*in a subclass"),
    ):
        manager.offload(model, make(model.parameters()))


def test_a_scheduler_and_a_class_whose_method_was_replaced_are_followed(
    twins: MakeTwins, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SGD.step

    def larger(self: SGD, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(2.0 if p.numel() > 5000 else 1.0)
        return plain(self, closure)

    monkeypatch.setattr(SGD, "step", larger)

    def make(parameters: Any) -> SGD:
        optimizer = SGD(parameters, lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer

    pair = twins(layers(), make)

    def step(model: nn.Module, optimizer: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()

    assert not is_known(pair.original)
    pair.train(step, steps=3)
    pair.finish(paged=False)


@pytest.mark.parametrize(
    ("make", "is_elementwise"),
    [
        (third_party.Lion, True),
        (third_party.ScheduleFree, True),
        (third_party.Scaled, True),
        (third_party.LowBit, False),
        (third_party.FactoredRms, False),
        (third_party.Whitening, False),
        (lambda p: Ruled(p, "nothing", "always", 0), False),
    ],
)
def test_unknown_code_is_cut_only_if_its_names_are_elementwise(
    make: Callable[[Any], Any], is_elementwise: bool
) -> None:
    optimizer = make([nn.Parameter(torch.zeros(3))])
    assert not is_known(optimizer)
    assert may_be_elementwise(optimizer) is is_elementwise


SCHEDULED: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: AdamW(p, lr=1e-3),
    "SGD": lambda p: SGD(p, lr=1e-2, momentum=0.9),
    "Lion": third_party.Lion,
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_schedules_of_betas_momentum_and_decay_cost_no_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tried = []
    run = OptimizerProbe._try
    monkeypatch.setattr(OptimizerProbe, "_try", lambda *given: tried.append(given) or run(*given))
    model = nn.Linear(64, 64)
    with swapper.SwapManager(tmp_path, "64MiB") as manager:
        model, optimizer = manager.offload(model, SCHEDULED[name](model.parameters()))
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=100)
        seen = []
        for number in range(6):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.param_groups[0]["weight_decay"] = 0.1 + number / 100
            optimizer.step()
            optimizer.zero_grad()
            cycle.step()
            seen.append(len(tried))
    assert len(set(seen)) == 1, seen


def test_the_forms_that_are_kept_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_probe, "MAX_FORMS", 3)
    model = nn.Linear(8, 8)
    with swapper.SwapManager(tmp_path, "64MiB") as manager:
        model, optimizer = manager.offload(model, third_party.Lion(model.parameters(), number=0))
        [forms] = manager.current.run.plan.inventory.probe._forms
        for number in range(1, 4):
            optimizer.param_groups[0]["number"] = number
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            assert len(forms) <= 3

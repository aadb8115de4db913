"""Defines what a loop of racing_loops.py may do between two steps: passes, penalties on gradients, products, second backwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import devices
import torch
from torch import nn

import swapper
from e2e.twins import Twins

WIDTH = 192
BATCH = 4


class Pass:
    """What one of the twins does between two steps.

    Args:
        pair: the twins.
        model: one of them.
        chance: the same for both.
        watch: has everything that is under way end, now and then, before a node runs of the graph that it is given.

    Attributes:
        is_last: behind the operation that runs comes the step.
    """

    is_last = False

    def __init__(self, pair: Twins, model: Any, chance: random.Random, watch: Callable[[torch.Tensor], None]) -> None:
        assert pair.manager is not None
        self.manager = pair.manager
        self.model = model
        self.chance = chance
        self.is_swapped = model is pair.swapped
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.gradients_are_there = pair.options.get("gradients") != "nvme" and not devices.NAME
        self._watch = watch
        self._dtype = self.parameters[0].dtype

    def input(self) -> torch.Tensor:
        return torch.randn(BATCH, WIDTH, dtype=self._dtype, requires_grad=True)

    def forward(self, value: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = self.model(self.input() if value is None else value)
        return result

    def loss(self) -> torch.Tensor:
        return self.forward().square().mean()

    def grad(self, of: torch.Tensor, by: Any, **options: Any) -> Any:
        self._watch(of)
        return torch.autograd.grad(of, by, allow_unused=True, **options)

    def backward(self, of: torch.Tensor, is_last: bool = False, **options: Any) -> None:
        """`is_last`: the step comes next."""
        self._watch(of)
        with self.swapped(lambda: self.manager.accumulate()) if not is_last else nullcontext():
            of.backward(**options)

    def end(self, loss: torch.Tensor, retains: bool) -> None:
        """Go backward; twice where the graph is retained."""
        if retains:
            self.backward(loss, retain_graph=True)
        self.backward(loss, self.is_last)

    def swapped(self, context: Callable[[], Any]) -> Any:
        """Return what the swapped twin does something in; the other one needs no context."""
        return context() if self.is_swapped else nullcontext()

    def some_parameters(self) -> list[nn.Parameter]:
        return self.chance.sample(self.parameters, self.chance.randint(1, len(self.parameters)))


def sum_of_squares(tensors: Any) -> torch.Tensor:
    return sum((tensor.square().sum() for tensor in tensors if tensor is not None), torch.zeros((), requires_grad=True))


def ordinary(run: Pass, retains: bool = False) -> Any:
    loss = run.loss()
    run.end(loss, retains)
    return loss.detach()


def penalty(run: Pass, retains: bool = False) -> Any:
    """On the gradient of the input, as WGAN-GP has it."""
    value = run.input()
    result = run.forward(value)
    (gradient,) = run.grad(result.sum(), value, create_graph=True)
    loss = result.square().mean() + (gradient.norm(dim=1) - 1).square().mean()
    run.end(loss, retains)
    return [gradient.detach(), loss.detach()]


def penalty_alone(run: Pass) -> Any:
    value = run.input()
    (gradient,) = run.grad(run.forward(value).sum(), value, create_graph=True)
    run.backward(gradient.square().sum())
    return gradient.detach()


def third_order(run: Pass) -> Any:
    value = run.input()
    (first,) = run.grad(run.forward(value).sum(), value, create_graph=True)
    (second,) = run.grad(first.square().sum(), value, create_graph=True)
    run.backward(second.square().sum())
    return second.detach()


def inputs_only(run: Pass) -> Any:
    value = run.input()
    loss = run.forward(value).square().mean()
    found = run.grad(loss, value, retain_graph=True)
    run.backward(loss)
    return found


def hessian_product(run: Pass) -> Any:
    """By gradients of some parameters."""
    some = run.some_parameters()
    first = run.grad(run.loss(), some, create_graph=True)
    return run.grad(sum_of_squares(first), some)


def hessian_backward(run: Pass) -> Any:
    product = sum_of_squares(run.grad(run.loss(), run.some_parameters(), create_graph=True))
    run.backward(product)
    return product.detach()


def functional_products(run: Pass) -> Any:
    value, direction = run.input().detach(), run.input().detach()
    kind = run.chance.choice(["vjp", "jvp", "hvp", "vhp"])
    makes_graph = run.chance.random() < 0.3
    is_scalar = kind in ("hvp", "vhp")
    found = getattr(torch.autograd.functional, kind)(
        lambda given: run.model(given).square().mean() if is_scalar else run.model(given),
        value,
        direction,
        create_graph=makes_graph,
    )
    if makes_graph:
        run.backward(found[1].square().sum())
    return [one.detach() for one in found]


def penalty_on_kept_gradients(run: Pass) -> Any:
    """By `parameter.grad`, which has a graph; where it can be looked at. An input's would keep the graph for good."""
    loss = run.forward(run.input().detach()).square().mean()
    run.backward(loss, create_graph=True)
    if run.gradients_are_there:
        loss = run.loss() + sum_of_squares(parameter.grad for parameter in run.parameters)
        run.backward(loss)
    for parameter in run.parameters:
        if parameter.grad is not None and parameter.grad.grad_fn is not None:
            parameter.grad.detach_()
    return loss.detach()


def kept_beyond_another(run: Pass) -> Any:
    """A graph that is gone through after another forward and backward."""
    early = run.loss()
    run.backward(early, retain_graph=True)
    ordinary(run)
    run.backward(early)
    return early.detach()


def evaluation_in_between(run: Pass) -> Any:
    loss = run.loss()
    with torch.no_grad():
        seen = run.forward()
    run.backward(loss)
    return seen


def gathered_penalty(run: Pass) -> Any:
    """On parameters, and on their gradients, with a layer in memory."""
    layer = run.chance.choice(list(run.model.layers))
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    stays = run.chance.random() < 0.5
    with run.swapped(lambda: run.manager.gather(layer)):
        loss = run.loss() + 1e-3 * sum_of_squares(trained)
        if trained:
            loss = loss + sum_of_squares(run.grad(loss, trained, create_graph=True))
        if stays:
            run.backward(loss)
    if not stays:
        run.backward(loss)
    return loss.detach()


def saved_elsewhere(run: Pass) -> Any:
    """With activations on NVMe, and what the first backward saves."""
    value = run.input()
    with run.swapped(lambda: swapper.offload_activations(run.manager, to="nvme", min_bytes=1)):
        result = run.forward(value)
        (gradient,) = run.grad(result.sum(), value, create_graph=True)
        run.backward(gradient.square().sum() + result.mean())
    return gradient.detach()


Operation = Callable[[Pass], Any]
ENDINGS: tuple[Operation, ...] = (ordinary, partial(ordinary, retains=True), penalty, partial(penalty, retains=True))
OPERATIONS: tuple[Operation, ...] = (
    *ENDINGS,
    kept_beyond_another,
    evaluation_in_between,
    penalty_alone,
    third_order,
    inputs_only,
    hessian_product,
    hessian_backward,
    functional_products,
    penalty_on_kept_gradients,
    gathered_penalty,
    saved_elsewhere,
)
WITHOUT_GRAPHS: tuple[Operation, ...] = (*ENDINGS[:2], kept_beyond_another, evaluation_in_between)
"""What reentrant checkpointing allows: no torch.autograd.grad, and no graph over a graph."""

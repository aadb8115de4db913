"""Defines one of the twins of programs.py, and the forwards and backwards that their loops do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import swapper
from fuzz.program_layers import VOCABULARY

BATCH, LENGTH = 2, 6


@dataclass
class Side:
    """One of the twins.

    Args:
        manager: of the swapped one.
        rebuild: of the swapped one: closes it, and resumes from its directory as another process does; given a source of chance,
            with another budget, place of gradients and time of the update.
        directory: for files of its own.
        chance: of the action that runs; the same for both.
        is_last: no other backward follows before the step.
        is_open: passes have run since the last step that was taken.
        watch: is given each loss, whose graph it may hook.
        spread: how ranks have the model: see ranks.py.
    """

    model: Any
    optimizer: Any
    manager: Any
    rebuild: Callable[[Random | None], None]
    directory: Any
    chance: Random = field(default_factory=Random)
    is_last: bool = True
    is_open: bool = False
    kept: dict[str, Any] = field(default_factory=dict)
    watch: Callable[[torch.Tensor], object] = lambda loss: None
    spread: str = ""

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def one(self) -> nn.Parameter:
        return self.chance.choice(list(self.model.parameters()))

    @property
    def one_trained(self) -> nn.Parameter:
        return self.chance.choice(self.trained)

    def swapped(self, make: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
        """Return a context of the swapped one; the plain one needs none."""
        return nullcontext() if self.manager is None else make()

    def loss(self) -> torch.Tensor:
        batch = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
        loss = F.cross_entropy(self.model(batch).float().flatten(0, 1), batch.flatten())
        self.watch(loss)
        return loss

    def backward(self, loss: torch.Tensor, is_last: bool = True, **options: Any) -> torch.Tensor:
        is_last = is_last and self.is_last
        with self.swapped(lambda: self.manager.accumulate()) if not is_last else nullcontext():
            loss.backward(**options)
        return loss.detach()


Action = Callable[[Side], Any]

# --- passes -----------------------------------------------------------------------------------------------------------


def two_batches(side: Side) -> Any:
    return [side.backward(side.loss() / 2, is_last) for is_last in (False, True)]


def two_graphs(side: Side) -> Any:
    one, other = side.loss(), side.loss()
    return [side.backward(other, is_last=False), side.backward(one)]


def summed(side: Side) -> Any:
    return side.backward(side.loss() + 0.5 * side.loss())


def retained(side: Side) -> Any:
    loss = side.loss()
    return [side.backward(loss, is_last=False, retain_graph=True), side.backward(loss)]


def autocast(side: Side) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        loss = side.loss()
    return side.backward(loss)


def discarded(side: Side) -> Any:
    return [side.loss().detach(), side.backward(side.loss())]


def evaluated_within(side: Side) -> Any:
    loss = side.loss()
    with torch.no_grad():
        between = side.loss()
    return [between, side.backward(loss)]


def penalized(side: Side) -> Any:
    """A penalty on parameters outside of a forward."""
    loss = side.loss()
    return side.backward(loss + 1e-3 * sum(p.float().square().sum() for p in side.chance.sample(side.trained, 2)))


def gradient_penalty(side: Side) -> Any:
    loss = side.loss()
    (gradient,) = torch.autograd.grad(loss, side.model.scale, create_graph=True)
    return side.backward(loss + gradient.square().sum())


def only_some(side: Side) -> Any:
    return side.backward(side.loss(), inputs=side.chance.sample(side.trained, 2))


def by_grad(side: Side) -> Any:
    """Gradients by torch.autograd.grad, which the loop assigns itself."""
    trained = side.trained
    loss = side.loss()
    for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
        # In the order of its slot: torch's optimizers round by the order of memory.
        parameter.grad = None if gradient is None else gradient.contiguous()
    return loss.detach()


def together(side: Side) -> Any:
    batches = [torch.randint(0, VOCABULARY, (BATCH, LENGTH)) for _ in range(2)]

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(side.model(batch).float().flatten(0, 1), batch.flatten())

    if side.manager is None:
        return [loss.detach() for loss in map(loss_of, batches) if loss.backward() is None]
    with nullcontext() if side.is_last else side.manager.accumulate():
        return side.manager.accumulate_batches(loss_of, batches)


def zeroed_within(side: Side) -> Any:
    loss = side.loss()
    side.optimizer.zero_grad()
    return side.backward(loss)


def saved_on_cpu(side: Side) -> Any:
    with (
        torch.autograd.graph.save_on_cpu()
        if side.chance.random() < 0.5
        else side.swapped(lambda: swapper.offload_activations(side.manager, min_bytes=1 << 10))
    ):
        return side.backward(side.loss())


def by_parts(side: Side) -> Any:
    """Without the model's own forward."""
    batch, model = torch.randint(0, VOCABULARY, (BATCH, LENGTH)), side.model
    hidden = model.embedding(batch)
    for layer in model.layers:
        hidden = hidden + layer(hidden)
    logits = F.linear(hidden * model.scale, model.head.weight)
    return side.backward(F.cross_entropy(logits.float().flatten(0, 1), batch.flatten()))


def inner_step(side: Side) -> Any:
    """As MAML: the loss of what a step would make of the head and the scale."""
    names = ["scale", "head.weight"]
    fast = {name: side.model.get_parameter(name) for name in names}
    gradients = torch.autograd.grad(side.loss(), [p for p in fast.values() if p.requires_grad], allow_unused=True)
    pairs = zip([name for name in names if fast[name].requires_grad], gradients, strict=True)
    fast |= {name: fast[name] - 0.1 * gradient for name, gradient in pairs if gradient is not None}
    batch = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    logits = torch.func.functional_call(side.model, fast, (batch,))
    return side.backward(F.cross_entropy(logits.float().flatten(0, 1), batch.flatten()))


def adversarial(side: Side) -> Any:
    """As FGM: a second loss with a change of the embedding."""
    losses, weight = [side.backward(side.loss(), is_last=False)], side.model.embedding.weight
    kept = weight.data.clone()
    if weight.grad is not None:
        weight.data.add_(weight.grad, alpha=0.1)
    losses.append(side.backward(side.loss()))
    weight.data.copy_(kept)
    return losses


def sharpness(side: Side) -> Any:
    """As SAM: the gradient at another place."""
    side.backward(side.loss(), is_last=False)
    moves = [(p, p.grad * 0.05) for p in side.trained if p.grad is not None]
    with torch.no_grad():
        for parameter, move in moves:
            parameter.add_(move)
    side.model.zero_grad()
    loss = side.backward(side.loss())
    with torch.no_grad():
        for parameter, move in moves:
            parameter.sub_(move)
    return loss


class Stop(Exception):
    """What a loop catches, as an error of memory."""


def interrupted(side: Side) -> Any:
    """A forward or a backward that fails, is caught, and is done again."""

    def stop(*_: Any) -> None:
        raise Stop

    layer, in_forward = side.chance.choice([side.model.head, *side.model.layers]), side.chance.random() < 0.5
    hook = layer.register_forward_hook(
        stop if in_forward else lambda _, arguments, output: output.register_hook(stop) and None
    )
    try:
        side.backward(side.loss())
    except Stop:
        side.model.zero_grad()
    finally:
        hook.remove()
    return side.backward(side.loss())


def ordinary(side: Side) -> Any:
    return side.backward(side.loss())


PASSES: dict[str, Action] = {
    "ordinary": ordinary,
    "two batches": two_batches,
    "two graphs": two_graphs,
    "summed": summed,
    "retained": retained,
    "autocast": autocast,
    "discarded": discarded,
    "evaluated within": evaluated_within,
    "penalized": penalized,
    "gradient penalty": gradient_penalty,
    "only some": only_some,
    "by grad": by_grad,
    "together": together,
    "zeroed within": zeroed_within,
    "saved elsewhere": saved_on_cpu,
    "by parts": by_parts,
    "inner step": inner_step,
    "adversarial": adversarial,
    "sharpness": sharpness,
    "interrupted": interrupted,
}

"""Training loops other than the usual one, which every time of update has to get right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from e2e.models import finish_step, loss_of, tokens, train_step
from e2e.twins import Twins, scalers_of, scheduled

Run = Callable[[Any, Any], Any]


def never_zero(model: Any, optimizer: Any) -> torch.Tensor:
    loss = loss_of(model, tokens())
    loss.backward()
    optimizer.step()
    return loss.detach()


def zero_in_place(model: Any, optimizer: Any) -> torch.Tensor:
    loss = never_zero(model, optimizer)
    model.zero_grad(set_to_none=False)
    return loss


def evaluate_between(model: Any, optimizer: Any) -> torch.Tensor:
    loss = train_step(model, optimizer)
    with torch.no_grad():
        return torch.stack([loss, loss_of(model, tokens()), loss_of(model, tokens())])


def autocast(model: Any, optimizer: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, tokens())
    return finish_step(loss, optimizer)


def two_forwards(model: Any, optimizer: Any) -> torch.Tensor:
    return finish_step(loss_of(model, tokens()) + loss_of(model, tokens()), optimizer)


def two_backwards(model: Any, optimizer: Any) -> torch.Tensor:
    """Two forwards, then two backwards: the first does not complete any group."""
    one, other = loss_of(model, tokens()), loss_of(model, tokens())
    one.backward()
    return torch.stack([one.detach(), finish_step(other, optimizer)])


def retain(model: Any, optimizer: Any) -> torch.Tensor:
    loss = loss_of(model, tokens())
    loss.backward(retain_graph=True)
    return finish_step(loss, optimizer)


def penalize(model: Any, optimizer: Any) -> torch.Tensor:
    """A penalty on the gradient of a small parameter."""
    loss = loss_of(model, tokens())
    (gradient,) = torch.autograd.grad(loss, model.norm.bias, create_graph=True)
    return finish_step(loss + gradient.square().sum(), optimizer)


def discard_a_forward(model: Any, optimizer: Any) -> torch.Tensor:
    loss_of(model, tokens())
    return train_step(model, optimizer)


def evaluate_within(model: Any, optimizer: Any) -> torch.Tensor:
    """Between a forward and its backward."""
    loss = loss_of(model, tokens())
    with torch.no_grad():
        between = loss_of(model, tokens())
    return torch.stack([finish_step(loss, optimizer), between])


def evaluate_in_inference_mode(model: Any, optimizer: Any) -> torch.Tensor:
    loss = train_step(model, optimizer)
    with torch.inference_mode():
        evaluated = loss_of(model, tokens())
    return torch.stack([loss, evaluated.clone()])


def zero_before_backward(model: Any, optimizer: Any) -> torch.Tensor:
    loss = loss_of(model, tokens())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def clip(model: Any, optimizer: Any) -> torch.Tensor:
    loss = loss_of(model, tokens())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack([loss.detach(), norm])


def clip_again(model: Any, optimizer: Any) -> torch.Tensor:
    """By another norm, by value, and once more on top of what was clipped."""
    parameters = list(model.parameters())
    loss_of(model, tokens()).backward()
    norms = [nn.utils.clip_grad_norm_(parameters, 1e-2, norm_type=1.0)]
    nn.utils.clip_grad_value_(parameters, 1e-4)
    loss_of(model, tokens()).backward()
    norms.append(nn.utils.clip_grad_norm_(parameters, 1e-2, norm_type=float("inf")))
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(norms)


def change_gradients(model: Any, optimizer: Any) -> torch.Tensor:
    """After the step: it is too late for this one, and in time for the next."""
    loss = never_zero(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
    return loss


def look_at_gradients(model: Any, optimizer: Any) -> torch.Tensor:
    """To look is allowed between backward and step, in all the ways that loops do."""
    loss = loss_of(model, tokens())
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [g.data.norm(2) for g in gradients] + list(torch._foreach_norm(gradients))
    kept = copy.deepcopy(gradients[0])
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack([loss.detach(), *norms, kept.sum()])


def close_over(model: Any, optimizer: Any) -> torch.Tensor:
    batch = tokens()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return optimizer.step(closure).detach()


def accumulate(pair: Twins) -> Run:
    def run(model: Any, optimizer: Any) -> torch.Tensor:
        losses = []
        for is_last in (False, False, True):
            only_accumulates = model is pair.swapped and not is_last
            with pair.manager.accumulate() if only_accumulates else nullcontext():
                losses.append(loss_of(model, tokens()) / 3)
                losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).detach()

    return run


def scale(pair: Twins) -> Run:
    """With a scaler whose first step is left out: what it starts with overflows."""
    scalers = scalers_of(pair, 2.0**119)

    def run(model: Any, optimizer: Any) -> list[float]:
        scaler = scalers[id(model)]
        loss = loss_of(model, tokens())
        scaler.scale(100 * loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return [loss.item(), scaler.get_scale()]

    return run


def clip_by_the_manager(pair: Twins) -> Run:
    def run(model: Any, optimizer: Any) -> torch.Tensor:
        loss = loss_of(model, tokens())
        loss.backward()
        if model is pair.swapped:
            norm = pair.manager.clip_grad_norm_(1e-2)
            pair.manager.clip_grad_value_(1e-4)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([loss.detach(), norm])

    return run


LOOPS: dict[str, Callable[[Twins], Run]] = {
    name: (lambda pair, run=run: run)
    for name, run in {
        "ordinary": train_step,
        "two forwards": two_forwards,
        "two backwards": two_backwards,
        "retained graph": retain,
        "gradient penalty": penalize,
        "discarded forward": discard_a_forward,
        "evaluation": evaluate_between,
        "evaluation within": evaluate_within,
        "inference mode": evaluate_in_inference_mode,
        "never zeroed": never_zero,
        "zeroed in place": zero_in_place,
        "zeroed before backward": zero_before_backward,
        "autocast": autocast,
        "clipped": clip,
        "clipped again": clip_again,
        "gradients changed": change_gradients,
        "gradients looked at": look_at_gradients,
        "closure": close_over,
    }.items()
} | {
    "accumulation": accumulate,
    "scaler": scale,
    "scheduler": scheduled,
    "clipped by the manager": clip_by_the_manager,
}
"""Each makes, for twins, what one of them does in a step."""

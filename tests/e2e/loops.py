"""Training loops other than the usual one, which every time of update has to get right."""

from __future__ import annotations

from typing import Any

import torch

from e2e.models import finish_step, loss_of, tokens, train_step


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

"""Defines the actions of the loops of programs.py besides passes: before the step, the step itself, and between two steps."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import swapper
from fuzz.export_sources import content_of
from fuzz.program_passes import PASSES, Action, Side
from swapper.checkpoint.exporting import FORMATS

# --- between a backward and the step ----------------------------------------------------------------------------------


def clip_norm(side: Side) -> Any:
    return nn.utils.clip_grad_norm_(side.model.parameters(), 0.1, side.chance.choice([2.0, 1.0, float("inf")]))


def clip_value(side: Side) -> Any:
    nn.utils.clip_grad_value_(side.model.parameters(), 1e-3)


def look(side: Side) -> Any:
    return [parameter.grad if parameter.grad is None else parameter.grad.clone() for parameter in side.trained]


def scale_gradients(side: Side) -> Any:
    for parameter in side.trained:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def drop_some(side: Side) -> Any:
    side.one_trained.grad = None


def add_noise(side: Side) -> Any:
    parameter = side.one_trained
    if parameter.grad is not None:
        parameter.grad += torch.randn_like(parameter.grad) * 1e-3


def assign(side: Side) -> Any:
    parameter = side.one_trained
    parameter.grad = torch.full_like(parameter, 1e-3)


BEFORE_STEP: dict[str, Action] = {
    "clip norm": clip_norm,
    "clip value": clip_value,
    "look": look,
    "scale gradients": scale_gradients,
    "drop some": drop_some,
    "add noise": add_noise,
    "assign": assign,
}

# --- steps ------------------------------------------------------------------------------------------------------------


def step(side: Side) -> Any:
    side.optimizer.step()


def step_twice(side: Side) -> Any:
    side.optimizer.step()
    side.optimizer.step()


def skip(side: Side) -> Any:
    side.optimizer.zero_grad()


def closure(side: Side) -> Any:
    def run() -> torch.Tensor:
        side.optimizer.zero_grad()
        loss = side.loss()
        loss.backward()
        return loss

    return side.optimizer.step(run).detach()


def scaled(side: Side) -> Any:
    scaler = side.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2))
    loss = side.loss()
    side.backward(scaler.scale(loss * 100))
    if side.chance.random() < 0.5:
        scaler.unscale_(side.optimizer)
        nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)
    scaler.step(side.optimizer)
    side.is_open = scaler.get_scale() > 2.0**120  # then the step is skipped
    scaler.update(scaler.get_scale() / 2**100 if side.is_open else None)
    return [loss.detach(), scaler.get_scale()]


STEPS: dict[str, Action] = {"step": step, "step twice": step_twice, "skip": skip, "closure": closure, "scaled": scaled}

# --- between two steps ------------------------------------------------------------------------------------------------


def zero(side: Side) -> Any:
    side.optimizer.zero_grad()


def zero_in_place(side: Side) -> Any:
    side.optimizer.zero_grad(set_to_none=False)


def zero_model(side: Side) -> Any:
    side.model.zero_grad()


def evaluate(side: Side) -> Any:
    side.model.eval()
    with side.chance.choice([torch.no_grad, torch.inference_mode])():
        found = side.loss()
    side.model.train()
    return found.clone()


def model_state(side: Side) -> Any:
    return {name: value.clone() for name, value in side.model.state_dict().items()}


def save_and_load(side: Side) -> Any:
    file = io.BytesIO()
    torch.save({"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()}, file)
    file.seek(0)
    found = torch.load(file)
    with torch.no_grad():
        for value in found["model"].values():
            if value.is_floating_point():
                value.mul_(0.99)
    if side.chance.random() < 0.3:
        found["model"] = {name: scattered(value) for name, value in found["model"].items()}
    side.model.load_state_dict(found["model"])
    if side.chance.random() < 0.7:
        side.optimizer.load_state_dict(found["optimizer"])


def load_more_state(side: Side) -> Any:
    """Load state of all parameters of the groups, also of those that are frozen or had no gradient, as of an earlier run."""
    found = copy.deepcopy(side.optimizer.state_dict())
    parameters = [parameter for group in side.optimizer.param_groups for parameter in group["params"]]
    if not found["state"]:
        return
    number, known = next(iter(found["state"].items()))
    shape = parameters[number].shape
    if {"variance", "row_var"} & known.keys():  # Adafactor's, which are others for matrices
        return
    for other, parameter in enumerate(parameters):
        found["state"].setdefault(
            other,
            {
                key: made_like(value, parameter) if value.shape == shape else value.clone()
                for key, value in known.items()
            },
        )
    side.optimizer.load_state_dict(found)


def made_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return state of a parameter in place of another's, of numbers that it may have."""
    if not parameter.dim():
        return value.reshape(-1)[0].clone()
    made = torch.full(parameter.shape, 1e-3, dtype=parameter.dtype)
    if isinstance(parameter, DTensor):
        return distribute_tensor(made, parameter.device_mesh, parameter.placements)
    return made


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same elements, not one after the other in memory."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def average(side: Side) -> Any:
    """A moving average, by a copy of the model."""
    ours = list(side.model.parameters())
    if "average" not in side.kept:
        side.kept["average"] = [p.clone() for p in copy.deepcopy(side.model).parameters()]
    with torch.no_grad():
        for theirs, parameter in zip(side.kept["average"], ours, strict=True):
            theirs.lerp_(parameter.to(theirs.dtype), 0.1)
    return [each.detach().clone() for each in side.kept["average"]]


def average_by_torch(side: Side) -> Any:
    averaged = side.kept.setdefault("swa", torch.optim.swa_utils.AveragedModel(side.model))
    averaged.update_parameters(side.model)
    return [parameter.detach().clone() for parameter in averaged.parameters()]


def read(side: Side) -> Any:
    parameter = side.one.detach()
    return [
        parameter.float().norm(),
        parameter.sum(),
        nn.utils.parameters_to_vector(side.model.parameters()).float().sum(),
    ]


WRITES: list[Callable[[nn.Parameter], Any]] = [
    lambda p: p.mul_(0.9),
    lambda p: p.copy_(torch.randn_like(p) * 0.1),
    lambda p: p.data.clamp_(-0.1, 0.1),
    lambda p: setattr(p, "data", torch.randn(p.shape, dtype=p.dtype) * 0.1),
    lambda p: nn.init.normal_(p, std=0.1),
    lambda p: p[:1].zero_() if p.dim() else p.zero_(),
]


def write(side: Side) -> Any:
    with torch.no_grad():
        side.chance.choice(WRITES)(side.one)


def initialise(side: Side) -> Any:
    def reset(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()

    side.model.apply(reset)


def swap_average(side: Side) -> Any:
    """Evaluate with other values, and put the own ones back."""
    kept = {name: parameter.detach().clone() for name, parameter in side.model.named_parameters()}
    for parameter in side.model.parameters():
        parameter.data.copy_(parameter.data * 0.9)
    found = evaluate(side)
    for name, parameter in side.model.named_parameters():
        parameter.data.copy_(kept[name])
    return found


def gather_and_write(side: Side) -> Any:
    parameter = side.one
    with side.swapped(lambda: side.manager.gather(parameter, write=True)), torch.no_grad():
        parameter.add_(torch.randn_like(parameter) * 0.01)


def from_vector(side: Side) -> Any:
    parameters = list(side.model.head.parameters())
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters).detach() * 0.9, parameters)


def freeze(side: Side) -> Any:
    parameter = side.one
    parameter.requires_grad_(not parameter.requires_grad or len(side.trained) < 4)


def add_group(side: Side) -> Any:
    """Train what is not trained yet."""
    grouped = {id(p) for group in side.optimizer.param_groups for p in group["params"]}
    added = [p for p in side.model.parameters() if not p.requires_grad and id(p) not in grouped]
    if added:
        for parameter in added:
            parameter.requires_grad_()
        side.optimizer.add_param_group({"params": added, "lr": 2e-3})


def other_rate(side: Side) -> Any:
    side.kept["was open"] = side.is_open
    for group in side.optimizer.param_groups:
        group["lr"] *= 0.5


def other_decay(side: Side) -> Any:
    side.kept["was open"] = side.is_open
    group = side.chance.choice(side.optimizer.param_groups)
    if "weight_decay" in group:
        group["weight_decay"] = 0.05


def schedule(side: Side) -> Any:
    side.kept["was open"] = side.is_open
    schedulers = torch.optim.lr_scheduler
    if "scheduler" not in side.kept:
        kinds = (
            partial(schedulers.StepLR, step_size=1, gamma=0.5),
            partial(schedulers.CosineAnnealingLR, T_max=5),
            partial(schedulers.LinearLR, start_factor=0.5, total_iters=3),
        )
        side.kept["scheduler"] = side.chance.choice(kinds)(side.optimizer)
    side.kept["scheduler"].step()
    return side.kept["scheduler"].get_last_lr()


def snapshot(side: Side) -> Any:
    """The file of a snapshot, and an export of it, have what plain torch's state dicts have."""
    number, to = side.chance.random(), side.chance.choice(FORMATS)
    if side.manager is None:
        model, optimizers = side.model.state_dict(), side.optimizer.state_dict()
        exported = model
    else:
        path, target = (side.directory / f"{kind}-{number}" for kind in ("snapshot", "exported"))
        side.manager.snapshot(path).wait()
        swapper.checkpoint.export(path, target, to)
        found, exported = swapper.checkpoint.load(path), content_of(target)
        model, optimizers = found["model"], found["optimizer"]
    states = []
    for each in optimizers if isinstance(optimizers, list) else [optimizers]:
        has = {n: state for n, state in each["state"].items() if any(value.any() for value in state.values())}
        states.append([each["param_groups"], sorted(has.items())])
    return copy.deepcopy([dict(model), sorted(exported.items()), states])


def optimizer_state(side: Side) -> Any:
    """Read and change it."""
    parameter = side.one_trained
    for value in side.optimizer.state[parameter].values() if parameter in side.optimizer.state else ():
        if isinstance(value, torch.Tensor) and value.dim():
            value.mul_(0.5)


def resume(side: Side, chance: Random | None = None) -> Any:
    """Close, and go on as another process. A commit has the buffers and settings of its step: where they may have changed since the
    next forward began, do not."""
    if side.is_open and (side.kept.get("was open") or any(True for _ in side.model.buffers())):
        return
    side.model.zero_grad()
    side.kept.pop("scheduler", None)
    side.rebuild(chance)
    side.is_open = True  # settings that change before the next step are in that step's commit


def resume_otherwise(side: Side) -> Any:
    """As `resume`, with other options."""
    resume(side, side.chance)


def park(side: Side) -> Any:
    side.model.zero_grad()
    with side.swapped(lambda: side.manager.parked()):
        pass


BETWEEN: dict[str, Action] = {
    "evaluate": evaluate,
    "model state": model_state,
    "save and load": save_and_load,
    "load more state": load_more_state,
    "average": average,
    "average by torch": average_by_torch,
    "read": read,
    "write": write,
    "gather and write": gather_and_write,
    "initialise": initialise,
    "swap average": swap_average,
    "from vector": from_vector,
    "freeze": freeze,
    "add group": add_group,
    "other rate": other_rate,
    "other decay": other_decay,
    "schedule": schedule,
    "snapshot": snapshot,
    "optimizer state": optimizer_state,
    "resume": resume,
    "resume otherwise": resume_otherwise,
    "park": park,
    "zero in place": zero_in_place,
    "zero model": zero_model,
    "zero": zero,
}

ACTIONS: dict[str, Action] = {**PASSES, **BEFORE_STEP, **STEPS, **BETWEEN}

FORBIDDEN: dict[str, set[str]] = {
    "masters": {  # what PlainMasters has no equal of
        *(
            "closure",
            "scaled",
            "write",
            "gather and write",
            "from vector",
            "save and load",
            "load more state",
            "schedule",
            "optimizer state",
        ),
        *("freeze", "step twice", "initialise", "swap average", "adversarial", "sharpness"),
    },
    "several": {"closure", "scaled", "schedule", "optimizer state", "add group", "load more state"},
    "backward": {*BEFORE_STEP, "by grad", "scaled", "step twice", "skip", "adversarial", "sharpness"} - {"look"},
    "gradients without data": {
        "look",
        "scale gradients",
        "add noise",
        "assign",
        "by grad",
        "drop some",
        "adversarial",
        "sharpness",
    },
    "device": {"gradient penalty", "together"},
    "reentrant": {"inner step", "by grad", "only some", "gradient penalty", "together", "retained"},  # torch refuses
    "no commits": {"resume", "resume otherwise"},
    "cast": {"save and load", "load more state"},  # 0-dim state, which torch casts to the parameter's dtype
    "empty": {"clip norm", "clip value"},  # which torch refuses of no elements
    "lstm": {"autocast"},
    "max norm": {"together"},
}
"""What does not go with what, as documented."""

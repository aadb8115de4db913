"""One of several ranks under torchrun: every read of a sharded model while a deferred step is open gives what plain torch has.

Usage: fsdp_open_step.py DIRECTORY [LOOK ...]. Each of LOOKS is called on a plain and on a swapped model right after a step, once
with the gradients still there; what it returns must be the same, and so must the training that follows.
"""

from __future__ import annotations

import copy
import io
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate

import swapper
from e2e.fsdp_run import DEVICE, dist_objects, flat, join, loss_of, make, same_state
from e2e.twins import named_budget

Look = Callable[[Any, Any, Path], Any]

NAME = "blocks.2.down.weight"


def of(model: nn.Module) -> Any:
    return dict(model.named_parameters())[NAME]


def tensors(tree: Any) -> Any:
    """Return what of a result is compared: local parts, as they are now."""
    found = flat(tree)
    return {key: getattr(value, "_local_tensor", value) for key, value in found.items()}


def saved(tensor: Any) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def saved_by_dcp(model: Any, optimizer: Any, directory: Path) -> Any:
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=directory)
    back = {"model": {key: torch.zeros_like(value) for key, value in state["model"].items()}}
    dcp.load(back, checkpoint_id=directory)
    return back["model"]


def change(tensor: Any, factor: float = 0.5) -> Any:
    with torch.no_grad():
        return tensor.mul_(factor)


def load_one(model: Any, optimizer: Any, _: Path) -> Any:
    value = of(model).detach() * 2
    return list(model.load_state_dict({NAME: value}, strict=False).unexpected_keys)


def only_first(look: Callable[[], Any]) -> Any:
    """No other rank looks: a collective would never end."""
    return look() if dist.get_rank() == 0 else None


def fail_in_forward(model: Any, optimizer: Any, _: Path) -> str:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("in the middle")

    handle = model.blocks[2].register_forward_hook(fail)
    try:
        loss_of(model, 7)
    except ZeroDivisionError as error:
        return str(error)
    finally:
        handle.remove()
        model.reset_iter_state()
    return ""


def evaluated(mode: Any) -> Look:
    def look(model: Any, optimizer: Any, _: Path) -> Any:
        with mode():
            return loss_of(model, 8)

    return look


def again(model: Any, optimizer: Any, _: Path) -> Any:
    """A second backward of the same loss, with the new weights, before the next forward."""
    model.kept_loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def set_rate(model: Any, optimizer: Any, _: Path) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.1


def replace_gradient(model: Any, optimizer: Any, _: Path) -> Any:
    parameter = of(model)
    parameter.grad = parameter.grad.clone() * 2
    return parameter.grad


def clipped(model: Any, optimizer: Any, _: Path) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor()


def norm_within(mode: Any) -> Look:
    def look(model: Any, optimizer: Any, _: Path) -> Any:
        with mode:
            return of(model).to_local().norm()

    return look


def norm_in_thread(model: Any, optimizer: Any, _: Path) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: of(model).to_local().norm()).result()


LOOKS: dict[str, Look] = {
    "to_local": lambda model, optimizer, _: of(model).to_local(),
    "full_tensor": lambda model, optimizer, _: of(model).full_tensor(),
    "redistributed": lambda model, optimizer, _: of(model).redistribute(placements=[Replicate()]),
    "norm": lambda model, optimizer, _: of(model).norm().full_tensor(),
    "detached": lambda model, optimizer, _: of(model).detach(),
    "data": lambda model, optimizer, _: of(model).data,
    "copied": lambda model, optimizer, _: copy.deepcopy(model.state_dict()),
    "pickled": lambda model, optimizer, _: saved(of(model)),
    "shown": lambda model, optimizer, _: [repr(of(model)), str(of(model)._local_tensor)],
    "norms of all": lambda model, optimizer, _: [x.full_tensor() for x in torch._foreach_norm([*model.parameters()])],
    "norm in inference mode": norm_within(torch.inference_mode()),
    "norm in autocast": norm_within(torch.autocast("cpu", torch.bfloat16)),
    "norm in another thread": norm_in_thread,
    "local part": lambda model, optimizer, _: torch.from_numpy(of(model)._local_tensor.numpy().copy()),
    "by the first rank alone": lambda model, optimizer, _: only_first(lambda: of(model).to_local().sum()),
    "gradient by the first rank alone": lambda model, optimizer, _: only_first(lambda: of(model).grad.to_local().sum()),
    "changed": lambda model, optimizer, _: change(of(model)),
    "changed by to_local": lambda model, optimizer, _: change(of(model).to_local()),
    "changed by data": lambda model, optimizer, _: of(model).data.copy_(of(model).data * 3),
    "state dict": lambda model, optimizer, _: model.state_dict(),
    "state dict pickled": lambda model, optimizer, _: saved(model.state_dict()),
    "whole state dict": lambda model, optimizer, _: get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True)
    ),
    "state dicts": lambda model, optimizer, _: list(get_state_dict(model, optimizer)),
    "dcp": saved_by_dcp,
    "loaded": load_one,
    "converted": lambda model, optimizer, _: type(model.float()).__name__,
    "gradient": lambda model, optimizer, _: of(model).grad.to_local(),
    "whole gradient": lambda model, optimizer, _: of(model).grad.full_tensor(),
    "gradient's norm": lambda model, optimizer, _: of(model).grad.norm().full_tensor(),
    "gradient changed": lambda model, optimizer, _: change(of(model).grad),
    "gradient replaced": replace_gradient,
    "gradient copied": lambda model, optimizer, _: of(model).grad.clone(),
    "clipped": clipped,
    "values clipped": lambda model, optimizer, _: nn.utils.clip_grad_value_(model.parameters(), 1e-4),
    "zeroed": lambda model, optimizer, _: optimizer.zero_grad(set_to_none=False),
    "state": lambda model, optimizer, _: dict(optimizer.state[of(model)]),
    "state of all": lambda model, optimizer, _: optimizer.state_dict()["state"],
    "evaluated": evaluated(torch.no_grad),
    "evaluated in inference mode": evaluated(torch.inference_mode),
    "backward again": again,
    "another rate": set_rate,
    "failed forward": fail_in_forward,
}


def equal(ours: Any, theirs: Any, what: str) -> None:
    ours, theirs = tensors(ours), tensors(theirs)
    assert ours.keys() == theirs.keys(), what
    for key, value in theirs.items():
        is_same = torch.equal(ours[key], value) if isinstance(value, torch.Tensor) else ours[key] == value
        assert is_same, f"{what}: {key}: {ours[key]} for {value}"


def step(model: Any, optimizer: Any, number: int, keeps_graph: bool = False) -> torch.Tensor:
    loss = loss_of(model, number)
    loss.backward(retain_graph=keeps_graph)
    model.kept_loss = loss if keeps_graph else None
    optimizer.step()
    return loss.detach()


def run(directory: Path, names: list[str]) -> None:
    plain, plain_optimizer = make({}, is_plain=True)
    swapped, optimizer = make({})
    placement = {"params": "nvme", "optimizer_state": "nvme", "update": "deferred"}
    with swapper.SwapManager(directory / "run", host_memory=1) as manager:
        try:
            manager.plan(swapped, optimizer, **placement)
        except swapper.BudgetError as error:
            budget = max(dist_objects(named_budget(error)))
    number = 0  # of steps
    both = [(plain, plain_optimizer)]
    with swapper.SwapManager(directory / "run", host_memory=budget, resume="discard") as manager:
        _, optimizer = manager.offload(swapped, optimizer, **placement)
        both.append((swapped, optimizer))
        for name in names:
            for has_gradients in (True, False) if "gradient" not in name and "clipped" not in name else (True,):
                number += 1
                losses = [step(*one, number, keeps_graph=name == "backward again") for one in both]
                equal(losses[1], losses[0], f"{name}: loss")
                if not has_gradients:
                    for _, used in both:
                        used.zero_grad()
                assert manager.current.run.model.update_is_open, name
                seen = [LOOKS[name](*one, directory / f"{number}-{index}") for index, one in enumerate(both)]
                equal(seen[1], seen[0], name)
                del seen
                for model, used in both:
                    if has_gradients and number % 2:
                        used.zero_grad()
                    model.kept_loss = None
        finish(manager, both, number)
    resumed(directory, budget, placement, plain, plain_optimizer, number)
    os.write(1, f"rank {dist.get_rank()}: same\n".encode())


def finish(manager: Any, both: list[Any], number: int) -> None:
    """What swapper's own verbs see, and a tensor that has shown a shard all along, while which no step may be open."""
    (plain, plain_optimizer), (swapped, optimizer) = both
    for look in (
        lambda: same_state(swapped, optimizer, plain, plain_optimizer, "states"),
        lambda: manager.snapshot(manager.current.directory.path.parent / "snapshot").result(),
        lambda: equal(manager.clip_grad_norm_(0.5).full_tensor(), clipped_by(plain, 0.5), "manager's clipping"),
    ):
        number += 1
        for one in both:
            step(*one, number)
        assert manager.current.run.model.update_is_open
        look()
        assert not manager.current.run.model.update_is_open
        for _, used in both:
            used.zero_grad()
    aliases = [of(model).to_local() for model, _ in both]
    for one in both:
        step(*one, number + 1)
    assert not manager.current.run.model.update_is_open
    equal(aliases[1], aliases[0], "an alias")
    del aliases
    for one in both:
        one[1].zero_grad()
        step(*one, number + 2)
    assert manager.current.run.model.update_is_open


def clipped_by(model: Any, norm: float) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), norm).full_tensor()


def resumed(directory: Path, budget: int, placement: Any, plain: Any, plain_optimizer: Any, number: int) -> None:
    """The manager was closed while a step was open: that one is done, and another model resumes after it."""
    model, optimizer = make({})
    plain_optimizer.zero_grad()
    with swapper.SwapManager(directory / "run", host_memory=budget, resume="auto") as manager:
        _, optimizer = manager.offload(model, optimizer, **placement)
        equal(step(model, optimizer, number), step(plain, plain_optimizer, number), "resumed")
        same_state(model, optimizer, plain, plain_optimizer, "resumed")


if __name__ == "__main__":
    join()
    if DEVICE == "cuda":
        del LOOKS["whole state dict"]  # gloo's all-gather of several tensors does not wait for copies to a device
    if not hasattr(FSDPModule, "reset_iter_state"):
        del LOOKS["failed forward"]
    run(Path(sys.argv[1]), sys.argv[2:] or list(LOOKS))
    dist.destroy_process_group()

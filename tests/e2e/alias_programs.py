"""Programs that keep an alias of a parameter or a gradient, or give a parameter other memory: a matrix, and random ones.

Each program trains a model for a few steps and returns what plain torch shows. `run` is given a model and its optimizer, and
`gather` is the manager's, or does nothing. Each runs on plain torch and on the swapped model.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import devices
import torch
from torch import nn

import swapper
from e2e.twins import Twins, assert_same
from swapper.runtime.process import rng_states, set_rng_states

WIDTH = 160  # a layer's weight is larger than what stays in memory


class Scale(nn.Module):
    """Has a group of its own, which stays in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH) * 0.1 + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def make_model(depth: int = 3) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), Scale())))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(4, WIDTH)).square().mean()


def backward(model: nn.Module) -> torch.Tensor:
    loss = loss_of(model)
    loss.backward()
    return loss.detach()


@dataclass
class Run:
    """One of the twins.

    Attributes:
        gather: `manager.gather`, or a context that does nothing.
        at: number of the layer of whose parameter there is an alias.
        name: of that parameter in it.
        alias: makes one.
    """

    model: nn.Sequential
    optimizer: Any
    gather: Callable[..., Any]
    at: int
    name: str
    alias: Callable[[torch.Tensor], Any]

    @property
    def parameter(self) -> nn.Parameter:
        return self.model[self.at].get_parameter(self.name)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = backward(self.model)
        self.optimizer.step()
        return loss


SIZES = {"large": (2, "weight"), "small": (3, "scale")}

ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "detach": lambda tensor: tensor.detach(),
    "data": lambda tensor: tensor.data,
    "view": lambda tensor: tensor.data.view(-1),
    "row": lambda tensor: tensor.data[0],
    "numpy": lambda tensor: tensor.detach().numpy(),
    "data.numpy": lambda tensor: tensor.data.numpy(),
}


def may_alias(name: str) -> bool:
    """Return False of arrays on a device: its memory has none."""
    return not (devices.NAME and "numpy" in name)


def shown(alias: Any) -> torch.Tensor:
    """Return what an alias shows now."""
    if not isinstance(alias, torch.Tensor):
        alias = torch.as_tensor(alias)
    return alias.detach().clone()


@torch.no_grad()
def halve(alias: Any) -> None:
    alias *= 0.5


@contextmanager
def removing(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


# --- aliases of gradients -------------------------------------------------------------------------------------------------


def gradient_over_zero_grad(run: Run) -> list[torch.Tensor]:
    backward(run.model)
    kept = run.alias(run.parameter.grad)
    first = shown(kept)
    run.optimizer.zero_grad()
    backward(run.model)
    return [first, shown(kept), shown(run.parameter.grad), run.step(), shown(kept)]


def gradient_over_steps(run: Run) -> list[torch.Tensor]:
    found, kept = [], []
    for _ in range(3):
        run.optimizer.zero_grad()
        found.append(backward(run.model))
        kept.append(run.alias(run.parameter.grad))
        run.optimizer.step()
        found += map(shown, kept)
    return found


def gradient_changed_before_the_step(run: Run) -> list[torch.Tensor]:
    backward(run.model)
    halve(run.alias(run.parameter.grad))
    run.optimizer.step()
    return [run.step()]


def gradient_changed_by_a_kept_alias(run: Run) -> list[torch.Tensor]:
    kept: list[Any] = []
    handle = run.parameter.register_post_accumulate_grad_hook(lambda p: kept.append(run.alias(p.grad)))
    with removing(handle):
        backward(run.model)
    halve(kept[0])
    run.optimizer.step()
    return [run.step()]


def gradient_changed_after_the_step(run: Run) -> list[torch.Tensor]:
    backward(run.model)
    kept = run.alias(run.parameter.grad)
    run.optimizer.step()
    halve(kept)
    return [shown(kept), run.step(), shown(kept), run.step()]


def gradients_added_together(run: Run) -> list[torch.Tensor]:
    backward(run.model)
    kept = run.alias(run.parameter.grad)
    backward(run.model)
    return [shown(kept), run.step(), shown(kept)]


def projected_gradients(run: Run) -> list[torch.Tensor]:
    """As PCGrad does."""
    kept = []
    for _ in range(2):
        run.optimizer.zero_grad()
        backward(run.model)
        kept.append([run.alias(p.grad) for p in run.model.parameters()])
    products = [(shown(one) * shown(other)).sum() for one, other in zip(*kept, strict=True)]
    for parameter, product, one in zip(run.model.parameters(), products, kept[0], strict=True):
        if shown(one).shape == parameter.shape:
            parameter.grad = parameter.grad + product * shown(one)
    run.optimizer.step()
    return [*products, run.step()]


def gradients_in_a_flat_buffer(run: Run) -> list[torch.Tensor]:
    parameters = list(run.model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    found, at = [], 0
    for parameter in parameters:
        parameter.grad = flat[at : at + parameter.numel()].view(parameter.shape).data
        at += parameter.numel()
    for _ in range(3):
        found.append(backward(run.model))
        flat *= 0.5  # all-reduce
        run.optimizer.step()
        found.append(flat.clone())
        flat.zero_()
    return found


GRADIENTS = [
    gradient_over_zero_grad,
    gradient_over_steps,
    gradient_changed_before_the_step,
    gradient_changed_by_a_kept_alias,
    gradient_changed_after_the_step,
    gradients_added_together,
    projected_gradients,
]


# --- aliases of parameters ------------------------------------------------------------------------------------------------


def parameter_read_after_steps(run: Run) -> list[torch.Tensor]:
    run.step()
    kept = run.alias(run.parameter)
    found = [shown(kept)]
    for _ in range(2):
        found += [run.step(), shown(kept)]
    return found


def parameter_read_before_the_step(run: Run) -> list[torch.Tensor]:
    kept = run.alias(run.parameter)
    backward(run.model)
    found = [shown(kept)]
    run.optimizer.step()
    return [*found, shown(kept), run.step()]


def parameter_changed_after_steps(run: Run) -> list[torch.Tensor]:
    kept = run.alias(run.parameter)
    found = []
    for _ in range(3):
        found.append(run.step())
        halve(kept)
        found.append(shown(run.parameter))
    return found


def parameter_changed_before_the_step(run: Run) -> list[torch.Tensor]:
    kept = run.alias(run.parameter)
    found = []
    for _ in range(2):
        run.optimizer.zero_grad()
        found.append(backward(run.model))
        halve(kept)
        run.optimizer.step()
    return [*found, shown(kept)]


def parameter_taken_in_a_forward(run: Run) -> list[torch.Tensor]:
    kept: list[Any] = []
    handle = run.model[run.at].register_forward_pre_hook(lambda *_: kept.append(run.alias(run.parameter)))
    with removing(handle):
        found = [backward(run.model), shown(kept[0])]
        run.optimizer.step()
    found += [shown(kept[0]), run.step(), shown(kept[0])]
    halve(kept[0])
    return [*found, run.step(), shown(kept[0]), run.step()]


PARAMETERS = [
    parameter_read_after_steps,
    parameter_read_before_the_step,
    parameter_changed_after_steps,
    parameter_changed_before_the_step,
    parameter_taken_in_a_forward,
]


# --- parameters that are given other memory ----------------------------------------------------------------------------------


def clamped_after_each_step(run: Run) -> list[torch.Tensor]:
    found = []
    for _ in range(3):
        found.append(run.step())
        run.parameter.data = torch.clamp(run.parameter.data, -0.05, 1.0)
    return [*found, shown(run.parameter)]


def clamped_in_a_gather(run: Run) -> list[torch.Tensor]:
    found = []
    for _ in range(3):
        found.append(run.step())
        with run.gather(run.model, write=True):
            run.parameter.data = torch.clamp(run.parameter.data, -0.05, 1.0)
    return [*found, shown(run.parameter)]


def clamped_in_each_forward(run: Run) -> list[torch.Tensor]:
    def clamp(*_: Any) -> None:
        run.parameter.data = torch.clamp(run.parameter.data, -0.05, 1.0)

    handle = run.model[run.at].register_forward_pre_hook(clamp)
    with removing(handle):
        found = [run.step() for _ in range(3)]
    return [*found, shown(run.parameter), run.step()]


def assigned_before_the_step(run: Run) -> list[torch.Tensor]:
    backward(run.model)
    run.parameter.data = run.parameter.data * 0.5
    run.optimizer.step()
    return [shown(run.parameter), run.step()]


def averages_swapped_in(run: Run, gathers: bool = False) -> list[torch.Tensor]:
    """As a loop with exponential averages does, with copies."""
    averages = [p.data.clone() for p in run.model.parameters()]
    found = []
    for _ in range(2):
        found.append(run.step())
        for average, parameter in zip(averages, run.model.parameters(), strict=True):
            average.mul_(0.9).add_(parameter.data, alpha=0.1)
        backup = [p.data.clone() for p in run.model.parameters()]
        for values in (averages, backup):
            with run.gather(run.model if gathers else [], write=True):
                for value, parameter in zip(values, run.model.parameters(), strict=True):
                    parameter.data = value
            with torch.no_grad():
                found.append(loss_of(run.model))
    return found


def averages_swapped_in_a_gather(run: Run) -> list[torch.Tensor]:
    return averages_swapped_in(run, gathers=True)


def averages_swapped_in_with_aliases(run: Run) -> list[torch.Tensor]:
    """As many tutorials do."""
    averages = [p.data.clone() * 0.9 for p in run.model.parameters()]
    found = [run.step()]
    backup = [p.data for p in run.model.parameters()]
    for values in (averages, backup):
        for value, parameter in zip(values, run.model.parameters(), strict=True):
            parameter.data = value
        with torch.no_grad():
            found.append(loss_of(run.model))
    return [*found, run.step()]


def from_a_vector(run: Run, gathers: bool = False) -> list[torch.Tensor]:
    found = [run.step()]
    with run.gather(run.model if gathers else [], write=True):
        vector = nn.utils.parameters_to_vector(run.model.parameters()).detach() * 0.9
        nn.utils.vector_to_parameters(vector, run.model.parameters())
    return [*found, run.step(), run.step()]


def from_a_vector_in_a_gather(run: Run) -> list[torch.Tensor]:
    return from_a_vector(run, gathers=True)


def set_to_another(run: Run) -> list[torch.Tensor]:
    run.step()
    with torch.no_grad():
        run.parameter.set_(shown(run.parameter) * 0.5)
    return [run.step(), run.step()]


def set_in_a_gather(run: Run) -> list[torch.Tensor]:
    run.step()
    with torch.no_grad(), run.gather(run.parameter, write=True):
        run.parameter.set_(shown(run.parameter) * 0.5)
    return [run.step(), run.step()]


def swapped_with_another(run: Run) -> list[torch.Tensor]:
    run.step()
    with run.gather(run.parameter, write=True):
        torch.utils.swap_tensors(run.parameter, nn.Parameter(shown(run.parameter) * 0.5))
    return [run.step(), run.step()]


def copied_to(run: Run) -> list[torch.Tensor]:
    run.step()
    run.parameter.data.copy_(shown(run.parameter) * 0.5)
    return [run.step(), run.step()]


def anothers_memory(run: Run) -> list[torch.Tensor]:
    run.step()
    run.parameter.data = run.model[run.at - 2].get_parameter(run.name).data
    return [run.step(), run.step(), shown(run.parameter)]


def another_shape(run: Run) -> list[torch.Tensor]:
    run.parameter.data = shown(run.parameter)[:-1]
    return [run.step()]


def another_dtype(run: Run) -> list[torch.Tensor]:
    run.parameter.data = shown(run.parameter).double()
    return [run.step()]


OTHER_MEMORY = [
    clamped_after_each_step,
    clamped_in_a_gather,
    clamped_in_each_forward,
    assigned_before_the_step,
    averages_swapped_in,
    averages_swapped_in_a_gather,
    averages_swapped_in_with_aliases,
    from_a_vector,
    from_a_vector_in_a_gather,
    set_to_another,
    set_in_a_gather,
    swapped_with_another,
    copied_to,
    anothers_memory,
    another_shape,
    another_dtype,
    gradients_in_a_flat_buffer,
]


# --- running them -----------------------------------------------------------------------------------------------------------

REFUSED = {averages_swapped_in_with_aliases, swapped_with_another, anothers_memory, another_shape, another_dtype}
BETWEEN_BACKWARDS_AND_STEP = {  # refused with updates in backward
    gradient_over_zero_grad,
    gradients_added_together,
    projected_gradients,
    gradient_changed_before_the_step,
    gradient_changed_by_a_kept_alias,
    gradient_changed_after_the_step,  # arrays are read-only
    parameter_read_before_the_step,
    parameter_changed_before_the_step,
    assigned_before_the_step,
}


def may_refuse(program: Any, alias: str, update: str, gradients: str, size: str) -> bool:
    """Return True if a program need not be followed. All others must be."""
    if program in REFUSED or (update == "backward" and program in BETWEEN_BACKWARDS_AND_STEP):
        return True
    if program in GRADIENTS and devices.NAME:
        return True  # a gradient that has left a device has no data
    if program in GRADIENTS:
        return gradients == "nvme" and (size == "large" or program is projected_gradients)
    is_copy = alias in ("detach", "numpy", "data.numpy")
    return program in PARAMETERS and is_away(size) and is_copy and program is not parameter_taken_in_a_forward


def is_away(size: str) -> bool:
    """Return True if a parameter of this size is away after a forward."""
    return size == "large" or bool(devices.NAME)


def is_of_a_copy(program: Any, alias: str, size: str) -> bool:
    """Return True if what is kept of a parameter that is away is a read-only copy: an array, or a small one's `detach()`."""
    of_parameters = program in PARAMETERS and program is not parameter_taken_in_a_forward
    return (
        of_parameters and is_away(size) and (alias in ("numpy", "data.numpy") or (alias, size) == ("detach", "small"))
    )


@contextmanager
def no_gather(*_: Any, **__: Any) -> Iterator[None]:
    yield


def check(pair: Twins, program: Any, alias: str, size: str, may_be_refused: bool) -> bool:
    """Run a program on both. Return False if it is refused by name; else both have the same results and state."""
    at, name = SIZES[size]
    states = rng_states()
    outcomes: list[Any] = []
    for model, optimizer in ((pair.plain, pair.plain_optimizer), (pair.swapped, pair.optimizer)):
        assert pair.manager is not None
        gather = pair.manager.gather if model is pair.swapped else no_gather
        set_rng_states(states)
        try:
            outcomes.append(program(Run(model, optimizer, gather, at, name, ALIASES[alias])))
        except (RuntimeError, swapper.SwapperError, ValueError) as error:
            outcomes.append(error)
    expected, actual = outcomes
    if isinstance(actual, Exception):
        is_torchs_own = "Cannot swap" in str(actual) or "read-only" in str(actual)
        assert may_be_refused and (isinstance(actual, swapper.SwapperError) or is_torchs_own), actual
        with suppress(swapper.StateError):  # parameters that have another form cannot be written
            pair.close()
        return False
    if is_of_a_copy(program, alias, size):
        return True
    assert_same(actual, expected)
    pair.assert_same_parameters()
    pair.assert_same_state()
    pair.check_pager()
    return True


def run_random(directory: Path, seed: int) -> str:
    """Run up to four random programs one after another on one pair. Returns what was run."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    update, gradients = chance.choice(["step", "deferred", "backward"]), chance.choice(["host", "host", "nvme"])
    params = chance.choice(["nvme", "nvme", "host"])
    depth = chance.randint(2, 5)
    options = {"update": update, "params": params, **({"gradients": gradients} if params == "nvme" else {})}
    pair = Twins(directory, make_model(depth), room_bytes=chance.choice([1 << 18, 1 << 19, 1 << 21]), **options)
    done = []
    try:
        for _ in range(4):
            program = chance.choice([*GRADIENTS, *PARAMETERS, *OTHER_MEMORY])
            alias, size = chance.choice([name for name in ALIASES if may_alias(name)]), chance.choice(list(SIZES))
            if program not in GRADIENTS and alias == "itself":
                alias = "data"
            done.append(f"{program.__name__}({alias}, {size})")
            may_be_refused = may_refuse(program, alias, update, gradients, size)
            if not check(pair, program, alias, size, may_be_refused):
                break
            pair.both(lambda _, optimizer: optimizer.zero_grad())
    except BaseException:
        print(f"seed {seed}: depth {depth}, {options}: {', '.join(done)}", flush=True)
        raise
    finally:
        with suppress(swapper.StateError):
            pair.close()
    return f"{options}: {', '.join(done)}"


def main() -> None:
    count, first = (int(argument) for argument in sys.argv[1:3])
    logging.disable(logging.WARNING)
    failed = []
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as directory:
            try:
                run_random(Path(directory), seed)
            except Exception as error:  # each is told, and the next one is run
                failed.append(seed)
                print(f"  {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{count} cases from seed {first}: {len(failed)} failed {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

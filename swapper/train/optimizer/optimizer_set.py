"""Presents the optimizers of one session as one: their groups in a row, each with its own optimizer.

A session has one set: of one optimizer, or of several that update different parameters of one model (Muon for matrices
and AdamW for the rest, a GAN's two). Everything that asks for a group of "the optimizer" by number means the set's.
docs/decisions/several-optimizers.md has the reasons. What the user gives may hold them: a list, a container, accelerate's
wrapper (`accelerator.prepare` puts an AcceleratedOptimizer around an optimizer, as DDP around a model).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from swapper.errors import ConfigError


class HoldsOptimizers(Protocol):
    """Holds several optimizers, as torchtitan's OptimizersContainer."""

    optimizers: list[Any]


class OptimizerSet:
    """The user's optimizers, as the same objects, in the order of `offload`.

    Args:
        members: at least one. Their groups may be edited at any time.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = tuple(members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all members in order: the members' own dictionaries, in a new list."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def ranges(self) -> list[range]:
        """The numbers of each member's groups."""
        found: list[range] = []
        for member in self.members:
            first = found[-1].stop if found else 0
            found.append(range(first, first + len(member.param_groups)))
        return found

    def locate(self, number: int) -> tuple[int, int]:
        """Return the member that has group `number`, and the group's number there."""
        return next((m, number - of.start) for m, of in enumerate(self.ranges) if number in of)

    def numbers(self, member: int) -> range:
        """Return the numbers of a member's parameters, as the set's packed groups count them."""
        counts = [sum(len(group["params"]) for group in one.param_groups) for one in self.members]
        first = sum(counts[:member])
        return range(first, first + counts[member])

    def state_of(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Return the state that a member keeps for `parameter`; empty if none does."""
        return next((one.state[parameter] for one in self.members if parameter in one.state), {})

    def drop_state(self, parameter: torch.Tensor) -> None:
        """Have all members forget the state of `parameter`."""
        for member in self.members:
            member.state.pop(parameter, None)

    @property
    def kind(self) -> str:
        """The class, for a commit; of several with the number of groups of each, which a resumed run must repeat."""
        if len(self.members) == 1:
            return kind_of(self.members[0])
        return " and ".join(f"{kind_of(one)} with {len(one.param_groups)} groups" for one in self.members)

    @property
    def name(self) -> str:
        """The class, for people."""
        return " and ".join(type(member).__name__ for member in self.members)

    def describe_member(self, member: int) -> str:
        """Return a member for people: "the optimizer", or "optimizers[1] (AdamW)"."""
        if len(self.members) == 1:
            return "the optimizer"
        return f"optimizers[{member}] ({type(self.members[member]).__name__})"

    def describe(self, number: int) -> str:
        """Return a group for people: "group 0 of the optimizer"."""
        member, local = self.locate(number)
        return f"group {local} of {self.describe_member(member)}"


def kind_of(optimizer: Optimizer) -> str:
    """Return the optimizer's qualified class name."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


MODES = ("train", "eval")


def has_modes(optimizer: Optimizer) -> bool:
    """Return True for an optimizer with `train()` and `eval()`, which replace parameters by their average and back.

    Schedule-free ones have them, https://arxiv.org/abs/2405.15682.
    """
    return all(callable(getattr(type(optimizer), name, None)) for name in MODES)


def members_of_given(given: Any) -> list[Any]:
    """Return the optimizers in what the user gives `offload`: one, a list, or an object with a list `optimizers`.

    Raises:
        ConfigError: there is none, or one appears twice.
    """
    if isinstance(given, list | tuple):
        members = list(given)
    elif is_container(given):
        members = list(given.optimizers)
    else:
        return [given]
    if not members:
        raise ConfigError("offload was given no optimizer in its list: pass None to train nothing")
    if len({id(member) for member in members}) < len(members):
        raise ConfigError("offload was given the same optimizer twice in its list: give each once")
    return members


def is_container(given: Any) -> bool:
    """Return True for an object that holds optimizers, as torchtitan's OptimizersContainer."""
    held = vars(given).get("optimizers") if hasattr(given, "__dict__") else None
    return isinstance(held, list | tuple) and all(isinstance(member, Optimizer) for member in held)


def give_back(given: Any, paged: Sequence[Optimizer]) -> Any:
    """Return `paged` in the form of what the user gave; a container is given back, with them for its members."""
    if isinstance(given, list | tuple):
        return list(paged)
    if is_container(given):
        given.optimizers = list(paged)
        return given
    return paged[0]


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that accelerate's wrapper steps; anything else as it is."""
    return optimizer.optimizer if _is_accelerated(optimizer) else optimizer


def wrapped_as(optimizer: Any, paged: Any) -> Any:
    """Return accelerate's wrapper `optimizer`, which steps `paged` from now on; `paged` if there is no wrapper."""
    if not _is_accelerated(optimizer):
        return paged
    optimizer.__setstate__({"optimizer": paged})  # that of a GradScaler's `step` follows
    return optimizer


def _is_accelerated(optimizer: Any) -> bool:
    kind = type(optimizer)
    return kind.__module__ == "accelerate.optimizer" and kind.__qualname__ == "AcceleratedOptimizer"

"""Presents the optimizers of one session as one: their groups in a row, each with its own optimizer.

A session has one set: of one optimizer, or of several that update different parameters of one model (Muon for matrices
and AdamW for the rest, a GAN's two). Everything that asks for a group of "the optimizer" by number means the set's.
docs/decisions/several-optimizers.md has the reasons. What the user gives may hold them: a list, a container, accelerate's
wrapper (`accelerator.prepare` puts an AcceleratedOptimizer around an optimizer, as DDP around a model).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import LBFGS, SGD, Adafactor, Optimizer, SparseAdam

from swapper.errors import ConfigError, UnsupportedError
from swapper.train.optimizer.entries import flat
from swapper.train.optimizer.own_code import is_known, is_of_torch, replaced_methods


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
        """Return the state that a member keeps for `parameter`, flat; empty if none does."""
        return flat(next((one.state[parameter] for one in self.members if parameter in one.state), {}))

    def keep_state(self, parameter: torch.Tensor, state: Mapping[str, object]) -> None:
        """Have the member that has `parameter` in its groups keep its state."""
        pairs = ((p, one) for one in self.members for group in one.param_groups for p in group["params"])
        next(one for p, one in pairs if p is parameter).state[parameter] = dict(state)

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
    """Return the optimizer's qualified class name; of a class of torch's of which somebody has replaced a method with a note."""
    is_changed = is_of_torch(type(optimizer)) and not is_known(optimizer)
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" + (" (changed)" if is_changed else "")


TRIAL_LR = 1e-2
"""Replaces a learning rate of zero, as at the start of a warm-up, which would show nothing."""


def copy_for_trial(optimizer: Optimizer) -> Optimizer:
    """Return a copy of the optimizer without parameters and state, with a nonzero learning rate."""
    clone: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        with contextlib.suppress(Exception):  # attributes that cannot be copied are shared
            value = value if name in ("state", "param_groups", "step") else copy.deepcopy(value)
        clone.__dict__[name] = value
    clone.param_groups = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"} | {"params": []}
        for group in optimizer.param_groups
    ]
    for group in clone.param_groups:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor) and not rate.any():
            group["lr"] = torch.full_like(rate, TRIAL_LR)
        elif isinstance(rate, int | float) and rate == 0:
            group["lr"] = TRIAL_LR
    return clone


MODES = ("train", "eval")


def has_modes(optimizer: Optimizer) -> bool:
    """Return True for an optimizer with `train()` and `eval()`, which replace parameters by their average and back.

    Schedule-free ones have them, https://arxiv.org/abs/2405.15682.
    """
    return all(callable(getattr(type(optimizer), name, None)) for name in MODES)


def is_own_method(cls: type, name: str) -> bool:
    """Return True for a method that a class adds to torch's optimizers: Sophia's `update_hessian`, MODES."""
    if name.startswith("_") or hasattr(Optimizer, name) or not callable(getattr(cls, name, None)):
        return False
    return not any(name in vars(one) for one in cls.__mro__ if is_of_torch(one))


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


def is_container(given: object) -> bool:
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


def _is_accelerated(optimizer: object) -> bool:
    kind = type(optimizer)
    return kind.__module__ == "accelerate.optimizer" and kind.__qualname__ == "AcceleratedOptimizer"


# --- what is refused without a trial ------------------------------------------------------------------------------------

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes in which torch's kernels differ from each other."""


def check_supported(optimizer: Optimizer) -> None:
    """Raise UnsupportedError unless a trial of `optimizer` (optimizer_trial.py) can tell everything that matters."""
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedError(f"offload takes a torch.optim.Optimizer; {type(optimizer).__name__} is not supported")
    kind = kind_of(optimizer)
    if isinstance(optimizer, LBFGS):
        raise UnsupportedError(
            f"{kind} cannot be paged: it keeps a history of flat vectors over all parameters and runs the closure several times "
            "within a step. Use an optimizer that updates each parameter from its own gradient"
        )
    if isinstance(optimizer, SparseAdam):
        raise UnsupportedError(
            f"{kind} cannot be paged: it takes sparse gradients, which have no fixed place. "
            "Build embeddings with sparse=False, and use Adam"
        )
    for group in optimizer.param_groups:
        for option in ("capturable", "differentiable"):
            if group.get(option):
                raise UnsupportedError(
                    f"{type(optimizer).__name__}({option}=True) cannot be paged: build it with {option}=False"
                )
    for name in replaced_methods(optimizer):
        raise UnsupportedError(
            f"{kind} cannot be paged: its method {name!r} was replaced on the instance (optimizer.{name} = ...), which swapper's "
            "calls would not follow: define it in a subclass, and build that"
        )
    _check_attributes(kind, optimizer)


def check_masters(optimizer: Optimizer) -> None:
    """Raise UnsupportedError for an optimizer that cannot update fp32 masters in the place of parameters."""
    if has_modes(optimizer):
        raise UnsupportedError(
            f"{kind_of(optimizer)} changes parameters in its train() and eval(), which fp32 masters would not follow: leave out "
            "master_weights, and train in fp32"
        )


def check_settings(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> None:
    """Raise UnsupportedError for a group of parameters (or masters) of `dtype` that torch itself updates wrongly."""
    if isinstance(optimizer, SGD) and group.get("fused") and group.get("momentum") and dtype in NARROW:
        raise UnsupportedError(
            f"SGD(fused=True, momentum={group['momentum']}) gives wrong values for {dtype} from its second step on in torch "
            "itself: leave out fused=True, or pass master_weights=torch.float32"
        )


def check_dtypes(optimizers: OptimizerSet, dtypes: Mapping[int, Collection[torch.dtype]]) -> None:
    """Raise UnsupportedError if what happens to a parameter depends on the dtype of another one in its group.

    Args:
        dtypes: those that parameters (or masters) are updated in, by the number of their group.
    """
    for number, found in dtypes.items():
        member, index = optimizers.locate(number)
        optimizer = optimizers.members[member]
        if isinstance(optimizer, Adafactor) and len(found) > 1 and optimizer.param_groups[index]["eps"][0] is None:
            raise UnsupportedError(
                f"group {index} of Adafactor has parameters of {' and '.join(sorted(map(str, found)))}: torch takes the epsilon "
                "of the first for all of them. Give each dtype a group of its own, or pass eps=(value, value)"
            )


def _check_attributes(kind: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer that reaches parameters past its groups: its proxy would update those, and not slices."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    pending = [
        (name, value, 0)
        for name, value in vars(optimizer).items()
        if name not in ("param_groups", "state", "step") and not name.endswith("_hooks")
    ]
    while pending:
        name, value, depth = pending.pop()
        if isinstance(value, Optimizer):
            raise UnsupportedError(
                f"{kind} cannot be paged: its attribute {name!r} is an optimizer of its own, which would update parameters that "
                "are cold. Offload that one, and do what the wrapper does in the training loop"
            )
        if id(value) in own or (type(value) is int and value in own):
            raise UnsupportedError(
                f"{kind} cannot be paged: its attribute {name!r} holds parameters or their id(), which may be cold when it uses "
                "them, and are updated as others; an optimizer must find them in its param_groups. A group of its own, or an "
                "attribute of the parameter, marks one"
            )
        if isinstance(value, dict) and depth < 3:
            pending += [(name, item, depth + 1) for pair in value.items() for item in pair]
        elif isinstance(value, list | tuple | set | frozenset) and depth < 3:
            pending += [(name, item, depth + 1) for item in value]

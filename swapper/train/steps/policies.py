"""Says which groups are to be updated at which event of a step. Pure: the plan and the run take the order from here.

A policy is asked with an event and the states of the groups that have a part in it. The run asks at real events
(executor.py), the plan at those of a step as it expects it (program.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from swapper.train.groups.group_state import DUE, READY, GroupState

States = Mapping[int, GroupState]
"""The states of the groups whose updates a step has fixed and not finished, or of the event's group, by index, in order."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """`optimizer.step()` was called, which fixes the updates of `groups`.

    Attributes:
        may_wait: nothing would show that they are done later.
    """

    groups: Sequence[int]
    may_wait: bool


@dataclass(frozen=True, slots=True)
class Reached:
    """A forward calls a module that uses `groups`; `passed` were expected before it."""

    groups: Collection[int]
    passed: Sequence[int]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Somebody leases `group`.

    Attributes:
        ahead: groups whose update pays to be begun with it.
    """

    group: int
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Completed:
    """A backward is over with `group`: its gradients are complete, and nothing will use its parameters.

    Attributes:
        has_arrived: the gradients are there; else kernels that compute them are queued.
    """

    group: int
    has_arrived: bool


@dataclass(frozen=True, slots=True)
class Read:
    """Something outside of the order of a step uses parameters, gradients or state, or a backward adds to a gradient."""


Event = Stepped | Reached | Wanted | Completed | Read


class UpdatePolicy(Protocol):
    """Says when groups are updated.

    Attributes:
        in_forward: `optimizer.step()` leaves updates to the next forward.
        in_backward: a backward updates before `optimizer.step()` is called.
    """

    in_forward: ClassVar[bool]
    in_backward: ClassVar[bool]

    def due(self, event: Event, states: States) -> Sequence[int]:
        """Return the groups to be updated now, in order."""


class AtStep:
    """Updates all groups in `optimizer.step()`."""

    in_forward: ClassVar[bool] = False
    in_backward: ClassVar[bool] = False

    def due(self, event: Event, states: States) -> Sequence[int]:
        return event.groups if isinstance(event, Stepped) else ()


class InForward:
    """Updates each group when the forward after the step needs it, or has passed it over."""

    in_forward: ClassVar[bool] = True
    in_backward: ClassVar[bool] = False

    def due(self, event: Event, states: States) -> Sequence[int]:
        match event:
            case Stepped(groups, may_wait):
                return () if may_wait else groups
            case Reached(groups, passed):
                return [group for group in dict.fromkeys(passed) if group in states and group not in groups]
            case Wanted(group, ahead) if group in states:
                order = list(states)
                at = order.index(group)
                return [index for index in order[at : at + 1 + ahead] if states[index] is DUE]
            case Read():
                return list(states)
        return ()


class InBackward:
    """Updates each group when the last backward of the step is over with it, and the rest in `optimizer.step()`.

    [Note: one module behind] On an accelerator a gradient arrives when its kernels have run, long after they were queued. An
    immediate wait would idle the device while the CPU updates. So a group whose gradients are in flight is READY, and is
    updated when the backward is one module further, whose kernels are queued by then.
    """

    in_forward: ClassVar[bool] = False
    in_backward: ClassVar[bool] = True

    def due(self, event: Event, states: States) -> Sequence[int]:
        match event:
            case Stepped(groups):
                return groups
            case Completed(group, has_arrived) if has_arrived or states[group] is READY:
                return [group]
        return ()


POLICIES: Mapping[str, UpdatePolicy] = {"step": AtStep(), "deferred": InForward(), "backward": InBackward()}
"""By the option `update`."""

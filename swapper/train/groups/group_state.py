"""The states of a group within a step and the moves between them. Any other move is a bug and raises at once.

While it is leased a group is CURRENT: it is updated before its first lease or after its last one.
"""

from __future__ import annotations

from enum import Enum, auto


class GroupState(Enum):
    """Where a group's parameters are between two steps."""

    CURRENT = auto()
    """Of the last step that was taken; anybody may lease them."""
    DUE = auto()
    """Of the step before: `optimizer.step()` has fixed the update. They are hidden, and a lease does the update first."""
    READY = auto()
    """Of the last step, in a backward that is over with them; kernels that compute their gradients are queued."""
    UPDATING = auto()
    """The update is queued or runs; its results are not shown yet."""
    SEALED = auto()
    """Of a step that backward has begun and nobody has taken yet. They are hidden, and a lease is refused."""


CURRENT, DUE, READY, UPDATING, SEALED = GroupState

LEGAL_MOVES: frozenset[tuple[GroupState, GroupState]] = frozenset(
    {
        (CURRENT, DUE),  # a step has fixed the update
        (DUE, UPDATING),  # the update begins
        (UPDATING, DUE),  # it failed, and was undone
        (UPDATING, CURRENT),  # its results are shown, or it failed in backward, and was undone
        (DUE, CURRENT),  # the step was undone as a whole, or dropped
        (CURRENT, READY),  # in backward: the gradients are complete, and in flight
        (READY, CURRENT),  # that backward is over, or failed
        (READY, UPDATING),  # the backward is one module further
        (CURRENT, UPDATING),  # in backward: the gradients are there
        (UPDATING, SEALED),  # in backward: it is done
        (SEALED, CURRENT),  # the step was taken, or undone
    }
)

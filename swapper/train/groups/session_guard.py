"""Guards the uses of one session's model, and defines what the model tells the session's owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from swapper.durability.directory import RunDirectory
from swapper.errors import StateError
from swapper.modules.turns import Turns
from swapper.paging.section import Section
from swapper.runtime.stats import StepClock

CLOSED = "the manager is closed: make a new one"


class SessionEvents(Protocol):
    """What happens in a session, and what its parts share. SessionSlot answers."""

    directory: RunDirectory
    clock: StepClock
    turns: Turns

    @property
    def step_is_open(self) -> bool:
        """True if an optimizer has stepped in a training step that is not over."""

    def check(self, is_evaluation: bool = False) -> None:
        """Called first at each use by the user. `is_evaluation`: of a forward without autograd.

        Raises:
            StateError: the manager cannot be used.
        """

    def check_usable(self) -> None:
        """The same, of a use that only reads parameters or state outside of a forward. It may come in any thread."""

    def check_to_write(self) -> None:
        """The user changes parameters or state from outside of a step. Raises StateError as `check`."""

    def check_to_write_in_pass(self) -> None:
        """The same, of a forward that changes parameters."""

    def check_between_steps(self, verb: str) -> None:
        """Raise StateError if a training step is open, in which the user calls `verb`."""

    def begin_step(self) -> None:
        """Parameters and state are about to change."""

    def changed_in_pass(self) -> None:
        """A forward has changed parameters."""

    def undo_update(self, sections: Sequence[Section], error: BaseException, ahead: int) -> bool:
        """Updates of `sections` have failed outside of `optimizer.step()`: restore them to the state before their step.

        Args:
            ahead: their step is this many after the last counted one.

        Returns:
            True if they are restored.
        """

    def fail_change(self, error: BaseException) -> None:
        """A change from outside is half done: parameters, and not their masters."""

    def lose_ranks(self, error: BaseException) -> None:
        """This rank has left a collective that others wait in."""


class SessionGuard:
    """Guards one session's model until `revoke`; all its parts share it.

    Args:
        events: of the session.
        operates: operations on cold parameters are done; else they are refused.
    """

    def __init__(self, events: SessionEvents, operates: bool) -> None:
        self._events: SessionEvents | None = events  # None: revoked
        self._why = ""
        self.turns = events.turns
        self.operates = operates

    def revoke(self, why: str) -> None:
        """Refuse every use from now on, with the sentence `why`."""
        self._events, self._why = None, why

    @property
    def events(self) -> SessionEvents:
        """The session's. Raises StateError: it is revoked."""
        if self._events is None:
            raise StateError(self._why)
        return self._events

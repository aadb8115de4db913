"""Defines what a session and its model tell their manager, and ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from swapper.durability.directory import RunDirectory
from swapper.modules.turns import Turns
from swapper.paging.section import Section
from swapper.runtime.stats import StepClock
from swapper.train.session.training_step import TrainingStep


class SessionEvents(Protocol):
    """What happens in a session, and what its parts share. SessionSlot answers.

    Attributes:
        directory: of the run.
        clock: divides steps into phases; has the manager's counters.
        turns: of the threads that use the model.
        training_step: the present one.
    """

    directory: RunDirectory
    clock: StepClock
    turns: Turns
    training_step: TrainingStep

    def check(self) -> None:
        """The user uses the model. Raises StateError if the manager cannot be used."""

    def check_to_write(self) -> None:
        """The user changes parameters or state from outside of a step. Raises StateError as `check`."""

    def begin_step(self) -> None:
        """Parameters and state are about to change."""

    def changed_in_pass(self) -> None:
        """A forward has changed parameters."""

    def undo_update(self, sections: Sequence[Section], error: BaseException, ahead: int) -> bool:
        """Updates of `sections` have failed. See UndoSections."""

    def fail_change(self, error: BaseException) -> None:
        """A change from outside is half done: parameters, and not their masters."""

    def lose_ranks(self, error: BaseException) -> None:
        """This rank has left a collective that others wait in."""

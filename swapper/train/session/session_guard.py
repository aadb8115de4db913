"""The way into an offloaded model: the manager is asked first whether it can be used, until the model is another run's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swapper.durability.commit import CommitRecord
from swapper.errors import StateError
from swapper.modules.turns import Turns
from swapper.paging.section import Section

UndoSections = Callable[[list[Section], BaseException, int], bool]
"""Given sections and the error that updates outside of `optimizer.step()` ended with: has the sections as they were before their
step, so many after the last one that was counted, and returns whether it could."""


class SessionGuard:
    """The way into one model; all its parts share it.

    Attributes:
        check: called first whenever the user comes in; raises if the manager cannot be used.
        check_to_write: the same, where parameters or state are about to be changed from outside.
        turns: threads that come in take them.
        operates: operations on parameters that are away are done; else they are refused.
    """

    def __init__(
        self, check: Callable[[], None], check_to_write: Callable[[], None], turns: Turns, operates: bool = True
    ) -> None:
        self.check = check
        self.check_to_write = check_to_write
        self.turns = turns
        self.operates = operates

    def revoke(self, why: str) -> None:
        """From now on nobody comes in.

        Args:
            why: whole sentence, for the error.
        """

        def refuse() -> None:
            raise StateError(why)

        self.check = self.check_to_write = refuse


@dataclass(frozen=True)
class Callbacks:
    """What a run asks of its manager.

    Attributes:
        session_guard: where the user comes in.
        begin_step: called before a backward updates the first group of a step.
        undo_sections: see UndoSections.
        describe: returns the commit record of a step, its `files`, `sections` and `state_entries` still empty.
    """

    session_guard: SessionGuard
    begin_step: Callable[[], None]
    undo_sections: UndoSections
    describe: Callable[[int], CommitRecord]

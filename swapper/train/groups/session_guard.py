"""Guards the uses of one session's model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swapper.errors import StateError
from swapper.modules.turns import Turns


@dataclass(eq=False)
class SessionGuard:
    """Guards one session's model; all its parts share it.

    Attributes:
        check: called first at each use by the user; raises if the manager cannot be used.
        check_to_write: the same, before parameters or state are changed from outside.
        turns: of the threads that use the model.
        operates: operations on cold parameters are done; else they are refused.
    """

    check: Callable[[], None]
    check_to_write: Callable[[], None]
    turns: Turns
    operates: bool

    def revoke(self, why: str) -> None:
        """Refuse every use from now on, with the sentence `why`."""

        def refuse() -> None:
            raise StateError(why)

        self.check = self.check_to_write = refuse

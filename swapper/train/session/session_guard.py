"""The way into an offloaded model: the manager is asked first whether it can be used, until the model is another run's."""

from __future__ import annotations

from collections.abc import Callable

from swapper.errors import StateError
from swapper.modules.turns import Turns


class SessionGuard:
    """The way into one model; all its parts share it.

    Attributes:
        enter: called first whenever the user comes in; raises if the manager cannot be used.
        enter_to_write: the same, where parameters or state are about to be changed from outside.
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

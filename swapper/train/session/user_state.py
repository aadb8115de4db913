"""Keeps the user's own state that belongs to a step, for commits and snapshots: registered objects, `extra`, random states."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from swapper.durability.commit import CommitRecord, check_state
from swapper.errors import CheckpointError, ConfigError
from swapper.runtime.random_states import rng_states, set_rng_states


class UserState:
    """Owns the state of one manager's user.

    Args:
        keeps_rng: the states of the random number generators belong to it.

    Attributes:
        extra: the user's values.
    """

    def __init__(self, keeps_rng: bool, resumed: CommitRecord | None) -> None:
        self.extra: dict[str, Any] = {} if resumed is None else dict(resumed.extra)
        self._resumed = resumed
        self._registered: dict[str, Any] = {}
        self._keeps_rng = keeps_rng
        self._rng: dict[str, Any] | None = None

    def register(self, objects: Mapping[str, Any]) -> None:
        """Add `objects`, with the state of the resumed commit if it has them."""
        for name, value in objects.items():
            if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
                raise ConfigError(f"register({name}=...) needs an object with state_dict() and load_state_dict()")
            state = value.state_dict()
            if self._resumed is not None and name in self._resumed.registered:
                value.load_state_dict(self._resumed.registered[name])
            try:
                check_state(state)
            except CheckpointError as error:
                raise ConfigError(
                    f"the state of {name!r} cannot be kept in a form that torch.load(weights_only=True) reads: {error}"
                ) from error
            self._registered[name] = value

    # --- random numbers -------------------------------------------------------------------------------------------

    def note_rng(self) -> None:
        """Note the random states at the end of a step."""
        if self._keeps_rng:
            self._rng = rng_states()

    def begin_rng(self) -> None:
        """Note the random states before the first step: the present ones, or the resumed commit's."""
        if self._resumed is None or self._resumed.rng is None:
            self.note_rng()
        elif self._keeps_rng:
            self._rng = self._resumed.rng

    def restore_rng(self) -> None:
        """Set the generators to the resumed commit's states, after `offload`, which may have drawn numbers."""
        if self._rng is not None and self._resumed is not None:
            set_rng_states(self._rng)

    # --- commits and snapshots ----------------------------------------------------------------------------------------

    def in_snapshot(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return it for a snapshot, with `extra` over the values of `self.extra`."""
        registered = {name: value.state_dict() for name, value in self._registered.items()}
        content = {"registered": registered, "extra": {**self.extra, **extra}}
        return content if self._rng is None else {**content, "rng": self._rng}

    def in_commit(self) -> dict[str, Any]:
        """Return its fields of a CommitRecord."""
        return {
            "registered": {name: copy.deepcopy(value.state_dict()) for name, value in self._registered.items()},
            "extra": copy.deepcopy(self.extra),
            "rng": self._rng,
        }

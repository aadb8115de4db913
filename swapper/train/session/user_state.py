"""What is the user's own and belongs to a step: registered objects, `extra`, random numbers. Commits and snapshots have it."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from swapper.durability.commit import CommitRecord, boot_id, check_state
from swapper.durability.directory import RunDirectory
from swapper.errors import CheckpointError, ConfigError
from swapper.train.optimizer.optim import packed_groups
from swapper.train.session.request import Request


class UserState:
    """Of one manager.

    Args:
        keeps_rng: the states of the random number generators belong to it.
        resumed: the commit that the manager goes on from, if it does.

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
        """Have the state of `objects` in what follows; those that the resumed commit has get what it says."""
        for name, value in objects.items():
            if not callable(getattr(value, "state_dict", None)) or not callable(
                getattr(value, "load_state_dict", None)
            ):
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
        """At the end of a step: what draws random numbers from here on belongs to the next one."""
        if self._keeps_rng:
            self._rng = rng_states()

    def begin_rng(self) -> None:
        """The first step's are as they are now, or as the resumed commit says."""
        if self._resumed is None or self._resumed.rng is None:
            self.note_rng()
        elif self._keeps_rng:
            self._rng = self._resumed.rng

    def restore_rng(self) -> None:
        """The model is at its places, which may have drawn numbers: generators get the resumed commit's states."""
        if self._rng is not None and self._resumed is not None:
            set_rng_states(self._rng)

    # --- where it goes --------------------------------------------------------------------------------------------

    def in_snapshot(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a snapshot has of it; `extra` comes over the values that are always there."""
        content = {
            "registered": {name: value.state_dict() for name, value in self._registered.items()},
            "extra": {**self.extra, **extra},
        }
        return content if self._rng is None else {**content, "rng": self._rng}

    def in_commit(
        self,
        step: int,
        directory: RunDirectory,
        request: Request,
        places: dict[str, str],
        plans: list[str],
        external: dict[str, tuple[int, int]],
        members: list[list[str]] | None,
    ) -> CommitRecord:
        """Return the record of a commit of `step`, its `files`, `sections` and `state_entries` still empty.

        Args:
            places: where each family lives.
            plans: the layout, by `describe_plans`.
            lent, members: see CommitRecord.
        """
        return CommitRecord(
            step=step,
            rank=directory.ranks.rank,
            world_size=directory.ranks.size,
            boot_id=boot_id(),
            optimizer=request.kind,
            placement=places,
            plans=plans,
            files={},
            sections=[],
            param_groups=copy.deepcopy(packed_groups(request.optimizer.param_groups)),
            state_entries={},
            registered={name: copy.deepcopy(value.state_dict()) for name, value in self._registered.items()},
            extra=copy.deepcopy(self.extra),
            rng=self._rng,
            external=external,
            members=members,
            job=directory.job,
        )


def rng_states() -> dict[str, Any]:
    """Return the states in a form that torch.load(weights_only=True) reads."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, [int(key) for key in keys], int(position), int(has_gauss), float(gauss))
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Put the generators back to where `rng_states` found them. Devices that are not there any more are left out."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
    if "numpy" in states:
        import numpy

        name, keys, position, has_gauss, gauss = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))

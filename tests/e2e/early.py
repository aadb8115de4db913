"""Lists the groups that `update="backward"` has updated before `optimizer.step()` is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from e2e.twins import Twins
from swapper.train.groups.group_state import GroupState
from swapper.train.groups.parameter_group import GroupParameters


def sealed(groups: Iterable[GroupParameters]) -> set[int]:
    """Return the groups of a step that backward has begun and nobody has taken."""
    return {group.index for group in groups if group.state is GroupState.SEALED}


def updated_early(pair: Twins) -> set[int]:
    """Return the groups that are updated before `optimizer.step()` is called."""
    return sealed(pair.manager.current.run.model.groups)


def train(pair: Twins, run: Callable[[Any, Any], Any], steps: int) -> list[set[int]]:
    """As `pair.train`; returns the groups that each step had updated when it was called."""
    early: list[set[int]] = []
    handle = pair.optimizer.register_step_pre_hook(lambda *_: early.append(updated_early(pair)))
    pair.train(run, steps)
    handle.remove()
    return early

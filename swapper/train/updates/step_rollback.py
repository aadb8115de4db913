"""Undoes a step that failed half-way, or was never finished: restores the model's state before it.

The manager restores pages and sections from the last commit (train/session/session_slot.py). The rest is restored here:
settings of the optimizer, the set of parameters with state, and state on a device.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from swapper.paging.section import Section
from swapper.train.optimizer.optim import packed_groups
from swapper.train.optimizer.optimizer_state import OptimizerState
from swapper.train.parameters.parameter_group import GroupParameters
from swapper.train.session.session_slot import UndoSections


@dataclass
class StepRollback:
    """Owns the optimizer's settings and entries from before the last step.

    Attributes:
        optimizer: the user's.
        optimizer_state: of all trained parameters.
        sections: of parameters and state.
        groups: all groups, by index; they may come later.
        undo_sections: see UndoSections.
    """

    optimizer: Optimizer
    optimizer_state: OptimizerState
    sections: Sequence[Section]
    groups: Sequence[GroupParameters]
    undo_sections: UndoSections
    _before: tuple[list[dict[str, Any]], dict[str, Any]] | None = None  # settings and entries

    def note(self) -> None:
        """Note that a step begins."""
        self._before = self._settings(), self.optimizer_state.entries.pack()

    def note_settings(self) -> None:
        """Note that a step begun in backward is taken: its settings may differ from those at its first update."""
        if self._before is not None:
            self._before = self._settings(), self._before[1]

    def undo_step(self) -> None:
        """Restore the rest; all sections have been restored to the state before the last step."""
        self.optimizer_state.forget_kept()
        if self._before is not None:
            settings, entries = self._before
            self.restore_settings(settings)
            self.optimizer_state.entries.unpack(entries)

    def undo_groups(self, groups: Collection[int], error: BaseException, ahead: int) -> bool:
        """Restore `groups` after updates outside of `optimizer.step()` failed. Return True if they are restored.

        Args:
            ahead: their step is this many after the last counted one.
        """
        sections = [section for section in self.sections if section.plan.group in groups]
        if self._before is None or not self.undo_sections(sections, error, ahead):
            return False
        self.optimizer_state.forget_kept()
        self.optimizer_state.entries.unpack(
            self._before[1], {n for g in groups for n, _ in self.groups[g].group.parameters}
        )
        return True

    def restore_settings(self, param_groups: list[dict[str, Any]]) -> None:
        """Restore earlier settings of the optimizer's groups."""
        for ours, saved in zip(self.optimizer.param_groups, param_groups, strict=True):
            ours.update({key: value for key, value in saved.items() if key != "params"})

    def _settings(self) -> list[dict[str, Any]]:
        return copy.deepcopy(packed_groups(self.optimizer.param_groups))

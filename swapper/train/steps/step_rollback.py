"""Undoes a step that failed half-way, or was never finished: restores the model's state before it.

The manager restores pages and sections from the last commit (train/session/session_slot.py). The rest is restored here:
settings of the optimizer, the set of parameters with state, and state on a device.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from swapper.paging.section import Section
from swapper.train.groups.session_guard import SessionEvents
from swapper.train.optimizer.optimizer_set import OptimizerSet
from swapper.train.state.optim import restore_settings
from swapper.train.state.optimizer_state import OptimizerState

UNCHANGING = frozenset({bool, int, float, str, type(None)})
"""Types of settings of which no copy is needed."""


@dataclass
class StepRollback:
    """Owns the optimizers' settings and entries from before the last step.

    Attributes:
        events: of the session, which restores sections.
    """

    optimizers: OptimizerSet
    optimizer_state: OptimizerState
    sections: Sequence[Section]
    events: SessionEvents
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
            restore_settings(self.optimizers.param_groups, settings)
            self.optimizer_state.entries.unpack(entries)

    def undo_updates(self, names: Collection[str], error: BaseException, ahead: int) -> bool:
        """Restore parameters after updates outside of `optimizer.step()` failed. Return True if they are restored.

        Args:
            names: of the parameters.
            ahead: their step is this many after the last counted one.
        """
        sections = self.sections_of(names)
        if self._before is None or not self.events.undo_update(sections, error, ahead):
            return False
        self.optimizer_state.forget_kept({section.plan.group for section in sections})
        self.optimizer_state.entries.unpack(self._before[1], names)
        return True

    def sections_of(self, names: Collection[str]) -> list[Section]:
        """Return the sections with anything of the parameters `names`."""
        return [one for one in self.sections if any(slot.spec.owner in names for slot in one.plan.slots)]

    def _settings(self) -> list[dict[str, Any]]:
        memo: dict[int, object] = {}
        return [
            {
                key: value if type(value) in UNCHANGING else copy.deepcopy(value, memo)
                for key, value in group.items()
                if key != "params"
            }
            for group in self.optimizers.param_groups
        ]

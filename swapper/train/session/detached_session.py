"""Detaches a session from its model, and opens it again from its files, which stay as they are."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from swapper.errors import StateError
from swapper.paging.section import Section
from swapper.train.session.plan import Plan
from swapper.train.session.session_slot import SessionSlot
from swapper.train.session.training_session import Origin, TrainingSession

OpenRun = Callable[[Plan, Origin], TrainingSession]


def check_between_steps(run: TrainingSession, verb: str, remedy: str) -> None:
    """Raise StateError, with both texts, in the middle of a forward, a backward or a gather."""
    doing = "manager.gather" if run.model.gathering.is_open else ""
    if torch._C._current_graph_task_id() != -1 or run.model.passes.is_open:
        doing = "a forward or backward"
    if doing:
        raise StateError(f"{verb} in the middle of {doing}: {remedy}")


def detach(current: SessionSlot, verb: str, why: str) -> None:
    """Close the slot's session, all of whose content is written, and release its memory.

    Args:
        why: a sentence for accesses by graphs that were made before.
    """
    current.running(verb).detach(why)
    current.run = None
    gc.collect()


@dataclass(frozen=True)
class DetachedSession:
    """The remains of a session, for opening it again."""

    plan: Plan
    origin: Origin
    sections: list[Section]
    entries: dict[str, Any]

    @classmethod
    def of(cls, run: TrainingSession) -> DetachedSession:
        return cls(run.plan, run.origin, run.sections, run.model.optimizer_state.packed_entries)

    def reopen(self, open_run: OpenRun) -> TrainingSession:
        """Return the session, opened again: resident sections are read now, pages when they are needed.

        Raises:
            IoError: its files cannot be read, or the system has no memory for it.
        """
        run = open_run(self.plan, self.origin)
        try:
            run.take_over(self.sections, self.entries)
            run.begin(None)
        except BaseException:
            run.close()
            raise
        return run

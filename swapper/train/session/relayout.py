"""More to train: a group is added to an optimizer whose model is offloaded, or a frozen parameter of one of its groups is trained.

What is trained has room for gradients and state, so the run gets another layout, and with it other swap files. Between two steps
everything is written and committed in the old layout; the old run closes; a new one opens, with files beside the old ones, and
fills them from those, each page being read twice, to be compared with its checksum and to be copied, and written once; it is
committed; and only then the old files go. Memory is at no time that of two runs.

[Note: before or after] Until the new commit is published the directory holds the run before, from then on the run after: a
process that is killed at any instant leaves one of them whole. Where the new run cannot be opened or filled, the old one is
opened again from its own files, which nobody has touched.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from swapper.durability.commit import read_commit
from swapper.durability.directory import RunDirectory
from swapper.errors import BudgetError, StateError
from swapper.paging.section import Section
from swapper.paging.store.swap_files import first_free_number
from swapper.train.gradients.grads import GradientStash
from swapper.train.layout.content import CarriedSource
from swapper.train.session.plan import Plan, plan_run
from swapper.train.session.training_session import Origin, TrainingSession

PARTED = (
    "this graph was made before the optimizer got more to train (add_param_group), which moved what it refers to: run the forward "
    "again, and add groups where no backward is still to come"
)


class Relayout:
    """From one run to another that trains more of the same model.

    Args:
        run: the one that there is.
        directory: the run's.
        open_run: opens a run.

    Attributes:
        run: the one that there is now; None if neither could be opened.
    """

    def __init__(
        self,
        run: TrainingSession,
        directory: RunDirectory,
        open_run: Callable[[Plan, Origin], TrainingSession],
    ) -> None:
        self.run: TrainingSession | None = run
        self._request = run.plan.request
        self._directory = directory
        self._open_run = open_run

    def train_more(self, add: Callable[[], None], step: int) -> None:
        """Have everything trained that is in the optimizer's groups when `add` is done. Where that fails, nothing has changed.

        Args:
            add: gives the optimizer another group, if one is to be added.
            step: the one that was taken last.

        Raises:
            StateError: in the middle of a forward, a backward or a gather; or other ranks do not come to the same.
            BudgetError: the budget is too small; says the smallest that works.
            UnsupportedError: the optimizer has parameters that are not of the model, or cannot be paged with its new group.
            DirectoryError: the drive has no room for its files beside those that there are.
            IoError: a transfer failed.
        """
        assert self.run is not None
        _check_between_steps(self.run)
        self.run.committer.write_all(step)
        self.run.committer.before_change_of_layout()
        self.run.publisher.raise_failure()
        groups = self._request.optimizer.param_groups
        count = len(groups)

        def undo() -> None:
            del groups[count:]

        try:
            add()
            plan = _plan_more(self.run.plan)
            if plan is not None:
                self._directory.require_space(plan.space_by_drive())
                self._change(plan, step, undo)
        except BaseException:
            undo()
            raise

    def _change(self, plan: Plan, step: int, undo: Callable[[], None]) -> None:
        assert self.run is not None
        parked = GradientStash(self._directory.path)
        content = self.run.carried(self._request.optimizer)
        left = _Left.of(self.run)
        try:
            parked.fill(self.run.model.gradients)
            self._to(plan, left, content, parked, step, undo)
        finally:
            parked.close()
            content.close()

    def _to(
        self,
        plan: Plan,
        left: _Left,
        content: CarriedSource,
        parked: GradientStash,
        step: int,
        undo: Callable[[], None],
    ) -> None:
        self._part()
        new: TrainingSession | None = None
        try:
            first = first_free_number(self._directory.path)
            self.run = new = self._open_run(plan, Origin(first_file=first, edits=left.origin.edits))
            new.adopt(content)
            new.model.optimizer_state.entries.unpack(left.entries)
            new.begin(None)
            parked.empty_into(new.model.gradients)
            new.committer.write_all(step)
        except BaseException:
            undo()
            if new is not None:
                self._part()
            self._go_back(left, parked, step)
            raise
        finally:
            self._remove_old_files()

    def _go_back(self, left: _Left, parked: GradientStash, step: int) -> None:
        run = self._open_run(left.plan, left.origin)
        try:
            run.take_up(left.sections, left.entries)
            run.begin(None)
            parked.empty_into(run.model.gradients)
            if self._committed_files() - run.file_names:
                run.committer.write_all(step)  # the new run was committed, and failed after that
        except BaseException:
            run.close()
            raise
        self.run = run

    def _part(self) -> None:
        """Close the run; what its memory was is free for another one's."""
        assert self.run is not None
        self.run.part(PARTED)
        self.run = None
        gc.collect()

    def _remove_old_files(self) -> None:
        """Whatever neither the run nor the directory's commit names goes. [Note: before or after]"""
        if self.run is None:
            return
        self._directory.remove_strays(self.run.file_names | self._committed_files())

    def _committed_files(self) -> set[str]:
        record = read_commit(self._directory.path)
        return set() if record is None else set(record.files.values())


def _check_between_steps(run: TrainingSession) -> None:
    """Raise StateError where a forward, a backward or a gather has parts of the model in use."""
    doing = "manager.gather" if run.model.gathering.is_open else ""
    if torch._C._current_graph_task_id() != -1 or run.model.passes.is_open:
        doing = "a forward or backward"
    if doing:
        raise StateError(f"add_param_group in the middle of {doing}: add the group between two steps")


def _plan_more(before: Plan) -> Plan | None:
    """Return the plan of a run that trains what the optimizer's groups have now; None if that is no more than `before`.

    Parameters and state stay where they are if the budget allows that.
    """
    request = before.request
    inventory = request.inventory(before=before.inventory)
    if inventory.forms.keys() == before.inventory.forms.keys():
        return None
    try:
        places = before.places["param"], before.places["state"]
        return plan_run(request, inventory, places, tuning=before.tuning)
    except BudgetError:
        found = plan_run(request, inventory, tuning=before.tuning)
        if before.commit_every is not None and found.commit_every is None:
            raise  # a run that could be gone on from shall not become one that cannot
        return found


@dataclass(frozen=True)
class _Left:
    """What a run leaves, from which another of the same plan goes on."""

    plan: Plan
    origin: Origin
    sections: list[Section]
    entries: dict[str, Any]

    @classmethod
    def of(cls, run: TrainingSession) -> _Left:
        return cls(run.plan, run.origin, run.sections, run.model.optimizer_state.packed_entries)

"""Replaces a session by one that trains more: a group was added to the optimizer, or a frozen parameter is trained.

Trained parameters have space for gradients and state, so the layout changes, and with it the swap files. Between two
steps everything is written and committed in the old layout, and the old session closes. A new one opens with new files
and fills them from the old ones (each page is read twice, to be compared with its checksum and to be copied, and written
once). It is committed, and then the old files are removed. Memory is never that of two sessions.

[Note: before or after] Until the new commit is published the directory holds the old session, then the new one: a
process that is killed at any instant leaves one of them whole. If the new session cannot be opened or filled, the old
one is opened again from its files, which are unchanged. Of ranks that run together each keeps the old session with the
new one until all have that: its record as that of the previous commit, to which a rank that is ahead returns ([Note: one
step for all ranks], durability/ranks.py). The new commit counts as a change since the step, so that the two differ.
If a rank does not arrive there, the others cannot know which of the two it has: they leave both, and end.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from swapper.durability.commit import publish_commit, read_commit
from swapper.durability.directory import FALLBACK_NAME
from swapper.durability.ranks import Ranks
from swapper.durability.recovery import keep_last
from swapper.errors import BudgetError, StateError
from swapper.io import beneath
from swapper.modules.turns import is_in_backward
from swapper.paging.section import Section
from swapper.paging.store.swap_files import first_free_number
from swapper.train.gradients.grads import GradientStash
from swapper.train.layout.content import CarriedSource
from swapper.train.planning.plan import Plan, plan_run
from swapper.train.session.alike import Given, check_alike
from swapper.train.session.session_slot import SessionSlot
from swapper.train.session.training_session import Origin, TrainingSession

OpenRun = Callable[[Plan, Origin], TrainingSession]

VERB = "train more parameters"
DETACHED = (
    "this graph was made before the optimizer got more to train (add_param_group), which moved what it refers to: run the forward "
    "again, and add groups where no backward is still to come"
)


class Relayout:
    """Replaces the session of a manager's slot, which is empty if neither the new one nor the old one could be opened."""

    def __init__(self, current: SessionSlot, open_run: OpenRun) -> None:
        self._current = current
        self._directory = current.directory
        self._open_run = open_run

    def train_more(self, add: Callable[[], None], step: int) -> None:
        """Train all parameters in the optimizer's groups after `add`. If that fails, nothing has changed.

        Args:
            add: adds the optimizer's new group, if any.
            step: the last one.

        Raises:
            StateError: in the middle of a forward, a backward or a gather; or other ranks come to another result.
            BudgetError: the budget is too small; names the smallest that works.
            UnsupportedError: the optimizer has parameters that are not of the model, or cannot be paged with its new group.
            DirectoryError: the drive has no space for the new files.
            IoError: a transfer failed.
        """
        run = self._current.running(VERB)
        with self._current.clock.counters.waiting("rank", f"to {VERB}, which another does not, or not yet"):
            self._ranks_of(run.plan).settle(VERB, partial(_write_all, run, step), lambda _: None)
        run.committer.before_change_of_layout("add trained parameters")
        run.publisher.raise_failure()
        before, members = run.plan, run.plan.request.optimizers.members
        del run  # or a traceback would keep it
        counts = [len(member.param_groups) for member in members]

        def undo() -> None:
            for member, count in zip(members, counts, strict=True):
                del member.param_groups[count:]

        def prepare() -> tuple[Plan | None, Given]:
            add()
            plan = _plan_more(before)
            if plan is not None:
                self._directory.require_space(plan.space_by_drive())
            return plan, Given.of(before.request)

        try:
            ranks = self._ranks_of(before)
            (plan, ours), told = ranks.settle(VERB, prepare, lambda found: found[1].digests())
            check_alike(ours, ranks, told, "add_param_group")
            if plan is not None:
                self._change(plan, step, undo)
        except BaseException:
            undo()
            raise

    def _ranks_of(self, plan: Plan) -> Ranks:
        """Return those that change their layouts together. Others may do so alone."""
        are_together = plan.request.model.is_sharded or plan.commit_every is not None
        return self._directory.ranks if are_together else Ranks()

    def _change(self, plan: Plan, step: int, undo: Callable[[], None]) -> None:
        run, ranks = self._current.running(VERB), self._ranks_of(plan)
        old = DetachedSession.of(run)
        with (
            closing(GradientStash(self._directory.path)) as stash,
            closing(run.carried(plan.request.optimizers)) as content,
        ):
            stash.fill(run.model.gradients)
            del run
            detach(self._current, VERB, DETACHED)
            try:
                open_new = partial(self._open_new, plan, old, content, stash, step)
                ranks.settle(VERB, open_new, lambda _: None)
            except BaseException:
                undo()
                if self._current.run is not None:
                    detach(self._current, VERB, DETACHED)
                if not ranks.lacks_one:
                    self._reopen(old, stash)
                raise
            finally:
                if not ranks.lacks_one:
                    self._remove_old_files(ranks)

    def _open_new(
        self, plan: Plan, old: DetachedSession, content: CarriedSource, stash: GradientStash, step: int
    ) -> None:
        first = first_free_number(self._directory.path)
        self._current.run = new = self._open_run(plan, Origin(first_file=first, edits=old.origin.edits + 1))
        new.adopt(content)
        new.model.optimizer_state.entries.unpack(old.entries)
        new.begin(None)
        stash.empty_into(new.model.gradients)
        if old.origin.last is not None and self._ranks_of(plan).are_together:
            keep_last(self._directory.path, old.origin.last, plan.request.manager.fsync)
        new.committer.write_all(step)

    def _reopen(self, old: DetachedSession, stash: GradientStash) -> None:
        run, last = old.reopen(self._open_run), old.origin.last
        try:
            stash.empty_into(run.model.gradients)
            if last is not None and self._committed_files() - run.file_names:  # the new session failed after its commit
                publish_commit(self._directory.path, last.data, old.plan.request.manager.fsync)
        except BaseException:
            run.close()
            raise
        self._current.run = run

    def _remove_old_files(self, ranks: Ranks) -> None:
        """Remove files that neither the session nor the commit names. [Note: before or after]"""
        if self._current.run is not None:
            if ranks.are_together:
                beneath.unlink(self._directory.path / FALLBACK_NAME)
            self._directory.remove_strays(self._current.run.file_names | self._committed_files())

    def _committed_files(self) -> set[str]:
        record = read_commit(self._directory.path)
        return set() if record is None else set(record.files.values())


def _write_all(run: TrainingSession, step: int) -> None:
    check_between_steps(run, "add_param_group", "add the group between two steps")
    run.committer.write_all(step)


def _plan_more(before: Plan) -> Plan | None:
    """Return the plan for training the optimizer's present groups; None if they have no more than in `before`.

    Parameters and state keep their placement if the budget allows that.
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
            raise  # a run that is committed must not become one that is not
        return found


def check_between_steps(run: TrainingSession, verb: str, remedy: str) -> None:
    """Raise StateError in the middle of a forward, a backward or a gather, or if an alias would be cut off.

    Args:
        verb: what the user called, for the message.
        remedy: for a call in the middle of something.
    """
    doing = "manager.gather" if run.model.gathering.is_open else ""
    if is_in_backward() or run.model.passes.is_open:
        doing = "a forward or backward"
    if doing:
        raise StateError(f"{verb} in the middle of {doing}: {remedy}")
    if not run.plan.request.model.is_sharded:
        for group in run.model.groups:
            if (
                not group.paged and (name := next(group.aliased(), None)) is not None
            ):  # those of cold ones raise when they are used
                raise StateError(
                    f"{verb}: something refers to the memory of parameter {name} (a view, .data, an array, the graph of a "
                    "forward), which moves: it would keep the values of now, while in plain torch it follows the parameter. Drop "
                    f"it, or keep a copy (`p.detach().clone()`), before {verb}"
                )


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

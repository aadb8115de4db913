"""Holds a manager's present session, checks at each use that it can be used, and takes the optimizer's steps.

A step that failed half-way is undone here; if that is impossible, the manager can only be closed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from swapper.capabilities import Feature, check
from swapper.durability.directory import RunDirectory
from swapper.errors import InvariantError, StateError
from swapper.modules.turns import Turns
from swapper.paging.section import Section
from swapper.runtime.counters import FAMILIES
from swapper.runtime.stats import StepClock
from swapper.train.session.training_session import TrainingSession
from swapper.train.session.training_step import TrainingStep
from swapper.train.session.user_state import UserState


class SessionSlot:
    """Owns the present session, which a relayout replaces.

    Args:
        clock: divides steps into phases; has the manager's counters.

    Attributes:
        run: the session; None before `offload` and after `close`.
        training_step: the present one; there is one from `offload` on.
        away: a sentence that refuses every use while there is no session for a while; None: there is one.
        turns: of the threads that use the model: a forward, a backward or a step each.
    """

    def __init__(self, directory: RunDirectory, backend: str, clock: StepClock, user: UserState) -> None:
        self.run: TrainingSession | None = None
        self.training_step: TrainingStep
        self.away: str | None = None
        self.turns = Turns()
        self.directory = directory
        self.backend = backend
        self.clock = clock
        self.user = user
        self._counters = clock.counters
        self._pid = os.getpid()
        self._is_closed = False
        self._failure: BaseException | None = None
        self._failed = ""
        self._left: BaseException | None = None

    def running(self, verb: str) -> TrainingSession:
        """Return the session. Raises StateError, naming `verb`, if no model is offloaded."""
        if self.run is None:
            self.check_usable()
            raise StateError(f"{verb} needs an offloaded model: call manager.offload first")
        return self.run

    def check(self) -> None:
        """Check that the manager can be used, and commit the last step if it is due and its writes are done."""
        self.check_usable()
        if self.run is not None:
            self.run.committer.enter()

    def check_to_write(self) -> None:
        """The same before a change from outside: commit the last step as it was."""
        self.check_usable()
        if self.run is not None:
            self.run.committer.finish()
            self.run.committer.changed_from_outside()

    def check_usable(self) -> None:
        """Raise StateError if the manager cannot be used."""
        if os.getpid() != self._pid:
            raise StateError(
                "the manager was touched in a forked child: it works only in the process that made it. "
                "Keep the model out of DataLoader workers, or start them by spawn"
            )
        if self._is_closed:
            raise StateError("the manager is closed: make a new one")
        if self.away is not None:
            raise StateError(self.away)
        if self._left is not None:
            raise StateError(
                f"a forward or backward ended while FSDP2 gathered shards ({self._left}), where the other ranks wait for this "
                "one: end this process, so that they end too, and restart all with resume='auto'"
            ) from self._left
        if self._failure is not None:
            raise StateError(
                f"{self._failed} failed half-way ({self._failure}): memory and files hold a mix of two steps. "
                "Close the manager and resume from the last commit (resume='auto') or snapshot"
            ) from self._failure
        if self.run is not None and self.run.pager.broken_by:
            raise StateError(
                f"{self.run.pager.broken_by} was raised in the middle of a change of pages (by another thread, or a second "
                "Ctrl-C): memory is in no known state, and nothing more is committed. Close the manager and resume from the "
                "last commit (resume='auto') or snapshot"
            )

    def lose_ranks(self, error: BaseException) -> None:
        """Refuse every use from now on: this rank has left a collective, for the reason `error`, and others wait in it."""
        self._left = error

    @property
    def is_over(self) -> bool:
        """True if there is nothing to close: it is closed, or another process's."""
        return self._is_closed or os.getpid() != self._pid

    def memory_by_kind(self) -> dict[str, int]:
        """Return the bytes of host memory by kind: resident sections, frames by family, free frames. Takes no lock."""
        run, counters = self.run, self._counters
        if run is None:
            return {"resident": 0, **dict.fromkeys(FAMILIES, 0), "free": 0}
        frames = run.pager.bytes_by_family()
        free = max(counters.pool_bytes - sum(frames.values()), 0)
        return {"resident": counters.resident_bytes, **frames, "free": free}

    def about_trace(self) -> dict[str, Any]:
        """Return what a trace says besides its spans: the drive's bytes a second, if it was tuned, and names of groups."""
        plan = None if self.run is None else self.run.plan
        tuning = None if plan is None else plan.tuning
        rates = None if tuning is None else {"read": tuning.read_bytes_per_s, "write": tuning.write_bytes_per_s}
        groups = {} if plan is None else {group.index: group.name for group in plan.inventory.groups}
        return {"drive": rates, "groups": groups, "steps": []}

    @property
    def condition(self) -> str:
        """What can be done with it now, for people."""
        try:
            self.check_usable()
        except StateError as error:
            return str(error)
        return "no model yet: call manager.offload" if self.run is None else "in use"

    @property
    def has_failed(self) -> bool:
        """True if memory holds a mix of two steps, or is in no known state: nothing of it is to be committed."""
        return self._failure is not None or (self.run is not None and bool(self.run.pager.broken_by))

    def end(self) -> None:
        """Mark it closed, and drop the session."""
        self._is_closed = True
        self.run = None
        self._failure = self._left = self.away = (
            None  # its traceback may refer to a forward's tensors, and they to our hooks
        )

    # --- steps of the optimizer ---------------------------------------------------------------------------------------

    def take_step(self, member: int, train_more: Callable[[], None]) -> None:
        """Take the step of `optimizer.step()`.

        Args:
            train_more: replaces the session by one that also trains the parameters that have gradients now.
        """
        self.check_usable()
        run = self.running("optimizer.step()")
        with self.turns.turn():
            with self.clock.phase("step"):
                with self._stepping(run, member, train_more) as run:
                    run.model.updates.take_step(member, self.training_step.is_over)
                if is_over := self.training_step.is_over:
                    self._count_step(self.running("optimizer.step()"))
            if is_over:
                self.clock.end_step()

    def skip_step(self, member: int) -> None:
        """Leave out an optimizer's step: torch.amp.GradScaler has found infinite gradients."""
        self.training_step.check(member)
        with self.turns.turn():
            self.training_step.skip(member)
            if self.training_step.is_over:
                self._end_training_step()

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """See `SwapManager.one_step`."""
        self.check()
        run = self.running("one_step")
        check({*run.plan.request.features, Feature.ONE_STEP})
        with self.training_step.hold():
            yield
        with self.turns.turn():
            self.check_usable()
            self._end_training_step()

    @contextmanager
    def _stepping(self, run: TrainingSession, member: int, train_more: Callable[[], None]) -> Iterator[TrainingSession]:
        """Prepare an optimizer's step, which the context takes. Yields the session that does; undoes a step that fails."""
        self.directory.ranks.check_still_so()
        ours, step, has_begun = self.training_step, self._counters.step + 1, run.model.updates.has_begun_early
        with self._told(run, has_begun or ours.is_open):
            run = self._prepare(run, member, train_more)
        if not ours.is_open:
            if not has_begun:
                self.begin_step()
            ours.learn = run.model.updates.in_order
        is_alone = not run.model.updates.is_open or (has_begun and not ours.is_open)
        ours.begin(member)
        try:
            with self._on_all_ranks(step):
                run.model.before_update()
                yield run
                run.model.after_update()
                if ours.is_over:
                    run.pager.end_step(ours.learn)
        except BaseException as error:
            self._undo_step(run, member, error, is_alone)
            raise

    def _undo_step(self, run: TrainingSession, member: int, error: BaseException, is_alone: bool) -> None:
        """Undo an optimizer's step, which failed half-way, if that is possible.

        Args:
            is_alone: no other optimizer's updates are open.
        """
        step, ours = self._counters.step + 1, self.training_step
        if ours.is_first:
            self.fail(step, error)
        elif is_alone and run.model.optimizer_state.kept is None:
            run.model.passes.forget_leases()
            self.fail(step, error, run.model.sections_of(member))
        else:
            self._failure, self._failed = error, f"step {step}"
        ours.undo(member)
        run.model.step_undone()

    def _end_training_step(self) -> None:
        """End the training step outside of `optimizer.step()`. If all optimizers have skipped theirs, there was none."""
        if not self.training_step.is_open:
            self.training_step.end()
            return
        run = self.running("optimizer.step()")
        run.pager.end_step(self.training_step.learn)
        self._count_step(run)
        self.clock.end_step()

    def _count_step(self, run: TrainingSession) -> None:
        """Count the training step, and have it committed."""
        self.training_step.end()
        self._counters.step += 1
        self.user.note_rng()
        run.committer.step_done(self._counters.step)

    def _prepare(self, run: TrainingSession, member: int, train_more: Callable[[], None]) -> TrainingSession:
        """Check that the step can be taken, and return the session that takes it."""
        if run.model.gathering.is_open:
            raise StateError("optimizer.step() inside manager.gather: leave the gather first")
        self.training_step.check(member)
        run.model.passes.abandon()
        if not self.training_step.is_open or run.model.updates.has_open(member):
            run.model.finish_update(in_order=True)
        run.model.follow_groups()
        if run.model.has_more_to_train:
            train_more()
            run = self.running("optimizer.step()")
        run.model.check_step(member)
        return run

    @contextmanager
    def _told(self, run: TrainingSession, has_begun: bool = False) -> Iterator[None]:
        """Tell the other ranks, where they wait next for this one, if the context fails: no rank takes the step then."""
        try:
            yield
        except BaseException as error:
            with suppress(StateError):  # of another rank
                if has_begun:
                    self._agree(error, self._counters.step + 1)
                else:
                    run.committer.meet_ranks(error)
            raise

    @contextmanager
    def _on_all_ranks(self, step: int) -> Iterator[None]:
        """What fails in the context on one rank fails on all."""
        try:
            yield
        except BaseException as error:
            with suppress(StateError):
                self._agree(error, step)
            raise
        self._agree(None, step)

    def _agree(self, failure: BaseException | None, step: int) -> None:
        ranks = self.directory.ranks
        if ranks.are_together:
            with self._counters.waiting("rank", f"to end step {step}"):
                ranks.agree(failure, f"step {step}")

    def begin_step(self) -> None:
        """Prepare for changes of parameters and state. The writes of the last step are done by then, on all ranks."""
        run = self.running("a step")
        with self._told(run):
            run.plan.inventory.check_files()
            run.committer.before_step()
        run.committer.meet_ranks()

    def changed_in_pass(self) -> None:
        """Note that a forward has changed parameters."""
        self.running("a forward").committer.changed_in_pass()

    def undo_update(self, sections: Sequence[Section], error: BaseException, ahead: int) -> bool:
        """Restore sections after updates outside of `optimizer.step()` failed. See UndoSections."""
        return self.fail(self._counters.step + max(ahead, int(self.training_step.is_open)), error, sections)

    def fail(self, step: int, error: BaseException, sections: Sequence[Section] | None = None) -> bool:
        """Restore `sections`, or all, to the state before `step`, which failed half-way. Return True if they are restored.

        Otherwise the manager can only be closed; so too after an InvariantError, which each repetition would meet again.
        """
        self._failure, self._failed = error, f"step {step}"
        is_bug = isinstance(error, InvariantError)
        if self.run is None or is_bug or not self._may_undo(self.run, sections):
            return False
        if self.run.roll_back(step - 1, sections):
            self._failure = None
        return self._failure is None

    def fail_change(self, error: BaseException) -> None:
        """Refuse every use from now on: fp32 masters have not followed a change of parameters."""
        self._failure, self._failed = error, "a change of parameters with fp32 masters"

    def _may_undo(self, run: TrainingSession, sections: Sequence[Section] | None) -> bool:
        """Return True if in this training step nothing has changed the sections but the step that failed."""
        if run.pager.broken_by:
            return False
        return sections is None or self.training_step.may_undo(run.model.members_of(sections))

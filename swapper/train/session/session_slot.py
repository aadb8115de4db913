"""Holds what a manager has at the moment: the run, where a model is offloaded, whether it can be used, and its steps.

Every verb asks here first. A step that failed half-way is undone here, or else only closing is left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from swapper.durability.directory import RunDirectory
from swapper.errors import StateError
from swapper.modules.turns import Turns
from swapper.paging.section import Section
from swapper.runtime.stats import StepClock
from swapper.train.session.training_session import TrainingSession
from swapper.train.session.user_state import UserState


class SessionSlot:
    """Owns which run there is; another one takes its place when there is more to train.

    Args:
        directory: the manager's.
        backend: how transfers are made.
        clock: divides steps into phases; its counters count them.
        user: what belongs to a step besides.

    Attributes:
        turns: threads take them: a forward, a backward, a step, or whatever else goes through the model.
    """

    def __init__(self, directory: RunDirectory, backend: str, clock: StepClock, user: UserState) -> None:
        self.run: TrainingSession | None = None
        self.turns = Turns()
        self.directory = directory
        self.backend = backend
        self._clock = clock
        self._counters = clock.counters
        self._user = user
        self._pid = os.getpid()
        self._is_closed = False
        self._failure: BaseException | None = None
        self._failed_step = 0

    def running(self, verb: str) -> TrainingSession:
        """Return the run; for verbs that need an offloaded model."""
        if self.run is None:
            self.check_usable()
            raise StateError(f"{verb} needs an offloaded model: call manager.offload first")
        return self.run

    def check(self) -> None:
        """What every use begins with: check, and commit the step before if it is due and its writes are done."""
        self.check_usable()
        if self.run is not None:
            self.run.committer.enter()

    def check_to_write(self) -> None:
        """As `check`, where something is about to be changed from outside: the step before is committed as it was."""
        self.check_usable()
        if self.run is not None:
            self.run.committer.finish()
            self.run.committer.changed_from_outside()

    def check_usable(self) -> None:
        """Raises: StateError."""
        if os.getpid() != self._pid:
            raise StateError(
                "the manager was touched in a forked child: it works only in the process that made it. "
                "Keep the model out of DataLoader workers, or start them by spawn"
            )
        if self._is_closed:
            raise StateError("the manager is closed: make a new one")
        if self._failure is not None:
            raise StateError(
                f"step {self._failed_step} failed half-way ({self._failure}): memory and files hold a mix of two steps. "
                "Close the manager and go on from the last commit (resume='auto') or snapshot"
            ) from self._failure

    @property
    def is_over(self) -> bool:
        """There is nothing to close: it is closed, or another process's."""
        return self._is_closed or os.getpid() != self._pid

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def end(self) -> None:
        """From now on it is closed, and there is no run."""
        self._is_closed = True
        self.run = None
        self._failure = None  # its traceback may hold a forward's tensors, and they our hooks

    # --- steps of the optimizer -------------------------------------------------------------------------------------

    def take_step(self, train_more: Callable[[], None]) -> None:
        """What `optimizer.step()` does.

        Args:
            train_more: puts another run in place of the current one, which trains what now has gradients too.
        """
        self.check_usable()
        run = self.running("optimizer.step()")
        with self.turns.turn():
            with self._clock.phase("step"):
                self._take_step(run, train_more)
            self._clock.end_step()

    def _take_step(self, run: TrainingSession, train_more: Callable[[], None]) -> None:
        if run.model.gathering.is_open:
            raise StateError("optimizer.step() inside manager.gather: leave the gather first")
        run.model.passes.abandon()
        run.model.finish_update(in_order=True)
        run.model.follow_groups()
        if run.model.has_more_to_train:
            train_more()
            run = self.running("optimizer.step()")
        run.model.check_step()
        if not run.model.updates.has_begun_early:
            self.begin_step()
        learn, step = run.model.updates.in_order, self._counters.step + 1
        try:
            with self._on_all_ranks(step):
                run.model.update()
                run.pager.end_step(learn)
        except BaseException as error:
            self.fail(step, error)
            run.model.step_undone()
            raise
        self._counters.step = step
        self._user.note_rng()
        run.committer.step_done(self._counters.step)

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
        """Parameters and state are about to be changed; the writes of the step before are long done."""
        run = self.running("a step")
        run.plan.inventory.check_files()
        run.committer.before_step()

    def undo_update(self, sections: Sequence[Section], error: BaseException, ahead: int) -> bool:
        """Updates outside of `optimizer.step()` failed half-way: have groups as before their step. Returns whether they are.

        Args:
            sections: the groups'.
            error: what went wrong.
            ahead: that step is so many after the last one that was counted.
        """
        return self.fail(self._counters.step + ahead, error, sections)

    def fail(self, step: int, error: BaseException, sections: Sequence[Section] | None = None) -> bool:
        """`step` failed half-way: have `sections`, or all, as before it. Where that cannot be, only closing is left.

        Returns:
            Whether they are. Where there is no run, they are not.
        """
        self._failure, self._failed_step = error, step
        if self.run is not None and self.run.roll_back(step - 1, sections):
            self._failure = None
        return self._failure is None

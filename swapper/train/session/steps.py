"""Steps of the optimizer: taking one with the current run, and undoing one that failed half-way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swapper.errors import StateError
from swapper.paging.section import Section
from swapper.runtime.stats import StepClock
from swapper.train.session.session_slot import SessionSlot
from swapper.train.session.training_session import TrainingSession
from swapper.train.session.user_state import UserState


class Steps:
    """Counts them in the clock's counters.

    Args:
        current: where the run is.
        clock: measures them.
        user: what belongs to a step besides.
        take_up_more: puts another run in place of the current one, which trains what now has gradients too.
    """

    def __init__(
        self, current: SessionSlot, clock: StepClock, user: UserState, take_up_more: Callable[[], None]
    ) -> None:
        self._current = current
        self._clock = clock
        self._counters = clock.counters
        self._user = user
        self._take_up_more = take_up_more

    def take(self) -> None:
        """What `optimizer.step()` does."""
        self._current.check_usable()
        run = self._current.running("optimizer.step()")
        with self._current.turns.turn():
            with self._clock.phase("step"):
                self._take(run)
            self._clock.end_step()

    def _take(self, run: TrainingSession) -> None:
        if run.model.gathering.is_open:
            raise StateError("optimizer.step() inside manager.gather: leave the gather first")
        run.model.passes.abandon()
        run.model.finish_update(in_order=True)
        run.model.follow_groups()
        if run.model.has_more_to_train:
            self._take_up_more()
            run = self._current.running("optimizer.step()")
        run.model.check_step()
        if not run.model.updates.has_begun_early:
            self.begin()
        learn = run.model.updates.in_order
        try:
            run.model.update()
            run.pager.end_step(learn)
        except BaseException as error:
            self._undo(self._counters.step + 1, error)
            run.model.step_undone()
            raise
        self._counters.step += 1
        self._user.note_rng()
        run.committer.step_done(self._counters.step)

    def begin(self) -> None:
        """Parameters and state are about to be changed; the writes of the step before are long done."""
        run = self._current.running("a step")
        run.plan.inventory.check_files()
        run.committer.before_step()

    def undo_update(self, sections: Sequence[Section], error: BaseException, ahead: int) -> bool:
        """Updates outside of `optimizer.step()` failed half-way: have groups as before their step. Returns whether they are.

        Args:
            ahead: that step is so many after the last one that was counted.
        """
        return self._undo(self._counters.step + ahead, error, sections)

    def _undo(self, step: int, error: BaseException, sections: Sequence[Section] | None = None) -> bool:
        """`step` failed half-way: have `sections`, or all, as before it. Where that cannot be, only closing is left."""
        self._current.fail(step, error)
        if self._current.running("a step").roll_back(step - 1, sections):
            self._current.recover()
        return not self._current.has_failed

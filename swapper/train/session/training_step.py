"""Takes training steps, and undoes one that fails half-way. It is over when each optimizer has stepped, or `one_step` ends.

[Note: what one training step is] A commit is a state that the user's script can resume from: between two of its
iterations. With one optimizer its `step()` ends an iteration. With several, swapper takes an iteration to have one
`step()` of each, in any order. An optimizer that steps again before all others have is not that, and is refused: the
state in between would be committed in the middle of an iteration, sooner or later. Such loops (several steps of a
discriminator for one of the generator) say where their iteration is, `with manager.one_step():`, and nothing between
its ends is committed, counted, or put into a snapshot.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn
from torch.optim import Optimizer

from swapper.durability.commit import CommitRecord, check_state
from swapper.durability.ranks import Ranks
from swapper.errors import CheckpointError, ConfigError, InvariantError, StateError
from swapper.paging.section import Section
from swapper.runtime.process import rng_states, set_rng_states
from swapper.runtime.stats import StepClock
from swapper.train.optimizer.optimizer_set import OptimizerSet
from swapper.train.session.training_session import TrainingSession
from swapper.train.state.module_state import ModuleState
from swapper.train.state.optim import restore_settings


class UserState:
    """Owns the state of one manager's user.

    Args:
        keeps_rng: the states of the random number generators belong to it.

    Attributes:
        extra: the user's values.
    """

    def __init__(self, keeps_rng: bool, resumed: CommitRecord | None) -> None:
        self.extra: dict[str, Any] = {} if resumed is None else dict(resumed.extra)
        self._resumed = resumed
        self._settings = copy.deepcopy(resumed.param_groups) if resumed else []  # torch changes tensors in place
        self._registered: dict[str, Any] = {}
        self._keeps_rng = keeps_rng
        self._rng: dict[str, Any] | None = None
        self._modules: ModuleState | None = None

    def register(self, objects: Mapping[str, Any], optimizers: OptimizerSet, step: int) -> None:
        """Add `objects`, with the state of the resumed commit if it has them.

        A scheduler's constructor sets the settings of a first step. Those of the resumed commit are restored, if no step has
        been taken since.

        Args:
            optimizers: of the offloaded model, if any.
            step: the present one.
        """
        known = {} if self._resumed is None or step != self._resumed.step else self._resumed.registered
        if any(name in known and _holds_optimizer(value) for name, value in objects.items()):
            groups = optimizers.param_groups[: len(self._settings)]  # of the commit: others were added since
            restore_settings(groups, copy.deepcopy(self._settings[: len(groups)]))
        for name, value in objects.items():
            if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
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

    def note_rng(self) -> None:
        """Note the random states at the end of a step."""
        if self._keeps_rng:
            self._rng = rng_states()

    def begin(self, model: nn.Module) -> None:
        """Note, before the first step, how the script has made the model's buffers, and the random states.

        Of a resumed run these are the commit's.
        """
        self._modules = ModuleState(model, {} if self._resumed is None else self._resumed.modules)
        if self._resumed is None or self._resumed.rng is None:
            self.note_rng()
        elif self._keeps_rng:
            self._rng = self._resumed.rng

    def restore(self, model: nn.Module) -> None:
        """Set buffers and generators to the resumed commit's, after `offload`, which may have drawn numbers.

        Raises:
            CheckpointError: the model lacks what the commit has.
        """
        if self._modules is not None:
            self._modules.restore(model)
        if self._rng is not None and self._resumed is not None:
            set_rng_states(self._rng)

    def in_snapshot(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return it for a snapshot, with `extra` over the values of `self.extra`."""
        registered = {name: value.state_dict() for name, value in self._registered.items()}
        content = {"registered": registered, "extra": {**self.extra, **extra}}
        return content if self._rng is None else {**content, "rng": self._rng}

    def in_commit(self, model: nn.Module) -> dict[str, Any]:
        """Return its fields of a CommitRecord, and what `model` has besides parameters."""
        return {
            "registered": {name: copy.deepcopy(value.state_dict()) for name, value in self._registered.items()},
            "extra": copy.deepcopy(self.extra),
            "rng": self._rng,
            "modules": {} if self._modules is None else self._modules.in_commit(model),
        }


def _holds_optimizer(value: object) -> bool:
    """Return True for torch's schedulers, and for those of others that are made as they are."""
    held = getattr(value, "__dict__", {}).values()
    return any(
        isinstance(one, Optimizer) for some in held for one in (some if isinstance(some, list | tuple) else (some,))
    )


class TrainingStep:
    """The training step that goes on, or the last one, in whatever session of a manager.

    Args:
        clock: divides steps into phases; has the manager's counters.
        ranks: take the step together, or this one alone.
        user: notes random states at its end.

    Attributes:
        is_open: an optimizer has stepped in it, and it is not over.
        failure: what has failed half-way and could not be undone, and its error; None: nothing.
    """

    def __init__(self, optimizers: OptimizerSet, clock: StepClock, ranks: Ranks, user: UserState) -> None:
        self._optimizers = optimizers
        self._clock = clock
        self._counters = clock.counters
        self._ranks = ranks
        self._user = user
        self.failure: tuple[str, BaseException] | None = None
        self._steps: Counter[int] = Counter()  # by optimizer; of the last training step if none is open
        self._skipped: set[int] = set()  # optimizers whose step torch.amp.GradScaler left out
        self._is_held = False
        self.is_open = False
        self._learn = True  # see `Pager.end_step`

    def register(self, objects: Mapping[str, Any]) -> None:
        """Add `objects` to the user's state. See UserState.register."""
        self._user.register(objects, self._optimizers, self._counters.step)

    def check(self, member: int) -> None:
        """Raise StateError if optimizer `member` has stepped already in this training step, and another one has not."""
        if not self._is_held and member in self._done:
            raise StateError(
                f"{self._optimizers.describe_member(member)} is about to step again before {self._waiting()}, so the end of a "
                "training step, which is what is committed, is not known: put each iteration of such a loop, with the steps of "
                "all optimizers, into `with manager.one_step():`"
            )

    def check_between(self, verb: str) -> None:
        """Raise StateError if a training step is open."""
        if self.is_open:
            until = "manager.one_step ends" if self._is_held else self._waiting()
            raise StateError(f"{verb} in the middle of a training step, which goes on until {until}: wait for its end")

    def _waiting(self) -> str:
        waiting = set(range(len(self._optimizers.members))) - self._done
        if not waiting:
            return "the iteration is over whose manager.one_step failed"
        names = map(self._optimizers.describe_member, sorted(waiting))
        return f"{' and '.join(names)} {'has' if len(waiting) == 1 else 'have'} stepped"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Have it go on as long as the context."""
        if self._is_held:
            raise StateError("manager.one_step inside manager.one_step: leave the outer one first")
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    @property
    def is_over(self) -> bool:
        """True if nothing more belongs to it, unless a context of `hold` says so."""
        return not self._is_held and len(self._done) == len(self._optimizers.members)

    @property
    def _done(self) -> set[int]:
        return {*(self._steps if self.is_open else ()), *self._skipped}

    # --- taking steps -------------------------------------------------------------------------------------------------

    @contextmanager
    def taking(
        self, run: TrainingSession, member: int, train_more: Callable[[], TrainingSession]
    ) -> Iterator[TrainingSession]:
        """Return a context that takes the step of `optimizer.step()`, in the session that it yields.

        Args:
            run: the session.
            member: the optimizer's number.
            train_more: replaces the session by one that also trains the parameters that have gradients now.
        """
        self._ranks.check_still_so()
        with self._clock.phase("step"):
            step, has_begun = self._counters.step + 1, run.model.updates.has_begun_early
            with self._told(run, has_begun or self.is_open):
                run = self._prepare(run, member, train_more)
            model = run.model
            if (is_first := not self.is_open) and not has_begun:
                self.begin(run)
            steps, learn = (Counter[int](), model.updates.in_order) if is_first else (self._steps.copy(), self._learn)
            steps[member] += 1
            is_alone, is_over, is_agreed = not model.updates.is_open or (has_begun and is_first), False, False
            try:
                self._steps, self._learn, self.is_open = steps, learn, True
                with self._on_all_ranks(step):
                    model.before_update()
                    yield run
                    if is_over := self.is_over:  # results of updates that backward has made are waited for by then
                        run.placed.processor.after_update()
                        run.pager.end_step(self._learn)
                is_agreed = self._ranks.are_together
                if is_over:
                    self._count(run, step)
            except BaseException as error:  # one that another thread sends may come between any two calls
                if self._counters.step == step:
                    self._count(run, step)
                elif is_agreed:
                    self.fail_for_good(f"step {step}", error)
                else:
                    self._undo(run, member, error, is_alone)
                raise
        if is_over:
            self._clock.end_step()

    def skip(self, run: TrainingSession, member: int) -> None:
        """Leave out an optimizer's step."""
        self._skipped.add(member)
        if self.is_over:
            self.end(run)

    def end(self, run: TrainingSession) -> None:
        """End the training step outside of `optimizer.step()`. If all optimizers have skipped theirs, there was none."""
        if not self.is_open:
            self._skipped.clear()
            return
        run.pager.end_step(self._learn)
        self._count(run, self._counters.step + 1)
        self._clock.end_step()

    def begin(self, run: TrainingSession) -> None:
        """Prepare for changes of parameters and state. The writes of the last step are done by then, on all ranks."""
        with self._told(run):
            run.plan.inventory.check_files()
            run.committer.before_step()
        run.committer.meet_ranks()

    def _count(self, run: TrainingSession, step: int) -> None:
        """Count the training step, and have it committed. If an exception came in between, it may be called again."""
        self._user.note_rng()
        self._counters.step = step
        self.is_open = False
        self._skipped.clear()
        run.committer.step_done(step)

    def _prepare(self, run: TrainingSession, member: int, train_more: Callable[[], TrainingSession]) -> TrainingSession:
        """Check that the step can be taken, and return the session that takes it."""
        model = run.model
        if model.gathering.is_open:
            raise StateError("optimizer.step() inside manager.gather: leave the gather first")
        self.check(member)
        model.passes.abandon()
        if not self.is_open or model.updates.has_open(member):
            model.finish_update(in_order=True)
        model.follow_groups()
        if model.has_more_to_train:
            run = train_more()
            run.model.follow_groups()
        run.model.check_step(member)
        return run

    def fail_for_good(self, what: str, error: BaseException) -> None:
        """Note that `what` has failed half-way and cannot be undone: the manager can only be closed."""
        self.failure = what, error

    # --- undoing ------------------------------------------------------------------------------------------------------

    def fail(
        self,
        run: TrainingSession | None,
        error: BaseException,
        sections: Sequence[Section] | None = None,
        ahead: int = 1,
    ) -> bool:
        """Restore `sections`, or all, to the state before a step that failed half-way. Return True if they are restored.

        Otherwise the manager can only be closed; so too after an InvariantError, which each repetition would meet again.

        Args:
            ahead: the step is this many after the last counted one.
        """
        step = self._counters.step + ahead
        self.failure = f"step {step}", error
        is_bug = isinstance(error, InvariantError)
        if run is None or is_bug or not self._may_undo(run, sections) or not run.roll_back(step - 1, sections):
            return False
        self.failure = None
        return True

    def _undo(self, run: TrainingSession, member: int, error: BaseException, is_alone: bool) -> None:
        """Undo an optimizer's step, which failed half-way, if that is possible.

        Args:
            is_alone: no other optimizer's updates are open.
        """
        if self._steps.total() == 1:
            self.fail(run, error)
        elif is_alone and not run.plan.inventory.staying_state:
            run.model.passes.forget_leases()
            self.fail(run, error, run.model.sections_of(member))
        else:
            self.fail_for_good(f"step {self._counters.step + 1}", error)
        self._steps[member] -= 1
        self._steps = +self._steps
        self.is_open = bool(self._steps)
        run.model.step_undone()

    def _may_undo(self, run: TrainingSession, sections: Sequence[Section] | None) -> bool:
        """Return True if in this training step nothing has changed the sections but the step that failed."""
        if run.pager.broken_by:
            return False
        return sections is None or all(self._steps[member] <= 1 for member in run.model.members_of(sections))

    # --- other ranks --------------------------------------------------------------------------------------------------

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
        if self._ranks.are_together:
            with self._counters.waiting("rank", f"to end step {step}"):
                self._ranks.agree(failure, f"step {step}")

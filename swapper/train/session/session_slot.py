"""Holds a manager's present session: opens and replaces it, and checks at each use that it can be used."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from swapper.capabilities import Feature, check
from swapper.durability.commit import CommitRecord, describe_plans
from swapper.durability.directory import RunDirectory
from swapper.durability.ranks import boot_id
from swapper.errors import StateError
from swapper.modules.cold import leave_cold
from swapper.modules.turns import Turns
from swapper.paging.section import Section
from swapper.runtime.counters import FAMILIES
from swapper.runtime.sizes import format_bytes
from swapper.runtime.stats import StepClock, StepStats
from swapper.train.gradients.grads import GradientStash
from swapper.train.groups.session_guard import CLOSED
from swapper.train.optimizer.optimizer_set import OptimizerSet
from swapper.train.planning.plan import Plan, describe_models, placement_lines
from swapper.train.planning.request import Request
from swapper.train.session.origin import Origin
from swapper.train.session.training_session import TrainingSession
from swapper.train.session.training_step import TrainingStep, UserState
from swapper.train.state.conditions import names_by_group
from swapper.train.state.optim import PagedOptimizer, StateOwner, packed_groups

TrainMore = Callable[[Callable[[], None]], None]


class SessionSlot:
    """Owns the present session, from its opening to its end, and the optimizers that the user has in place of his.

    Args:
        backend: of transfers.
        clock: divides steps into phases; has the manager's counters.

    Attributes:
        run: the session; None before `offload`, while the manager is parked, and after `close`.
        training_step: the present one, whatever session takes it.
        turns: of the threads that use the model: a forward, a backward or a step each.
    """

    def __init__(self, directory: RunDirectory, backend: str, clock: StepClock, user: UserState) -> None:
        self.run: TrainingSession | None = None
        self.turns = Turns()
        self.directory = directory
        self.backend = backend
        self.clock = clock
        self.user = user
        self.training_step = self._make_step(OptimizerSet(()))
        self._counters = clock.counters
        self._optimizers: list[PagedOptimizer] = []
        self._given_members: list[list[str]] = []
        self._pid = os.getpid()
        self._is_closed = False
        self._away = ""  # a sentence that refuses every use while there is no session for a while
        self._parked: Sequence[nn.Parameter] = ()  # the model's meanwhile
        self._left: BaseException | None = None

    def _make_step(self, optimizers: OptimizerSet) -> TrainingStep:
        return TrainingStep(optimizers, self.clock, self.directory.ranks, self.user)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def begin(self, request: Request, names: Mapping[int, str], train_more: TrainMore) -> Sequence[PagedOptimizer]:
        """Begin the run: return the replacements of the user's optimizers, whose state `open` provides.

        Args:
            names: of the parameters, by id.
            train_more: called with a function that adds to an optimizer's groups; calls it, and replaces the session by one
                that trains all of them.
        """
        self._given_members = names_by_group(request.optimizers.param_groups, names)
        self.training_step = self._make_step(request.optimizers)
        self._optimizers = []
        for member, given in enumerate(request.given_optimizers):
            skip = partial(self._skip_step, member) if len(request.given_optimizers) > 1 else None
            take = partial(self._take_step, member, train_more)
            self._optimizers.append(PagedOptimizer(given, take, train_more, skip))
        return self._optimizers

    def open(self, plan: Plan, origin: Origin, gradients: GradientStash | None = None) -> TrainingSession:
        """Open a session, and give the optimizers their state in it. If that fails, call `drop` or `detach`.

        Args:
            gradients: of an earlier session.
        """
        run = self.run = TrainingSession(plan, origin, self, self._make_describe(plan))
        run.begin(origin, gradients)
        request = plan.request
        for member, optimizer in enumerate(self._optimizers):
            owner = run.model.optimizer_state
            optimizer.bind(request.model.state_owner(owner, request.optimizers, request.given_optimizers, member))
        return run

    def detach(self, verb: str, why: str, state: StateOwner | None = None) -> None:
        """Close the session, all of whose content is written, and release its memory, for another one to open.

        Args:
            verb: what the user called.
            why: a sentence for accesses by graphs that were made before.
            state: what the optimizers show meanwhile.
        """
        for optimizer in self._optimizers:
            optimizer.bind(state)
        try:
            self.running(verb).detach(why)
        finally:
            self.run = None
        gc.collect()

    def drop(self) -> None:
        """Close the session, if there is one, without another to open."""
        run, self.run = self.run, None
        if run is not None:
            run.close()

    def leave(self, why: str, parameters: Sequence[nn.Parameter] = ()) -> None:
        """Refuse every use while there is no session, with the sentence `why`; "": there is one again.

        Args:
            parameters: the model's, if they are without data.
        """
        self._away, self._parked = why, parameters

    def end(self) -> None:
        """Mark it closed, and forget the session, which the caller closes, the optimizers and all errors.

        An error's traceback may refer to a forward's tensors, and they to our hooks.
        """
        self._is_closed = True
        for parameter in self._parked:
            leave_cold(parameter)
        self.run, self._left = None, None
        self.leave("")
        self._optimizers = []
        self.training_step = self._make_step(OptimizerSet(()))

    def _make_describe(self, plan: Plan) -> Callable[[int], CommitRecord]:
        """Return the function that makes the record of a step, its `files`, `sections` and `state_entries` still empty."""
        request, frozen, directory = plan.request, plan.request.frozen, self.directory
        described, names = describe_plans(plan.inventory.plans), plan.inventory.names
        external = {} if frozen is None else frozen.stamps(plan.inventory.plans)
        shards = dict(request.model.rows)

        def describe(step: int) -> CommitRecord:
            members = names_by_group(request.optimizers.param_groups, names)
            return CommitRecord(
                step=step,
                rank=directory.ranks.rank,
                world_size=directory.ranks.size,
                boot_id=boot_id(),
                optimizer=request.optimizers.kind,
                placement=plan.places,
                plans=described,
                files={},
                sections=[],
                param_groups=copy.deepcopy(packed_groups(request.optimizers.param_groups)),
                state_entries={},
                external=external,
                members=None if members == self._given_members else members,  # as in `offload`
                job=directory.job,
                shards=shards,
                **self.user.in_commit(request.model.given),
            )

        return describe

    # --- uses ---------------------------------------------------------------------------------------------------------

    def running(self, verb: str) -> TrainingSession:
        """Return the session. Raises StateError, naming `verb`, if no model is offloaded."""
        if self.run is None:
            self.check_usable()
            raise StateError(f"{verb} needs an offloaded model: call manager.offload first")
        return self.run

    def check(self, is_evaluation: bool = False) -> None:
        """Check that the manager can be used, and commit the last step if it is due and its writes are done. The turn is taken."""
        self.check_usable()
        if self.run is not None:
            self.run.committer.enter(is_evaluation)

    def check_to_write(self) -> None:
        """Check the same before a change by hand, which belongs to the last step. [Note: changes by hand], committer.py"""
        self.check_usable()
        if self.run is not None:
            self.run.committer.before_change()

    def check_to_write_in_pass(self) -> None:
        """The same before a forward that changes parameters, which belongs to the next step: commit the last one as it was."""
        self.check_usable()
        if self.run is not None:
            self.run.committer.before_change_in_pass()

    def check_usable(self) -> None:
        """Raise StateError if the manager cannot be used."""
        if os.getpid() != self._pid:
            raise StateError(
                "the manager was touched in a forked child: it works only in the process that made it. "
                "Keep the model out of DataLoader workers, or start them by spawn"
            )
        if self._is_closed:
            raise StateError(CLOSED)
        if self._away:
            raise StateError(self._away)
        if self._left is not None:
            raise StateError(
                f"a forward or backward ended while FSDP2 gathered shards ({self._left}), where the other ranks wait for this "
                "one: end this process, so that they end too, and restart all with resume='auto'"
            ) from self._left
        if self.training_step.failure is not None:
            failed, error = self.training_step.failure
            raise StateError(
                f"{failed} failed half-way ({error}): memory and files hold a mix of two steps. "
                "Close the manager and resume from the last commit (resume='auto') or snapshot"
            ) from error
        if self.run is not None and self.run.pager.broken_by:
            raise StateError(
                f"{self.run.pager.broken_by} was raised in the middle of a change of pages (by another thread, or a second "
                "Ctrl-C): memory is in no known state, and nothing more is committed. Close the manager and resume from the "
                "last commit (resume='auto') or snapshot"
            )

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

    def describe(self, stats: StepStats, host_bytes: int) -> str:
        """Return what `print(manager)` shows: directory, condition, models, placement, budget, last step."""
        try:
            self.check_usable()
            condition = "no model yet: call manager.offload" if self.run is None else "in use"
        except StateError as error:
            condition = str(error)
        lines = [("directory", ", ".join(map(str, self.directory.drives.directories))), ("condition", condition)]
        if self.run is None:
            lines.append(("host memory", f"{format_bytes(host_bytes)} at most"))
        else:
            lines += [("model", describe_models(self.run.plan)), *placement_lines(self.run.plan)]
        lines.append(("last step", f"{stats.step}: {stats.brief}" if stats.step else "none in this process"))
        return "\n".join(f"{name:<18}{text}" for name, text in lines)

    @property
    def has_failed(self) -> bool:
        """True if memory holds a mix of two steps, or is in no known state: nothing of it is to be committed."""
        return self.training_step.failure is not None or (self.run is not None and bool(self.run.pager.broken_by))

    # --- steps, and what SessionEvents declares besides ---------------------------------------------------------------

    def _take_step(self, member: int, train_more: TrainMore) -> None:
        """Take the step of `optimizer.step()`."""
        self.check_usable()
        run = self.running("optimizer.step()")

        def replace_session() -> TrainingSession:
            train_more(lambda: None)
            return self.running("optimizer.step()")

        step = self.training_step
        with self.turns.turn(), step.taking(run, member, replace_session) as run:
            run.model.updates.take_step(member, step.is_over)

    def _skip_step(self, member: int) -> None:
        """Leave out an optimizer's step: torch.amp.GradScaler has found infinite gradients."""
        self.check_usable()
        self.training_step.check(member)
        with self.turns.turn():
            self.training_step.skip(self.running("optimizer.step()"), member)

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """See `SwapManager.one_step`."""
        self.check_usable()
        run = self.running("one_step")
        check({*run.plan.request.features, Feature.ONE_STEP})
        with self.training_step.hold():
            yield
        with self.turns.turn():
            self.check_usable()
            self.training_step.end(self.running("one_step"))

    @property
    def step_is_open(self) -> bool:
        return self.training_step.is_open

    def check_between_steps(self, verb: str) -> None:
        self.training_step.check_between(verb)

    def begin_step(self) -> None:
        self.training_step.begin(self.running("a step"))

    def changed_in_pass(self) -> None:
        self.running("a forward").committer.changed_in_pass()

    def undo_update(self, sections: Sequence[Section], error: BaseException, ahead: int) -> bool:
        return self.training_step.fail(self.run, error, sections, max(ahead, int(self.step_is_open)))

    def fail_change(self, error: BaseException) -> None:
        self.training_step.fail_for_good("a change of parameters with fp32 masters", error)

    def lose_ranks(self, error: BaseException) -> None:
        self._left = error

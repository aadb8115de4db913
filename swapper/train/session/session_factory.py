"""How a manager comes to its run: opened for what the user asks, gone on with from a commit, or another one that trains more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swapper.durability.commit import CommitRecord, check_group_count, check_same, check_trained, describe_plans
from swapper.durability.directory import RunDirectory
from swapper.durability.fallback import Commit
from swapper.durability.recovery import follow_placement, page_bytes_of
from swapper.errors import ConfigError
from swapper.io.tuning import find_tuning_of
from swapper.runtime.stats import StepClock
from swapper.train.layout.content import GivenSource
from swapper.train.layout.frozen import check_external
from swapper.train.layout.initial import Values, check_buffers
from swapper.train.layout.inventory import Inventory
from swapper.train.optimizer.membership import names_by_group
from swapper.train.optimizer.optim import PagedOptimizer
from swapper.train.session.plan import Plan
from swapper.train.session.relayout import Relayout
from swapper.train.session.request import Request
from swapper.train.session.session_guard import SessionGuard
from swapper.train.session.session_slot import SessionSlot
from swapper.train.session.steps import Steps
from swapper.train.session.training_session import Callbacks, Origin, TrainingSession
from swapper.train.session.user_state import UserState


class SessionFactory:
    """Puts runs into a manager's `current`, and binds the user's optimizer to them.

    Args:
        current: where the run will be.
        directory: the manager's.
        clock: divides runs into steps and phases.
        user: what belongs to a step besides.
        record: the commit to go on from, or None.
        fallback: the one before it, if that is still a way back.
        fsync: commits survive a power loss.
        check_reads: what is read from swap files is compared with what was written.
        stall_s: how long one wait may be before the watchdog writes about it; None: as long as it likes.
        operates: operations on parameters that are away are done; else they are refused.
    """

    _request: Request | None = None
    _given_members: list[list[str]]
    _optimizer: PagedOptimizer | None = None

    def __init__(
        self,
        current: SessionSlot,
        directory: RunDirectory,
        clock: StepClock,
        user: UserState,
        record: CommitRecord | None,
        fallback: Commit | None,
        *,
        fsync: bool,
        check_reads: bool,
        stall_s: float | None,
        operates: bool,
    ) -> None:
        self._current = current
        self._directory = directory
        self._clock = clock
        self._counters = clock.counters
        self._user = user
        self._record = record
        self._fallback = fallback
        self._fsync = fsync
        self._check_reads = check_reads
        self._stall_s = stall_s
        self._operates = operates
        self._steps = Steps(current, clock, user, lambda: self._train_more(lambda: None))

    @property
    def _asked(self) -> Request:
        assert self._request is not None
        return self._request

    def open(self, request: Request, inventory: Inventory, init: Any) -> PagedOptimizer:
        """Open the run and have the model in it. Where that fails, `give_up`.

        Args:
            request: what the user asks.
            inventory: what the model and the optimizer consist of.
            init: where first values come from, or None.

        Returns:
            What takes the place of the user's optimizer.
        """
        self._request = request
        self._given_members = names_by_group(request.optimizer, _names(inventory))
        record, model, optimizer = self._record, request.model, request.optimizer
        plan = self._agree_on_plan(lambda: self._plan(request, inventory, init is not None))
        run = self._current.run = self._open_run(plan, Origin.of(record, self._fallback))
        external = run.plan.inventory.external
        values = Values(init, model, run.engine, external) if init is not None and record is None else None
        if record is not None:
            self._counters.step = record.step
        run.adopt(GivenSource(optimizer) if record is None else None)
        self._optimizer = PagedOptimizer(optimizer, self._steps.take, self._train_more)
        self._optimizer.bind(run.model.optimizer_state)
        self._user.begin_rng()
        if record is None:
            run.committer.step_done(0)
        run.begin(values)
        self._user.restore_rng()
        self._clock.start(find_tuning_of(self._directory.drives))
        return self._optimizer

    def give_up(self) -> None:
        """Close what was opened, and leave the directory as it was."""
        if self._current.run is not None:
            self._current.run.close()
        self._current.run = None
        self.remove_strays()

    def forget(self) -> None:
        """The manager closes: let go of the user's model and optimizer."""
        self._optimizer = self._request = None

    def remove_strays(self) -> None:
        """Remove what a run that ended has left in the directory beside its commit. No run is open."""
        self._directory.remove_strays(self._record.files.values() if self._record is not None else ())

    def _agree_on_plan(self, make: Callable[[], Plan]) -> Plan:
        """Return this rank's plan. Where one rank can make none, or they would commit at different steps, all fail."""
        plan, every = self._directory.ranks.settle("manager.offload", make, lambda plan: plan.commit_every)
        if len(set(every)) > 1:
            steps = ["never" if n is None else f"every {n} steps" for n in every]
            commits = "; ".join(f"rank {rank} {when}" for rank, when in enumerate(steps))
            raise ConfigError(
                f"ranks would commit at different steps ({commits}), so none could be gone on from: give all the same "
                "commit_every=, placements and host_memory"
            )
        return plan

    def _plan(self, request: Request, inventory: Inventory, may_be_meta: bool) -> Plan:
        record, frozen = self._record, request.frozen
        if record is None:
            if frozen is not None and not may_be_meta:
                check_buffers(request.model, "frozen_from")
            return request.plan(inventory)
        check_trained(record, {n for g in inventory.groups for n, _ in g.parameters}, inventory.forms.keys())
        check_external(record.external, {} if frozen is None else frozen.stamps(inventory.plans))
        check_same(record, inventory.plans, request.kind)
        check_group_count(record, len(request.optimizer.param_groups))
        check_buffers(request.model, "what a run goes on from")
        params = "auto" if request.params == "device" else request.params
        state = "auto" if request.optimizer_state == "device" else request.optimizer_state
        places = follow_placement(record, params, state)
        return request.plan(inventory, places, page_bytes=page_bytes_of(record), existing_files=record.files)

    def _open_run(self, plan: Plan, origin: Origin) -> TrainingSession:
        request, directory, current, steps = self._asked, self._directory, self._current, self._steps
        described, frozen = describe_plans(plan.inventory.plans), request.frozen
        external = {} if frozen is None else frozen.stamps(plan.inventory.plans)
        names = _names(plan.inventory)
        return TrainingSession(
            request.model, request.optimizer, plan, directory, origin, self._clock,
            Callbacks(
                SessionGuard(current.check, current.check_to_write, current.turns, self._operates), steps.begin, steps.undo_update,
                lambda step: self._user.in_commit(
                    step, directory, request, plan.places, described, external, self._edited_members(names)
                ),
            ),
            backend=current.backend, fsync=self._fsync, check_reads=self._check_reads, stall_s=self._stall_s,
        )  # fmt: skip

    def _edited_members(self, names: Mapping[int, str]) -> list[list[str]] | None:
        """Return which parameters the optimizer's groups have; None where they are those that the script gives."""
        members = names_by_group(self._asked.optimizer, names)
        return None if members == self._given_members else members

    def _train_more(self, add: Callable[[], None]) -> None:
        """Do `add`, which gives the optimizer more to train, and go on in a run that has room for it."""
        current = self._current
        with current.turns.turn():
            self._change_over(current, add)

    def _change_over(self, current: SessionSlot, add: Callable[[], None]) -> None:
        current.check()
        change = Relayout(current.running("add_param_group"), self._asked, self._directory, self._open_run)
        current.run = None
        optimizer = self._optimizer
        assert optimizer is not None
        optimizer.bind(None)
        try:
            change.train_more(add, self._counters.step)
        except BaseException as error:
            if change.run is None:
                current.fail(self._counters.step, error)
            raise
        finally:
            current.run = change.run
            if change.run is not None:
                optimizer.bind(change.run.model.optimizer_state)


def _names(inventory: Inventory) -> dict[int, str]:
    return {id(parameter): name for group in inventory.groups for name, parameter in group.parameters}

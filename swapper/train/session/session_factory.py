"""Plans and opens a manager's session: new, resumed from a commit, or laid out again to train more."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any

from swapper.capabilities import Feature, check
from swapper.durability.beginning import Beginning, EarlierRanks
from swapper.durability.commit import (
    CommitRecord,
    check_group_count,
    check_same,
    check_trained,
    describe_plans,
    named_files,
)
from swapper.durability.directory import FALLBACK_NAME
from swapper.durability.ranks import boot_id
from swapper.durability.recovery import follow_placement, page_bytes_of
from swapper.errors import CheckpointError, ConfigError, StateError, UnsupportedError
from swapper.io import beneath
from swapper.io.drives import find_tuning_of
from swapper.paging.store.swap_files import first_free_number
from swapper.train.layout.content import GivenSource, ReshardedSource
from swapper.train.layout.frozen import check_external
from swapper.train.layout.initial import check_buffers
from swapper.train.layout.inventory import Inventory
from swapper.train.planning.plan import Plan, plan_run
from swapper.train.planning.request import Request
from swapper.train.session.alike import Given, Initial, check_alike
from swapper.train.session.parking import Parking
from swapper.train.session.relayout import VERB, Relayout
from swapper.train.session.session_slot import SessionSlot
from swapper.train.session.training_session import Origin, TrainingSession
from swapper.train.session.training_step import TrainingStep
from swapper.train.state.conditions import names_by_group
from swapper.train.state.optim import PagedOptimizer, StateOwner, packed_groups

log = logging.getLogger("swapper")


class SessionFactory:
    """Puts sessions into a manager's slot, and binds the user's optimizer to them."""

    _given_members: list[list[str]]
    _optimizers: Sequence[PagedOptimizer] = ()

    def __init__(self, current: SessionSlot, beginning: Beginning) -> None:
        self._current = current
        self._directory, self._clock, self._user = current.directory, current.clock, current.user
        self._record, self._fallback = beginning.record, beginning.fallback
        self._earlier = beginning.earlier
        self._kept = beginning.kept if self._record is None else frozenset(self._record.files.values())
        self._parking = Parking(current)

    # --- planning ---------------------------------------------------------------------------------------------------

    def plan(self, request: Request, may_be_meta: bool, made: Plan | None = None) -> Plan:
        """Return the plan for `open`. A resumed run keeps its layout.

        Args:
            request: the user's model, optimizer and options.
            may_be_meta: parameters may be on the meta device: their values come later.
            made: an earlier plan of this request, which is returned.

        Raises:
            StateError: the model or the optimizer has changed since `made`.
        """
        record, frozen = self._record, request.frozen
        inventory = request.inventory(may_be_meta or record is not None or self._earlier is not None)
        if made is not None:
            _check_same_inventory(made.inventory, inventory)
            return made
        tuning = find_tuning_of(self._directory.drives)
        if record is None:
            if self._earlier is not None:
                self._check_same_optimizer(self._earlier.first, request, inventory)
                self._resharded(request, inventory).close()  # which compares
            return plan_run(request, inventory, tuning=tuning)
        self._check_same_optimizer(record, request, inventory)
        check_external(record.external, {} if frozen is None else frozen.stamps(inventory.plans))
        check_same(record, inventory.plans, request.optimizers.kind)
        options = request.options
        wishes = ("auto" if wish == "device" else wish for wish in (options.params, options.optimizer_state))
        places, page_bytes = follow_placement(record, *wishes), page_bytes_of(record)
        return plan_run(request, inventory, places, tuning=tuning, page_bytes=page_bytes, existing_files=record.files)

    def _check_same_optimizer(self, record: CommitRecord, request: Request, inventory: Inventory) -> None:
        check_trained(record, set(inventory.names.values()), inventory.forms.keys())
        check_group_count(record, len(request.optimizers.param_groups))

    def _resharded(self, request: Request, inventory: Inventory) -> ReshardedSource:
        """Return the content of the earlier run's files, which belongs to this rank."""
        assert self._earlier is not None
        return ReshardedSource(self._earlier.ranks, inventory.plans, request.model.rows)

    # --- opening ----------------------------------------------------------------------------------------------------

    def open(self, make: Callable[[], Plan], init: Any) -> Sequence[PagedOptimizer]:
        """Open the session and adopt the model. If that fails, call `give_up`.

        Returns:
            The replacements of the user's optimizers.
        """
        plan, ranks = self._agree(lambda: self._with_buffers(make(), init is not None), init), self._directory.ranks
        if ranks.size > 1 and not ranks.are_together:
            check({*plan.request.features, Feature.RANKS_ALONE})
        if plan.request.model.is_sharded:
            ranks.in_background()  # for snapshots
        optimizers = ranks.settle("manager.offload", lambda: self._open(plan, init), lambda _: None)[0]
        if self._earlier is not None:  # not before all ranks have what they need: offload may be tried again
            self._earlier.close()
            self._earlier = None
        return optimizers

    def _open(self, plan: Plan, init: Any) -> Sequence[PagedOptimizer]:
        request, record = plan.request, self._record
        self._given_members = names_by_group(request.optimizers.param_groups, plan.inventory.names)
        self._current.training_step = TrainingStep(request.optimizers)
        if self._earlier is not None:
            return self._open_resharded(plan, self._earlier)
        run = self._current.run = self._open_run(plan, Origin.of(record, self._fallback))
        values = None
        if init is not None and record is None:
            assert run.engine is not None
            values = request.model.initial_values(init, run.engine, plan.inventory.external)
        if record is not None:
            self._clock.counters.step = record.step
        run.adopt(GivenSource(request.optimizers) if record is None else None)
        self._bind_new(run, request)
        self._user.begin_rng()
        if record is None:
            run.committer.step_done(0)
        run.begin(values)
        self._user.restore_rng()
        self._clock.start(None if plan.tuning is None else plan.tuning.seconds_for, plan.found.step)
        return self._optimizers

    def _open_resharded(self, plan: Plan, earlier: EarlierRanks) -> Sequence[PagedOptimizer]:
        """Begin with the content of other numbers of ranks, and commit that. Until then the directory has what it had."""
        directory = self._directory
        first = first_free_number(directory.path)
        run = self._current.run = self._open_run(plan, Origin(first_file=first, edits=earlier.first.edits))
        with closing(self._resharded(plan.request, plan.inventory)) as content:
            run.adopt(content)
        run.restore_settings(earlier.first)
        self._bind_new(run, plan.request)
        self._user.begin_rng()
        run.begin(None)
        self._kept |= run.file_names
        run.committer.write_all(earlier.first.step)
        beneath.unlink(directory.path / FALLBACK_NAME)  # of an earlier step of this directory
        directory.remove_strays(run.file_names)
        self._kept = frozenset(run.file_names)
        self._clock.start(None if plan.tuning is None else plan.tuning.seconds_for, plan.found.step)
        return self._optimizers

    def _bind_new(self, run: TrainingSession, request: Request) -> None:
        self._optimizers = [self._paged(request, member) for member in range(len(request.given_optimizers))]
        self._bind(run)

    def give_up(self) -> None:
        """Close the session, and leave the directory as it was."""
        try:
            if self._current.run is not None:
                self._current.run.close()
        finally:
            self._current.run = None
            self.remove_strays()

    def parked(self) -> AbstractContextManager[None]:
        """Return a context in which the session's memory is the system's. See SwapManager.parked."""
        return self._parking.parked(self._open_run, self._bind, self._lend)

    def forget(self) -> None:
        """Drop the user's optimizers: the manager closes."""
        self._parking.end()
        self._optimizers = ()

    def remove_uncommitted(self) -> None:
        """Remove files that no commit names, as one that took the turn of a snapshot's. Requires that the session is closed."""
        try:
            if named := named_files(self._directory.path):
                self._directory.remove_strays(named)
        except (CheckpointError, OSError) as error:  # the next manager in this directory finds the same
            log.warning("%s: files that no commit names were not removed: %s", self._directory.path, str(error))

    def remove_strays(self) -> None:
        """Remove files in the directory that its commit does not name. Requires that no session is open."""
        self._directory.remove_strays(self._kept)

    def _with_buffers(self, plan: Plan, has_init: bool) -> Plan:
        """Return `plan`. Raise UnsupportedError if buffers of the model have no values, and there is no source of them."""
        if self._record is not None or self._earlier is not None:
            check_buffers(plan.request.model.given, "a resumed run")
        elif plan.request.frozen is not None and not has_init:
            check_buffers(plan.request.model.given, "external")
            for name, parameter in plan.request.model.module.named_parameters():
                if parameter.is_meta and parameter.numel() and name not in plan.inventory.external:
                    raise UnsupportedError(
                        f"parameter {name} is on the meta device, and this rank cannot read its shard from external= in place, for "
                        "FSDP2 pads it: pass the path as init= too, and it gets a copy of its own"
                    )
        return plan

    def _agree(self, make: Callable[[], Plan], init: Any) -> Plan:
        """Return this rank's plan. If a rank can make none, or the plans do not go together, all fail."""
        ranks = self._directory.ranks

        def describe() -> tuple[Plan, Given]:
            plan = make()
            is_new = self._record is None and self._earlier is None
            return plan, Given.of(plan.request, Initial(init, plan.inventory.external) if is_new else None, ranks)

        (plan, ours), told = ranks.settle(
            "manager.offload", describe, lambda found: (found[0].commit_every, found[1].digests())
        )
        check_alike(ours, ranks, [digests for _, digests in told])
        every = [steps for steps, *_ in told]
        if len(set(every)) > 1:
            steps = ["never" if n is None else f"every {n} steps" for n in every]
            commits = "; ".join(f"rank {rank} {when}" for rank, when in enumerate(steps))
            raise ConfigError(
                f"ranks would commit at different steps ({commits}), so none could be resumed: give all the same "
                "CommitPolicy, placements and host_memory"
            )
        return plan

    def _open_run(self, plan: Plan, origin: Origin) -> TrainingSession:
        return TrainingSession(plan, origin, self._current, self._describe_commits(plan))

    def _describe_commits(self, plan: Plan) -> Callable[[int], CommitRecord]:
        """Return the function that makes the record of a step, its `files`, `sections` and `state_entries` still empty."""
        request, frozen, directory = plan.request, plan.request.frozen, self._directory
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
                **self._user.in_commit(),
            )

        return describe

    # --- training -----------------------------------------------------------------------------------------------------

    def _train_more(self, add: Callable[[], None]) -> None:
        """Call `add`, which adds to an optimizer's groups, and replace the session by one that trains all of them."""
        current = self._current
        with current.turns.turn():
            current.check()
            current.training_step.check_between("training more parameters")
            counters = self._clock.counters
            with counters.waiting("rank", f"to {VERB}, which another does not, or not yet"):
                current.running("add_param_group").model.model.prepare_more(self._directory.ranks)
            self._bind(None)
            step = counters.step
            try:
                Relayout(current, self._open_run).train_more(add, step)
            except BaseException as error:
                if current.run is None:
                    current.fail(step, error)
                raise
            finally:
                if current.run is not None:
                    self._bind(current.run)

    # --- the user's optimizers --------------------------------------------------------------------------------------

    def _paged(self, request: Request, member: int) -> PagedOptimizer:
        """Return the replacement of an optimizer."""
        take_step = partial(self._current.take_step, member, partial(self._train_more, lambda: None))
        skip = partial(self._current.skip_step, member) if len(request.given_optimizers) > 1 else None
        return PagedOptimizer(request.given_optimizers[member], take_step, self._train_more, skip)

    def _bind(self, run: TrainingSession | None) -> None:
        for member, optimizer in enumerate(self._optimizers):
            optimizer.bind(None if run is None else state_for(run, member))

    def _lend(self, state: StateOwner) -> None:
        """Give the optimizers `state` to show while there is no session."""
        for optimizer in self._optimizers:
            optimizer.bind(state)


def state_for(run: TrainingSession, member: int) -> StateOwner:
    owner, request = run.model.optimizer_state, run.plan.request
    return request.model.state_owner(owner, request.optimizers, request.given_optimizers, member)


def _check_same_inventory(planned: Inventory, found: Inventory) -> None:
    for what, before, now in (
        ("parameters", planned.names, found.names),
        ("optimizer's groups", planned.settings, found.settings),
        ("shapes, dtypes or requires_grad", [*planned.plans, *planned.grad_plans], [*found.plans, *found.grad_plans]),
    ):
        if before != now:
            raise StateError(f"the model's {what} have changed since manager.plan: plan again, and offload by that")

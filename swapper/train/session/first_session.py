"""Plans and opens the first session of a run in this process: new, resumed from a commit, or resharded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from swapper.capabilities import Feature, check
from swapper.durability.beginning import Beginning, EarlierRanks
from swapper.durability.commit import CommitRecord, check_group_count, check_same, check_trained, named_files
from swapper.durability.directory import FALLBACK_NAME
from swapper.durability.recovery import follow_placement, page_bytes_of
from swapper.errors import CheckpointError, ConfigError, StateError, UnsupportedError
from swapper.io import beneath
from swapper.io.drives import find_tuning_of
from swapper.paging.store.swap_files import first_free_number
from swapper.train.layout.content import ReshardedSource
from swapper.train.layout.given_values import check_buffers, check_external
from swapper.train.layout.inventory import Inventory
from swapper.train.planning.plan import Plan, plan_run
from swapper.train.planning.request import Request
from swapper.train.session.origin import Given, Origin, check_alike
from swapper.train.session.replacement import train_more
from swapper.train.session.session_slot import SessionSlot
from swapper.train.state.optim import PagedOptimizer

log = logging.getLogger("swapper")


class FirstSession:
    """Plans and opens the first session of a run in this process, for a manager's slot."""

    def __init__(self, current: SessionSlot, beginning: Beginning) -> None:
        self._current = current
        self._directory = current.directory
        self._record, self._fallback = beginning.record, beginning.fallback
        self._earlier = beginning.earlier
        self._reshards = beginning.earlier is not None

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
        resumed = record if self._earlier is None else self._earlier.first
        trained_before = None if resumed is None else resumed.state_entries["of"]
        inventory = request.inventory(may_be_meta or resumed is not None, trained_before=trained_before)
        if made is not None:
            _check_same_inventory(made.inventory, inventory)
            return made
        tuning = find_tuning_of(self._directory.drives)
        if record is None:
            if self._earlier is not None:
                self._check_same_optimizer(self._earlier.first, request, inventory)
                self._content_of(self._earlier, request, inventory).close()  # which compares
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

    def _content_of(self, earlier: EarlierRanks, request: Request, inventory: Inventory) -> ReshardedSource:
        """Return the content of the earlier run's files, which belongs to this rank."""
        return ReshardedSource(earlier.ranks, inventory.plans, request.model.rows)

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

    def _open(self, plan: Plan, init: object) -> Sequence[PagedOptimizer]:
        current, request, record = self._current, plan.request, self._record
        optimizers = current.begin(request, plan.inventory.names, partial(train_more, current))
        current.user.begin(request.model.given)
        if self._earlier is not None:
            self._reshard(plan, self._earlier)
        else:
            if record is None and request.frozen is not None:
                request.frozen.fill_buffers(request.model.module, plan.inventory.external)
            current.open(
                plan, Origin.new(request.optimizers, init) if record is None else Origin.resumed(record, self._fallback)
            )
        current.user.restore(request.model.given)
        current.clock.start(None if plan.tuning is None else plan.tuning.seconds_for, plan.found.step)
        return optimizers

    def _reshard(self, plan: Plan, earlier: EarlierRanks) -> None:
        """Begin with the content of other numbers of ranks, and commit that. Until then the directory has what it had."""
        directory = self._directory
        with closing(self._content_of(earlier, plan.request, plan.inventory)) as content:
            origin = Origin.resharded(earlier.first, content, first_free_number(directory.path))
            run = self._current.open(plan, origin)
        beneath.unlink(directory.path / FALLBACK_NAME)  # of an earlier step of this directory
        directory.remove_strays(run.file_names)

    def give_up(self) -> None:
        """Close the session, and leave the directory as it was."""
        try:
            self._current.drop()
        finally:
            self.remove_strays()

    def remove_uncommitted(self) -> None:
        """Remove files that no commit names, as one that took the turn of a snapshot's. Requires that the session is closed."""
        try:
            if named := named_files(self._directory.path):
                self._directory.remove_strays(named)
        except (CheckpointError, OSError) as error:  # the next manager in this directory finds the same
            log.warning("%s: files that no commit names were not removed: %s", self._directory.path, str(error))

    def remove_strays(self) -> None:
        """Remove files in the directory that its commit does not name. Requires that no session is open."""
        kept = set() if self._record is None else set(self._record.files.values())
        self._directory.remove_strays(named_files(self._directory.path) if self._reshards else kept)

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
            return plan, Given.of(plan.request, ranks if is_new else None, init, plan.inventory.external)

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


def _check_same_inventory(planned: Inventory, found: Inventory) -> None:
    for what, before, now in (
        ("parameters", planned.names, found.names),
        ("optimizer's groups", planned.settings, found.settings),
        ("shapes, dtypes or requires_grad", [*planned.plans, *planned.grad_plans], [*found.plans, *found.grad_plans]),
    ):
        if before != now:
            raise StateError(f"the model's {what} have changed since manager.plan: plan again, and offload by that")

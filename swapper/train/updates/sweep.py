"""Runs the optimizer's sweep over the state: read slice k+1, update slice k, write slice k-1, all at once.

The next slice is leased before the last one is released, so that a page which two slices share is never evicted in
between and is written once. The reads and writes continue in the engine meanwhile. How a slice is updated:
slice_updates.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.tensors.torch_private import without_torch_functions
from swapper.train.layout.slices import GroupUpdate, Trainable, decoded_bytes
from swapper.train.optimizer.entries import StateEntries
from swapper.train.optimizer.optimizer_proxy import OptimizerProxies
from swapper.train.updates.slice_updates import GradientSource, SliceUpdates


class Sweep(SliceUpdates):
    """Applies the optimizer to all groups, slice by slice.

    Args:
        trainables: all groups.
        proxies: run the updates.
        entries: the optimizer's state of each parameter.
        pager, page_bytes: makes the leases, and the size of its pages.
        gradients: of all parameters.

    Attributes:
        trainables: all groups.
        members: the numbers of the optimizers.
        ahead: groups whose update pays to be begun before the one of the group before them is settled.
        prepares: whether a step's first update needs something that `prepare` gets.
    """

    ahead = 0
    prepares = False

    def __init__(
        self,
        trainables: Sequence[Trainable],
        proxies: OptimizerProxies,
        entries: StateEntries,
        pager: Pager,
        page_bytes: int,
        gradients: GradientSource,
    ) -> None:
        super().__init__(proxies, entries, gradients, decoded_bytes(trainables))
        self.trainables = trainables
        self.members = proxies.members
        self._pager = pager
        self._page_bytes = page_bytes
        self._counters = pager.counters
        self._last: Access | None = None  # of the last updated slice, still leased
        self._changed: frozenset[int] | None = None  # pages of the last slice; None if they are all that it may change

    def begin(self, member: int) -> None:
        """Begin a step of one optimizer, with its settings of this moment."""
        self._proxies.begin_step(member)
        self._forget_slices()  # the rest of a failed step

    def prepare(self) -> None:
        """Get what the first update of a step needs; later in the step do nothing. An error leaves everything as it was."""

    def take_in_written(self) -> None:
        """Treat writes past the guard so far as made before the step. See Pager.take_in_written."""
        self._pager.take_in_written()

    def groups_of(self, member: int) -> range:
        """Return the numbers of an optimizer's groups."""
        return self._proxies.groups_of(member)

    def fix(self, trainable: Trainable, groups: range) -> GroupUpdate | None:
        """Return the part of a step for parameters in these groups of the optimizers, with the gradients of this moment; None if
        it has none. Increases versions."""
        gradients: list[torch.Tensor | None] = []
        changed: list[nn.Parameter] = []
        with without_torch_functions():  # many are cold, and their data is not needed
            for parameter, number in zip(trainable.parameters, trainable.settings, strict=True):
                gradients.append(parameter.grad if number in groups else None)
                if gradients[-1] is not None:
                    changed.append(parameter)
            torch.autograd.graph.increment_version(changed)
        return GroupUpdate(trainable, tuple(gradients)) if changed else None

    def fix_all(self, member: int) -> dict[int, GroupUpdate]:
        """Return all updates of an optimizer's step, with the gradients of this moment, by group."""
        groups = self.groups_of(member)
        return {of.group: update for of in self.trainables if (update := self.fix(of, groups)) is not None}

    def changed_setting(self, member: int) -> str | None:
        """Return the optimizer's setting that has changed since the step began, in words; None if none has."""
        return self._proxies.changed_setting(member)

    def update(self, update: GroupUpdate) -> None:
        """Update a group. Its last slice stays leased for the next update, until `give_back`."""
        self._gradients.make_ready(update)
        for part in update.trainable.slices(update.active, self._page_bytes):
            self._hand_over(part.access)
            started = time.monotonic()
            for run in self._runs(update, part):
                self._apply(run)
            if self._unchanged:
                self._changed = self._changed_pages(update.trainable, part)
                self._unchanged.clear()
            self._counters.updated(started, part.access.key)

    def give_back(self, then: Access | None = None) -> None:
        """Release the last update's leases, after leasing `then`, if any; no update follows soon."""
        self._hand_over(then)
        self._last = None  # `then` is the caller's

    def fetch_ahead(self, groups: int | None = None) -> None:
        """Begin to fetch the state that the next forward needs first: this backward may be the last one of its step.

        Here the pager fetches it, by its schedule.

        Args:
            groups: maximum number of groups; None: as many as there is memory for.
        """

    def rejoin(self) -> None:
        """Order work that the caller queues from now on behind the updates, wherever those ran."""

    def settle(self) -> None:
        """Wait until all updates have reached host memory; here they always have."""

    def drain(self) -> None:
        """Wait until no copy of an update is in flight, whatever came of it. Raises DeviceError: the device failed."""

    def show(self, group: int) -> None:
        """Have what is queued from now on see a group's new parameters; here everything does."""

    def pass_begins(self) -> None:
        """Note that a forward or a backward begins, which may change gradients of the last step."""

    def end(self) -> None:
        """Note that all groups of the step are updated. Writes may still be in flight."""
        self._proxies.end_step(self.members)

    def end_of(self, member: int) -> None:
        """Note that all groups of one optimizer's step are updated, and some of others' steps are not."""
        self.settle()
        self._proxies.end_step([member])

    def abandon(self) -> None:
        """Forget the step: parameters may have been updated in part, and nothing is leased any more."""
        self._forget_slices()

    def _forget_slices(self) -> None:
        self._last = self._changed = None
        self._forget_pieces()

    def refresh_masters(self, trainable: Trainable, before: Mapping[str, torch.Tensor]) -> None:
        """Set masters to parameters that were changed from outside, except where they still round to the parameter.

        Args:
            before: the values of parameters with encoded masters before the change, by name.
        """
        for part in trainable.all_slices(self._page_bytes):
            changed = tuple(page for page in part.access.pages if page in part.access.writes)  # without gradients
            access = Access(None, changed, writes=part.access.writes)
            self._pager.acquire(access)
            self._refresh_slice(trainable, part, before)
            self._pager.release(access, access.writes)

    # ------------------------------------------------------------------------------------------------------------------

    def _hand_over(self, access: Access | None) -> None:
        """Lease `access`, if any, before the last slice's lease is released.

        The last slice is updated, so it is released as changed even if the lease fails, as by an earlier slice's write: its
        update may be of a group that is done, which nobody undoes.
        """
        last, self._last = self._last, None
        changed, self._changed = self._changed, None
        try:
            is_there = access is None or self._pager.lease(access)
        finally:
            if last is not None:
                self._pager.release(last, last.writes if changed is None else changed)
        if access is not None and not is_there:
            self._pager.wait(access)
        self._last = access

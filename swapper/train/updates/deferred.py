"""Defers updates: `optimizer.step()` only fixes the step; each group is updated when it is needed next.

A step fixes the optimizer's settings, the set of parameters with gradients, and the gradients. The next forward then
updates each group at its lease and uses the new parameters at once, so that they need not be read back: the optimizer's
sweep is spread over the forward, and of 16 bytes a parameter that a step reads (fp32 masters, AdamW) 14 remain. Groups
that the forward skips (layerdrop) are updated in passing, since they were prefetched; groups that it does not reach,
before the next backward.

[Note: who may not see an open step] Between `step()` and the last update, parameters, state and gradients differ from
plain torch's. So any access finishes the step first:
- parameters on NVMe are cold, and leasing them updates them; those that stay in memory are made cold until they are
  updated;
- a fixed gradient is a FixedGradient until it is used: an operation that needs or changes its data finishes the step
  first. `zero_grad` (to None) only removes it from its parameter;
- autograd accumulates past both: a hook on each parameter finishes the step before the first gradient of a backward
  arrives;
- a sharded model's shards and gradients are hidden from DTensor's dispatcher (sharded/open_shards.py);
- tensors and arrays that share the memory of a parameter or of its gradient (`.data`, views, a flat buffer) are not
  hidden: if there are any, the step is not deferred;
- the optimizer's state, gather, load_state_dict, snapshots, clipping, the next step and closing finish it; commits wait
  for it.

Versions of parameters increase at `step()`, so that an old graph raises as in plain torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from swapper.errors import StateError
from swapper.modules.own_hook import OwnHook
from swapper.paging.planning.schedule import Access
from swapper.train.gradients.autograd_grads import AccumulationHooks
from swapper.train.gradients.fixed_gradient import fix, unfix
from swapper.train.groups.group_state import DUE, UPDATING
from swapper.train.groups.parameter_group import GroupParameters
from swapper.train.layout.trainable import GroupUpdate
from swapper.train.updates.at_step import Undo, Updates, apart_from_pass
from swapper.train.updates.sweep import Sweep


class DeferredStep(Updates):
    """The last counted step, as far as it is not done.

    Args:
        sweep: does the updates.
        groups: all groups, by index.
        undo: called with a group whose update failed, or with none if it was no group's.
        may_defer: returns False if something would show an open step of this optimizer: then it is done at once.
    """

    ahead = 0

    def __init__(
        self, sweep: Sweep, groups: Sequence[GroupParameters], undo: Undo, may_defer: Callable[[int], bool]
    ) -> None:
        super().__init__(sweep)
        self._groups = groups
        self._undo = undo
        self._may_defer = may_defer
        self._left: dict[int, GroupUpdate] = {}  # by group
        self._members: set[int] = set()  # optimizers whose step is open
        self._reached: set[int] = set()  # groups that a forward has used since the step
        self._versions: dict[int, int] = {}  # of the fixed gradients, by id
        self._hooks = AccumulationHooks()
        self.in_order = False

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Finish the step before any of `parameters` gets a gradient. For all methods see Updates."""
        step = weakref.ref(self)  # the garbage collector does not traverse hooks

        def finish(gradient: torch.Tensor) -> None:
            if (alive := step()) is not None:
                alive.finish(in_order=True)

        for parameter in parameters:
            self._hooks.add(parameter, OwnHook(finish))

    def remove(self) -> None:
        self._hooks.remove()
        self._forget()

    def forget(self) -> None:
        for group in self._left:
            self._groups[group].clear_deferred()
        self._forget()

    @property
    def is_open(self) -> bool:
        return bool(self._left)

    def has_open(self, member: int) -> bool:
        return self.is_open and member in self._members

    def take_step(self, member: int, is_last: bool) -> None:
        """Open the step. The one before of this optimizer must be finished; those of others may be open.

        `in_order` is True from then on as long as only forwards and backwards cause updates.
        """
        self._sweep.take_in_written()
        for group in self._begun():
            self._close(group)
        if not self._may_defer(member):
            self.in_order = False
            super().take_step(member, is_last)
            return
        self._sweep.begin(member)
        self._members = {member, *(self._members if self._left else ())}
        self._reached.clear()
        self.in_order = True
        for update in self._sweep.fix_all(member):
            index = update.trainable.group
            self._left[index] = update.joined(self._left.get(index))
            self._hide(index)
        if not self._left:
            self._sweep.end()

    def finish(self, in_order: bool = False) -> None:
        """Do the rest of the open step."""
        if not self._left:
            return
        self.in_order = self.in_order and in_order
        for group in list(self._left):
            self._update(group)
        with self._rolling_back(None):
            self._sweep.give_back()

    def forward_reaches(self, groups: Collection[int]) -> None:
        if not self._left:
            return
        new = [group for group in groups if group not in self._reached]  # other groups are expected at a later use
        self._reached.update(new)
        passed_over = [expected for group in new for expected in self._groups[group].expected_before()]
        for group in dict.fromkeys(passed_over):
            if group not in groups:
                self.catch_up(group)

    def catch_up(self, group: int, then: Access | None = None) -> None:
        """Update a group if that was not done yet.

        Args:
            then: the next lease; it begins before the last pages of the update are released.
        """
        if group in self._left:
            self._update(group)
            with self._rolling_back(None):
                self._sweep.give_back(then)

    # ------------------------------------------------------------------------------------------------------------------

    def _begun(self) -> list[int]:
        """Return the groups whose update is in flight, ahead of their use."""
        return [group for group in self._left if self._groups[group].state is UPDATING]

    def _update(self, group: int) -> None:
        left = list(self._left)
        at = left.index(group)
        for index in left[at : at + 1 + self._sweep.ahead]:
            if self._groups[index].state is not UPDATING:
                with self._rolling_back(index):
                    self._check_not_written(index)
                    self._check_and_release(self._left[index])
                    self._groups[index].move(UPDATING)
                    self._sweep.update(self._left[index])
                    if self._sweep.ahead:
                        self._fix(self._left[index])  # kernels may still be to use them
        self._close(group)

    def _close(self, group: int) -> None:
        """Show the results of a group's update."""
        with self._rolling_back(group):
            self._sweep.show(group)
            if self._sweep.ahead:
                self._check_and_release(self._left[group])
            self._groups[group].clear_deferred()
            del self._left[group]  # this frees the gradients, whose memory may be reused now
            if not self._left:
                self._sweep.end()
                self._versions.clear()

    def _hide(self, group: int) -> None:
        """Hide the group's outdated parameters. See [Note: who may not see an open step]."""
        self._groups[group].defer_update(DUE, partial(self.catch_up, group))
        self._fix(self._left[group])

    def _fix(self, update: GroupUpdate) -> None:
        """Have operations on the update's gradients, as they are now, finish the step first."""
        for gradient in update.gradients:
            if gradient is not None:
                self._versions[id(gradient)] = gradient._version
                fix(gradient, self.finish)

    def _check_not_written(self, group: int) -> None:
        for name in self._groups[group].written():
            raise StateError(
                f"parameter {name} was changed after optimizer.step() by way of an alias of it, and with update='deferred' that "
                "step was still to change it: change parameters inside `with manager.gather(..., write=True)`, or offload with "
                "update='step'"
            )

    def _check_and_release(self, update: GroupUpdate) -> None:
        """Turn the group's gradients into ordinary tensors before their use, and check that nobody has changed them."""
        for gradient, places in zip(update.gradients, update.trainable.places, strict=True):
            if gradient is None:
                continue
            unfix(gradient)
            if gradient._version != self._versions[id(gradient)]:
                raise StateError(
                    f"the gradient of {places.name} was changed after optimizer.step() by way of an alias of it, and with "
                    "update='deferred' that step was still to use it: change gradients by `parameter.grad`, or offload with "
                    "update='step'"
                )

    def _forget(self) -> None:
        for index, update in self._left.items():
            self._groups[index].forget_update()
            for gradient in update.gradients:
                if gradient is not None:
                    unfix(gradient)
        self._left, self._versions = {}, {}

    @contextmanager
    def _rolling_back(self, group: int | None) -> Iterator[None]:
        """Keep the updates of this group, and of those in flight, pending if the context fails."""
        with apart_from_pass():
            try:
                yield
            except BaseException as error:
                begun = self._begun()
                undone = [index for index in self._left if index == group or index in begun]
                if not self._undo([self._left[index] for index in undone], error):
                    self._forget()
                else:
                    self._sweep.abandon()
                    for index in undone:
                        self._hide(index)
                raise

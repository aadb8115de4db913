"""Runs the updates of a step when its policy says that they are due, and undoes those that fail.

Code that runs passes (train_hooks.py, shard_hooks.py), and code that reads parameters or state (fault_handler.py,
optimizer_state.py), notifies this executor of what happens. A policy (policies.py) says which groups are due then.

[Note: who may not see an open step] Between a step's first update and its last, parameters, state and gradients differ from
plain torch's. So nobody may see them:
- parameters on NVMe are cold, and leasing them asks here first; those that stay in memory are made cold until then;
- of a step that is left to the next forward, a fixed gradient is a FixedGradient until it is used: an operation that needs or
  changes its data finishes the step first. `zero_grad` (to None) only removes it from its parameter. Autograd accumulates past
  it: a hook on each parameter finishes the step before the first gradient of a backward arrives;
- of a step that a backward has begun, used gradients can be read and not changed (`UsedGradient`), and everything else is
  refused until `optimizer.step()`, which checks that gradients and settings are those that were used;
- a sharded model's shards and gradients are hidden from DTensor's dispatcher (sharded/local_tensors.py);
- tensors and arrays that share the memory of a parameter or of its gradient (`.data`, views, a flat buffer) cannot be
  hidden: groups that have any are updated in `optimizer.step()`;
- the optimizer's state, gather, load_state_dict, snapshots, clipping, the next step and closing finish the step, or are
  refused; commits wait for it.

Versions of parameters increase when their update is fixed, so that an old graph raises as in plain torch.

[Note: several optimizers] A backward updates the parameters of all of them, each with its own. The training step is over
when all have stepped; until then it is as between backward and step, but gradients of those that have stepped may be
changed again. If one steps that had not all of its parameters updated in backward, it updates the rest.

[Note: a failure that waits] The other ranks of a sharded model wait in this backward for a rank's shards and gradients. So a
rank whose update has failed and was undone goes on without updates, and raises in `step()`, where all ranks undo theirs.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import nn

from swapper.capabilities import Feature, check
from swapper.errors import StateError
from swapper.modules.module_hooks import OwnHook
from swapper.paging.schedule import Access
from swapper.runtime.interrupts import defer_signals
from swapper.tensors.torch_private import backward_task
from swapper.train.gradients.autograd_grads import AccumulationHooks
from swapper.train.gradients.gradient_guards import ADVICE, GradientGuards
from swapper.train.groups.group_state import CURRENT, DUE, READY, SEALED, UPDATING
from swapper.train.groups.parameter_group import GroupParameters
from swapper.train.layout.slices import ALL_GROUPS, GroupUpdate, Trainable
from swapper.train.steps.backward_progress import BackwardProgress, PendingUses, SharedBackward
from swapper.train.steps.policies import Completed, Event, Reached, Read, Stepped, UpdatePolicy, Wanted
from swapper.train.updates.sweep import Sweep

log = logging.getLogger("swapper")

REMEDY = (
    "call optimizer.step() first; for several backwards to one step, run all but the last inside `with manager.accumulate():`; "
    "or offload with update='step'"
)


class UpdateOwner(Protocol):
    """What an executor asks of the model whose updates it runs."""

    @property
    def fails_at_step(self) -> bool:
        """See [Note: a failure that waits]."""

    def undo_update(self, updates: Collection[GroupUpdate], error: BaseException) -> bool:
        """Drop all leases, and restore the parameters of these updates, which failed with `error`, to the state before the step.

        Returns:
            True if they are restored. Without updates it only drops leases.
        """

    def check_usable(self) -> None:
        """Raise StateError if undoing has failed."""

    def may_defer(self, member: int) -> bool:
        """Return False if something would show an open step of this optimizer: then it is done at once."""

    def begin_early(self) -> bool:
        """Begin a step in backward, before its first update. Return False if all of them must wait for `optimizer.step()`."""

    def have_arrived(self, trainable: Trainable) -> bool:
        """Return True if an update of these parameters would not wait for gradients."""

    def is_aliased(self, trainable: Trainable) -> bool:
        """Return True if something shows these parameters or their gradients, which could not be hidden from it."""


class UpdateExecutor:
    """Owns the step that is taken, or is begun in backward, as far as it is not done.

    Args:
        policy: says when groups are updated.
        sweep: does the updates.
        groups: all groups, by index.
        owner: of the model.

    Attributes:
        in_order: the updates of the last step were done where those of the next one will be: only forwards and backwards have
            caused them.
        uses: groups that a backward may still need; maintained by the code that runs passes.
    """

    def __init__(
        self, policy: UpdatePolicy, sweep: Sweep, groups: Sequence[GroupParameters], owner: UpdateOwner
    ) -> None:
        self._policy = policy
        self._sweep = sweep
        self._groups = groups
        self._owner = owner
        self._trainables = {trainable.group: trainable for trainable in sweep.trainables}
        self._guards = GradientGuards()
        self._hooks = AccumulationHooks()
        self._accumulating = 0
        self.uses = PendingUses()
        self._progress = BackwardProgress(sweep.trainables, groups, self.uses)
        self.in_order = not policy.in_forward
        self._open: dict[int, GroupUpdate] = {}  # by group, in order: fixed by a step, or done by a backward
        self._members: set[int] = set()  # optimizers whose step is open
        self._reached: set[int] = set()  # groups that a forward has used since the step
        self._late: dict[int, list[GroupUpdate]] = {}  # by optimizer that has stepped since: what backward had left
        self._failure: Exception | None = None  # [Note: a failure that waits]

    @property
    def ahead(self) -> int:
        """An update outside of `optimizer.step()` belongs to the step this many after the last counted one."""
        return 0 if self._policy.in_forward else 1

    @property
    def follows_backward(self) -> bool:
        """True if the end of a group's backward must be known, even if the group stays in memory."""
        return self._policy.in_backward

    @property
    def leases_update(self) -> bool:
        """True if a lease may do an update first, which needs memory too."""
        return self._policy.in_forward and self.is_open

    @property
    def is_open(self) -> bool:
        """True if some groups are updated by a step and others are not yet."""
        return bool(self._open)

    @property
    def has_begun_early(self) -> bool:
        """True if the next step has updated groups already."""
        return self._policy.in_backward and (bool(self._open) or self._failure is not None)

    def has_open(self, member: int) -> bool:
        """Return True if this optimizer's last step is not finished."""
        return self.is_open and member in self._members

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Observe the gradients of `parameters`, all trained ones, as they arrive."""
        executor = weakref.ref(self)  # the garbage collector does not traverse hooks

        def finish(gradient: torch.Tensor) -> None:
            if (alive := executor()) is not None and alive._open:
                OwnHook(alive.finish)(in_order=True)

        def note(parameter: torch.Tensor) -> None:
            if (alive := executor()) is not None:
                alive._note_gradient(parameter)

        for parameter in parameters:
            if self._policy.in_forward:
                self._hooks.add(parameter, finish)
            if self._policy.in_backward:
                self._hooks.add(parameter, after=note)

    def remove(self) -> None:
        """Remove the hooks, and forget an open step."""
        self._hooks.remove()
        self._forget(shows=False)

    # --- a step -------------------------------------------------------------------------------------------------------

    def take_step(self, member: int, is_last: bool) -> None:
        """`optimizer.step()` of one optimizer: fix the updates of its parameters that have a gradient, and do those that are due.

        Its step before is finished; those of others may be open. Writes may still be in flight on return.

        Args:
            is_last: all others have stepped in this training step.
        """
        if self._failure is not None:
            raise self._failure
        if self.has_begun_early:
            self._update_rest(member)
            if is_last:
                self._end_begun()
                self._sweep.end()
            else:
                self._sweep.settle()  # what backward has left is not hidden
            return
        may_wait = self._policy.in_forward and self._may_wait(member)
        self._sweep.begin(member)
        updates = self._sweep.fix_all(member)
        for group in self._due(Stepped(list(updates), may_wait)):
            self._sweep.update(updates.pop(group))
        if may_wait:
            self._leave_open(member, updates)
        else:
            self._sweep.give_back()
        if not self._open:
            self._sweep.end()
        elif not may_wait:
            self._sweep.end_of(member)
        if is_last and self._policy.in_backward:
            self._end_begun()

    def _may_wait(self, member: int) -> bool:
        """Return True if an optimizer's updates may be left to the next forward, after those of its step before are shown."""
        self._sweep.take_in_written()
        for group in self._updating():
            with self._rolling_back():
                self._close(group)
        self.in_order = self._owner.may_defer(member)
        return self.in_order

    def _end_begun(self) -> None:
        """End a step that a backward may have begun: all optimizers have taken it."""
        self.forget()
        self.uses.clear()

    def _leave_open(self, member: int, updates: dict[int, GroupUpdate]) -> None:
        self._members = {member, *(self._members if self._open else ())}
        self._reached.clear()
        for group, update in updates.items():
            before = self._open.get(group)
            self._open[group] = update if before is None else update.joined(before)
            self._hide(group)

    def _update_rest(self, member: int) -> None:
        """Update what of an optimizer's parameters backward has left."""
        for other in self._sweep.members:
            if other not in self._late:
                self._check_as_used(other)
        groups, late = self._sweep.groups_of(member), self._late.setdefault(member, [])
        self._guards.unprotect(groups)
        for trainable in self._sweep.trainables:
            if trainable.group not in self._open and (update := self._sweep.fix(trainable, groups)) is not None:
                late.append(update)
                self._sweep.update(update)
        self._sweep.give_back()

    def prepare(self) -> None:
        """Get what updates in `take_step` need. An error leaves everything as it was."""
        if self._sweep.prepares and not self._policy.in_forward:
            self._sweep.prepare()

    def finish(self, in_order: bool = False) -> None:
        """Finish the step before an access to anything that it changes.

        Args:
            in_order: this access is part of the order of a step.

        Raises:
            StateError: a backward has begun the step, and `optimizer.step()` was not called.
        """
        if self._policy.in_backward and not in_order:
            self._refuse_begun()
        if self._open and (due := self._due(Read())):
            self.in_order = self.in_order and in_order
            for group in due:
                with self._rolling_back():
                    self._update(group)
            with self._rolling_back():
                self._sweep.give_back()

    def _refuse_begun(self) -> None:
        if self._progress.task is not None and backward_task() == -1:
            self.pass_begins()
        if self.has_begun_early:
            raise StateError(
                f"backward has updated a part of the parameters, and {self._awaited()} has not been called: with update='backward' "
                f"nothing of the model and the optimizer can be used between the two; {REMEDY}"
            )

    def check_clipping(self) -> None:
        """Check that gradients may be clipped now. Raises UnsupportedError: a backward uses them before."""
        if self._policy.in_backward:
            check({Feature.CLIPPING, Feature.IN_BACKWARD})
        self.finish()

    def drop(self) -> None:
        """Drop a step that a backward has begun: restore the state before it, if possible."""
        error = StateError("a step was begun in backward and never finished by optimizer.step()")
        if self._policy.in_backward and not self._restore(error):
            log.warning("closed between backward and optimizer.step(): parameters in memory are of two steps")

    def forget(self) -> None:
        """Forget the open step: all groups have been restored to the state before it, or it was taken."""
        self._forget(shows=True)

    def _forget(self, shows: bool) -> None:
        for group in self._open:
            if shows:
                self._groups[group].clear_deferred()
            else:
                self._groups[group].forget_update()
        self._guards.clear(self._open.values())
        self._open, self._late = {}, {}
        self._failure = None
        self._progress.end()
        self._leave_ready()

    # --- notifications by passes --------------------------------------------------------------------------------------

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Mark backwards within the context as not the last ones of their step."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    @contextmanager
    def together(self, batches: SharedBackward) -> Iterator[None]:
        """Take all backwards within the context for one: those of micro-batches that run together."""
        with self._progress.of(batches):
            yield
        if self._progress.task is not None:  # failed backwards are noticed by `pass_begins`
            self.backward_ends(self._progress.task)

    def pass_begins(self) -> None:
        """Something begins outside of any backward; if one was running, it has failed."""
        if self._progress.task is not None:
            self._restore(StateError("a backward failed in which parameters were updated"))
            self._owner.check_usable()

    def forward_begins(self, is_outermost: bool) -> None:
        """A module's forward begins, outside of any backward."""
        if self._progress.task is not None:
            self.pass_begins()
        if is_outermost:
            self._sweep.pass_begins()

    def drop_leases(self) -> None:
        """End the sweep's leases, after waiting for copies that use them. What it has updated is changed.

        Raises:
            DeviceError: the device failed. The leases have ended.
        """
        try:
            self._sweep.drain()
        finally:
            self._sweep.give_back()  # its last slice may be of a group that is done, which nobody undoes

    def forward_reaches(self, groups: Collection[int]) -> None:
        """A module that needs `groups` is about to be called outside of any backward."""
        if not self._open or not self._policy.in_forward:
            return
        passed: list[int] = []
        for group in groups:
            if group not in self._reached:  # others are expected at a later use
                self._reached.add(group)
                passed += self._groups[group].home.expected_before()
        for group in self._due(Reached(groups, passed)) if passed else ():
            self.catch_up(group)

    def catch_up(self, group: int, then: Access | None = None) -> None:
        """Update a group before its lease, if that was not done yet.

        Args:
            then: the lease; it begins before the last pages of the update are released.
        """
        if group in self._open:
            with self._rolling_back():
                self._update(group)
                self._sweep.give_back(then)

    def backward_begins(self, task: int) -> None:
        """A backward, autograd's graph task `task`, has begun, perhaps within another one.

        Raises:
            StateError: this is a second backward, and the first has updated groups.
        """
        if not self._policy.in_backward:
            if not self._accumulating and not self._open:
                with apart_from_pass():
                    self._sweep.fetch_ahead()
            return
        if self._progress.task is not None:
            return  # one within the other
        if self.has_begun_early:
            raise StateError(
                f"a second backward began before optimizer.step(), and the first has updated parameters already: {REMEDY}"
            )
        self._progress.begin(task, self._accumulating > 0)
        if self._progress.is_last:
            with apart_from_pass():
                self._sweep.fetch_ahead(1)  # the others' gradients are there before their state would be

    def backward_goes_on(self) -> None:
        """A backward has reached a point where it may be over with some groups."""
        if not self._policy.in_backward:
            return
        for group in self._progress.complete(self._open):
            trainable = self._trainables[group]
            if self._owner.is_aliased(trainable):
                continue
            event, state = Completed(group, self._owner.have_arrived(trainable)), self._groups[group].state
            if not self._policy.due(event, {group: state}):
                self._groups[group].move(READY)
                continue
            if not self._open and not self._owner.begin_early():
                self._progress.leave_to_step()
                return
            self._update_early(group)
            if self._failure is not None:
                return

    def backward_ends(self, task: int) -> None:
        """The backward `task` has ended."""
        if task != self._progress.task or self._progress.together is not None:
            return
        self._progress.end()
        self._leave_ready()
        if self._open:
            self._guards.protect(self._sweep.trainables)  # also those that wait for the step

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        group = self._progress.note_gradient(parameter)
        if self._open and (group in self._open or self._progress.task is None):
            names = {id(one): name for name, one in self._groups[group].group.parameters}
            raise StateError(
                f"parameter {names[id(parameter)]} got a gradient after updates in the same step: {REMEDY}"
            )

    # --- updates that a step has left to the forward ------------------------------------------------------------------

    def _updating(self) -> list[int]:
        """Return the groups whose update is in flight, ahead of their use."""
        return [group for group in self._open if self._groups[group].state is UPDATING]

    def _update(self, group: int) -> None:
        """Update a group, and show the results. Call it within `_rolling_back`, and `_close` too."""
        due = self._due(Wanted(group, self._sweep.ahead))
        if due and self._sweep.prepares:
            self._sweep.prepare()
        for index in due:
            self._groups[index].move(UPDATING)
            self._check_not_written(index)
            self._guards.release(self._open[index])
            self._sweep.update(self._open[index])
            if self._sweep.ahead:
                self._guards.fix(self._open[index], self.finish)  # kernels may still be to use them
        self._close(group)

    def _close(self, group: int) -> None:
        """Show the results of a group's update."""
        self._sweep.show(group)
        if self._sweep.ahead:
            self._guards.release(self._open[group])
        self._groups[group].clear_deferred()
        del self._open[group]  # this frees the gradients, whose memory may be reused now
        if not self._open:
            self._sweep.end()
            self._guards.clear()

    def _hide(self, group: int) -> None:
        """Hide the group's outdated parameters. See [Note: who may not see an open step]."""
        self._groups[group].defer_update(DUE, partial(self.catch_up, group))
        self._guards.fix(self._open[group], self.finish)

    def _check_not_written(self, group: int) -> None:
        for name in self._groups[group].written():
            raise StateError(
                f"parameter {name} was changed after optimizer.step() by way of an alias of it, and with update='deferred' that "
                "step was still to change it: change parameters inside `with manager.gather(..., write=True)`, or offload with "
                "update='step'"
            )

    @contextmanager
    def _rolling_back(self) -> Iterator[None]:
        """Undo the updates in flight if the context fails, and keep them due."""
        with apart_from_pass():
            try:
                yield
            except BaseException as error:
                undone = self._updating()
                if not self._owner.undo_update([self._open[index] for index in undone], error):
                    self._forget(shows=False)
                else:
                    self._sweep.abandon()
                    for index in undone:
                        self._hide(index)
                raise

    # --- updates in backward ------------------------------------------------------------------------------------------

    def _update_early(self, group: int) -> None:
        try:
            with apart_from_pass():
                if not self._open:
                    self._begin_sweep()
                update = self._sweep.fix(self._trainables[group], ALL_GROUPS)
                if update is None:
                    return
                self._open[group] = update  # from here on it must be restored if anything fails
                self._groups[group].move(UPDATING)
                self._sweep.update(update)
                self._sweep.give_back()
                self._seal(group, update)
        except BaseException as error:
            if not self._restore(error) or not self._owner.fails_at_step or not isinstance(error, Exception):
                raise
            self._failure = error

    def _begin_sweep(self) -> None:
        """Fix the settings of all optimizers for a step that this backward begins."""
        for member in self._sweep.members:
            self._sweep.begin(member)
        self._members = set(self._sweep.members)

    def _seal(self, group: int, update: GroupUpdate) -> None:
        """Refuse uses of an updated group until `optimizer.step()`. See [Note: who may not see an open step]."""
        name = self._groups[group].group.parameters[0][0]

        def refuse(then: Access | None) -> None:
            raise StateError(
                f"parameter {name} was updated in backward, and {self._awaited()} has not been called: until then with "
                f"update='backward' it cannot be used; {REMEDY}"
            )

        self._groups[group].defer_update(SEALED, refuse)
        self._guards.note(update)

    def _leave_ready(self) -> None:
        """Note that no backward will update the groups that were to wait for its next module."""
        for group in self._groups if self._policy.in_backward else ():
            if group.state is READY:
                group.move(CURRENT)

    def _awaited(self) -> str:
        """Return what the open step waits for, for people."""
        return "optimizer.step() of each optimizer" if len(self._sweep.members) > 1 else "optimizer.step()"

    def _restore(self, error: BaseException) -> bool:
        """Restore all groups to the state before the step. Return False if that is impossible; the manager knows it
        then."""
        updates = [*self._open.values(), *(late for updates in self._late.values() for late in updates)]
        self._sweep.rejoin()
        self.forget()
        self.uses.clear()
        is_undone = not updates or self._owner.undo_update(updates, error)
        self._sweep.abandon()
        return is_undone

    def _check_as_used(self, member: int) -> None:
        """Check that nothing of an optimizer has changed since the updates.

        Raises:
            StateError: gradients or settings are not those that updates in backward used.
        """
        gradients = self._guards.changed(self._open.values(), self._sweep.groups_of(member))
        changed = self._sweep.changed_setting(member) or next(gradients, None)
        if changed is not None:
            raise StateError(
                f"{changed} was changed between backward and optimizer.step(), and with update='backward' parameters were updated "
                f"before: change settings before backward or after step(); {ADVICE}"
            )

    # ------------------------------------------------------------------------------------------------------------------

    def _due(self, event: Event) -> Sequence[int]:
        return self._policy.due(event, {group: self._groups[group].state for group in self._open})


@contextmanager
def apart_from_pass() -> Iterator[None]:
    """Run the context, in the middle of a forward or a backward, without the modes of the pass around it."""
    with defer_signals, torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield

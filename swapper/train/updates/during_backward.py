"""Updates during backward: a group is updated once its gradients are complete and nothing will use its parameters any
more.

The traffic of the optimizer's state is spread over backward; `optimizer.step()` updates the remaining groups, and
counts.

[Note: when a group may be updated] Plain torch uses the old parameters for all of a backward, and updates with the
whole gradients. So a backward updates a group when
- each of its parameters that this backward gives a gradient to has got it. Autograd runs the node that accumulates a
  parameter's gradient once in a graph task, after everything that adds to it, and can tell whether it will run that
  node at all. A node that saved a parameter to compute with it gives that parameter a gradient in the same run, so it
  has run too;
- every call of a module that used the group since the last step is finished (`PendingUses`). That covers what the first
  does not: parameters that are used detached, and reentrant checkpointing, which accumulates in graph tasks of its own,
  one for each segment. It is updated between nodes of the outermost backward, and not in the middle of one.

Backwards of micro-batches that run together (`together`) count as one: a group is updated when none of them may still
add to its gradients.

In all other cases (retained graphs, calls that no backward reached, a pass that only accumulates) `step()` updates the
group, which is always right. If something uses or adds to a group after its update, that raises an error, by the
version of the parameter at the latest.

[Note: one module behind] On an accelerator a gradient arrives when its kernels have run, long after they were queued.
An immediate wait would idle the device while the CPU updates. So a group whose gradients are in flight is updated when
the backward is one module further, whose kernels are queued by then.

[Note: between backward and step] Until `step()` some groups are of the new step and others of the old one. Nobody may
see that: parameters of updated groups are cold, and refuse leases and accesses; their gradients can be read and not
changed (`UsedGradient`); gather, state, snapshots and the like are refused. `step()` checks that gradients and settings
are those that were used. Without a `step()`, because the backward fails or the manager is closed, groups are restored
if the step before is committed; else the manager can only be closed.

[Note: several optimizers] A backward updates the parameters of all of them, each with its own. The training step is over
when all have stepped; until then it is as between backward and step, but gradients of those that have stepped may be
changed again. If one steps that had not all of its parameters updated in backward, it updates the rest.

[Note: a failure that waits] The other ranks of a sharded model wait in this backward for a rank's shards and gradients. So a
rank whose update has failed and was undone goes on without updates, and raises in `step()`, where all ranks undo theirs.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from swapper.capabilities import Feature, check
from swapper.errors import StateError
from swapper.paging.planning.schedule import Access
from swapper.tensors.torch_private import backward_task, dispatch_modes, keeps_graph, will_run, without_torch_functions
from swapper.train.gradients.autograd_grads import AccumulationHooks
from swapper.train.gradients.used_gradient import ADVICE, protect, release
from swapper.train.groups.group_state import SEALED, UPDATING
from swapper.train.groups.parameter_group import GroupParameters
from swapper.train.layout.trainable import GroupUpdate, Trainable
from swapper.train.updates.at_step import Undo, Updates, apart_from_pass
from swapper.train.updates.sweep import Sweep

log = logging.getLogger("swapper")

REMEDY = (
    "call optimizer.step() first; for several backwards to one step, run all but the last inside `with manager.accumulate():`; "
    "or offload with update='step'"
)


class StepInBackward(Updates):
    """The step whose gradients are being computed.

    Args:
        sweep: does the updates.
        groups: all groups, by index.
        begin: called before the first update of a step; returns False if all of them must wait for `optimizer.step()`.
        undo: see Undo.
        check_usable: raises StateError if undoing has failed.
        have_arrived: returns True if gradients have arrived.
        is_aliased: returns True if something shows these parameters or their gradients, which could not be hidden from it:
            then they wait for `step()`.
        fails_at_step: see [Note: a failure that waits].
    """

    follows_backward = True
    _failure: Exception | None = None

    def __init__(
        self,
        sweep: Sweep,
        groups: Sequence[GroupParameters],
        begin: Callable[[], bool],
        undo: Undo,
        check_usable: Callable[[], None],
        have_arrived: Callable[[Trainable], bool],
        is_aliased: Callable[[Trainable], bool],
        fails_at_step: bool = False,
    ) -> None:
        super().__init__(sweep)
        self._fails_at_step = fails_at_step
        self._groups = groups
        self._begin = begin
        self._undo = undo
        self._check_usable = check_usable
        self._have_arrived = have_arrived
        self._is_aliased = is_aliased
        self._trainables = {trainable.group: trainable for trainable in sweep.trainables}
        self._group_of = {id(p): t.group for t in sweep.trainables for p in t.parameters}
        self._done: dict[int, GroupUpdate] = {}  # by group: updates in backward
        self._stepped: dict[int, list[GroupUpdate]] = {}  # since: by optimizer, updates of other groups in its step
        self._versions: dict[int, int] = {}  # of used gradients, by id
        self._arrivals: dict[int, dict[int, int]] = {}  # by group and id of a parameter: the task of its gradient
        self._next: set[int] = set()  # groups to be updated when the backward is one module further
        self._task: int | None = None  # the outermost backward that runs, or has failed
        self._waits = False  # all wait for `step`, whatever this backward does
        self._together: tuple[Callable[[int], bool], Callable[[], object]] | None = None  # see `together`
        self._protected: list[tuple[int, torch.Tensor]] = []  # gradients, with the group of the OptimizerSet
        self._hooks = AccumulationHooks()

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        step = weakref.ref(self)  # the garbage collector does not traverse hooks

        def note(parameter: torch.Tensor) -> None:
            if (alive := step()) is not None:
                alive._note_gradient(parameter)

        for parameter in parameters:
            self._hooks.add(parameter, after=note)

    def remove(self) -> None:
        self._hooks.remove()
        self.forget()

    @property
    def is_open(self) -> bool:
        return bool(self._done)

    @property
    def has_begun_early(self) -> bool:
        return bool(self._done) or self._failure is not None

    @contextmanager
    def together(self, adds_to: Callable[[int], bool], make_room: Callable[[], object]) -> Iterator[None]:
        self._together = adds_to, make_room
        try:
            yield
        finally:
            self._together = None
        if self._task is not None:  # failed backwards are noticed by `pass_begins`
            self.backward_ends(self._task)

    def take_step(self, member: int, is_last: bool) -> None:
        if self._failure is not None:
            raise self._failure
        if self._done:
            self._update_rest(member)
            if is_last:
                self._end_step()
                self._sweep.end()
        else:
            super().take_step(member, is_last)
            if is_last:
                self._end_step()

    def _end_step(self) -> None:
        self.forget()
        self.uses.clear()

    def finish(self, in_order: bool = False) -> None:
        """Refuse: nothing can be finished before `optimizer.step()` is called. Raises StateError: the step is open."""
        if in_order:
            return
        if backward_task() == -1:
            self.pass_begins()
        if self.has_begun_early:
            raise StateError(
                f"backward has updated a part of the parameters, and {self._awaited()} has not been called: with update='backward' "
                f"nothing of the model and the optimizer can be used between the two; {REMEDY}"
            )

    def check_clipping(self) -> None:
        """Refuse clipping. Raises UnsupportedError: always: gradients are used before."""
        check({Feature.CLIPPING, Feature.IN_BACKWARD})

    def drop(self) -> None:
        if not self._restore(StateError("a step was begun in backward and never finished by optimizer.step()")):
            log.warning("closed between backward and optimizer.step(): parameters in memory are of two steps")

    def forget(self) -> None:
        for index in self._done:
            self._groups[index].clear_deferred()
        for _, gradient in self._protected:
            release(gradient)
        self._done, self._versions, self._protected = {}, {}, []
        self._arrivals, self._stepped = {}, {}
        self._next.clear()
        self._task = self._failure = None

    # --- notifications by passes --------------------------------------------------------------------------------------

    def pass_begins(self) -> None:
        if self._task is not None:
            self._restore(StateError("a backward failed in which parameters were updated"))
            self._check_usable()

    def backward_begins(self, task: int) -> None:
        """Refuse a second backward after updates.

        Raises:
            StateError: this is a second backward, and the first has updated groups.
        """
        if self._task is not None:
            return  # one within the other
        if self.has_begun_early:
            raise StateError(
                f"a second backward began before optimizer.step(), and the first has updated parameters already: {REMEDY}"
            )
        self._task = task
        self._next.clear()
        self.uses.graph_stays = keeps_graph()
        self._waits = self._accumulating > 0 or self.uses.graph_stays
        for group, tasks in list(self._arrivals.items()):  # some may arrive before any module is called
            self._arrivals[group] = {key: came_in for key, came_in in tasks.items() if came_in == task}
        if not self._waits:
            with apart_from_pass():
                self._sweep.fetch_ahead(1)  # the others' gradients are there before their state would be

    def backward_goes_on(self) -> None:
        """Update the groups that may be. See [Note: when a group may be updated]."""
        task = backward_task()
        is_part = task == self._task or self._together is not None
        if self._waits or not is_part or dispatch_modes():
            return  # selective checkpointing has modes of its own, in which nothing else may be computed
        for group, came_in in self._arrivals.items():
            if came_in and group not in self._done and self._is_complete(group, task):
                if self._is_aliased(self._trainables[group]):
                    continue
                if group not in self._next and not self._have_arrived(self._trainables[group]):
                    self._next.add(group)  # see [Note: one module behind]
                    continue
                if not self._done and not self._may_begin():
                    self._waits = True
                    return
                self._update(group)
                if self._failure is not None:
                    return

    def backward_ends(self, task: int) -> None:
        if task == self._task and self._together is None:
            self._task = None
            for trainable in self._sweep.trainables if self._done else ():  # also those that wait for the step
                for parameter, places, settings in zip(
                    trainable.parameters, trainable.places, trainable.settings, strict=True
                ):
                    if parameter.grad is not None:
                        protect(parameter.grad, places.name)
                        self._protected.append((settings, parameter.grad))

    # ------------------------------------------------------------------------------------------------------------------

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        group = self._group_of[id(parameter)]
        if group in self._done or (self._done and self._task is None):
            name = self._names(group)[id(parameter)]
            raise StateError(f"parameter {name} got a gradient after updates in the same step: {REMEDY}")
        self._arrivals.setdefault(group, {})[id(parameter)] = backward_task()

    def _is_complete(self, group: int, task: int) -> bool:
        if self.uses.has(group):
            return False
        if self._together is not None:
            adds_to, make_room = self._together
            if any(adds_to(id(parameter)) for parameter in self._trainables[group].parameters):
                return False
            make_room()
            return not self._groups[group].is_leased
        if self._groups[group].is_leased:
            return False
        came_in = self._arrivals[group]
        return all(
            came_in.get(id(parameter)) == task or not _gets_gradient(parameter)
            for parameter in self._trainables[group].parameters
        )

    def _may_begin(self) -> bool:
        """Begin a step, with the optimizers' settings of this moment. Return False if it must wait for `step`."""
        if not self._begin():
            return False
        for member in self._sweep.members:
            self._sweep.begin(member)
        return True

    def _awaited(self) -> str:
        """Return what the open step waits for, for people."""
        return "optimizer.step() of each optimizer" if len(self._sweep.members) > 1 else "optimizer.step()"

    def _update_rest(self, member: int) -> None:
        """Update what of an optimizer's parameters backward has left."""
        for other in self._sweep.members:
            if other not in self._stepped:
                self._check_as_used(other)
        groups, late = self._sweep.groups_of(member), self._stepped.setdefault(member, [])
        for settings, gradient in self._protected:
            if settings in groups:
                release(gradient)
        for trainable in self._sweep.trainables:
            if trainable.group not in self._done and (update := self._sweep.fix(trainable, groups)) is not None:
                late.append(update)
                self._sweep.update(update)
        self._sweep.give_back()

    def _update(self, group: int) -> None:
        try:
            with apart_from_pass():
                update = self._sweep.fix(self._trainables[group], self._sweep.all_groups)
                if update is None:
                    return
                self._done[group] = update  # from here on it must be restored if anything fails
                self._groups[group].move(UPDATING)
                self._sweep.update(update)
                self._sweep.give_back()
                self._close_group(group, update)
        except BaseException as error:
            if not self._restore(error) or not self._fails_at_step or not isinstance(error, Exception):
                raise
            self._failure = error

    def _close_group(self, group: int, update: GroupUpdate) -> None:
        """See [Note: between backward and step]."""
        names = list(self._names(group).values())

        def refuse(then: Access | None) -> None:
            raise StateError(
                f"parameter {names[0]} was updated in backward, and {self._awaited()} has not been called: until then with "
                f"update='backward' it cannot be used; {REMEDY}"
            )

        self._groups[group].defer_update(SEALED, refuse)
        for gradient in update.gradients:
            if gradient is not None:
                self._versions[id(gradient)] = gradient._version

    def _names(self, group: int) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._groups[group].group.parameters}

    def _restore(self, error: BaseException) -> bool:
        """Restore all groups to the state before the step. Return False if that is impossible; the manager knows it
        then."""
        updates = [*self._done.values(), *(late for updates in self._stepped.values() for late in updates)]
        self._sweep.rejoin()
        self.forget()
        self.uses.clear()
        is_undone = not updates or self._undo(updates, error)
        self._sweep.abandon()
        return is_undone

    def _check_as_used(self, member: int) -> None:
        """Check that nothing of an optimizer has changed since the updates.

        Raises:
            StateError: gradients or settings are not those that updates in backward used.
        """
        changed = self._sweep.changed_setting(member) or next(self._changed_gradients(member), None)
        if changed is not None:
            raise StateError(
                f"{changed} was changed between backward and optimizer.step(), and with update='backward' parameters were updated "
                f"before: change settings before backward or after step(); {ADVICE}"
            )

    def _changed_gradients(self, member: int) -> Iterator[str]:
        groups = self._sweep.groups_of(member)
        for update in self._done.values():
            trainable = update.trainable
            for parameter, gradient, places, settings in zip(
                trainable.parameters, update.gradients, trainable.places, trainable.settings, strict=True
            ):
                if settings not in groups:
                    continue
                if parameter.grad is not gradient or (
                    gradient is not None and gradient._version != self._versions[id(gradient)]
                ):
                    yield f"the gradient of {places.name}"


def _gets_gradient(parameter: nn.Parameter) -> bool:
    """Return True if the running backward accumulates a gradient of `parameter`, or has done so."""
    if not parameter.requires_grad:
        return False
    with without_torch_functions():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    return will_run(node)

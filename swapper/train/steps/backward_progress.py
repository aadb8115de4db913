"""Finds out with which groups a backward is over: their gradients are complete, and nothing will use their parameters.

[Note: when a group may be updated] Plain torch uses the old parameters for all of a backward, and updates with the
whole gradients. So a backward is over with a group when
- each of its parameters that this backward gives a gradient to has got it. Autograd runs the node that accumulates a
  parameter's gradient once in a graph task, after everything that adds to it, and can tell whether it will run that
  node at all. A node that saved a parameter to compute with it gives that parameter a gradient in the same run, so it
  has run too;
- every call of a module that used the group since the last step is finished (`PendingUses`). That covers what the first
  does not: parameters that are used detached, and reentrant checkpointing, which accumulates in graph tasks of its own,
  one for each segment. It is updated between nodes of the outermost backward, and not in the middle of one.

Backwards of micro-batches that run together (`together`) count as one: it is over with a group when none of them may
still add to its gradients.

In all other cases (retained graphs, calls that no backward reached, a pass that only accumulates) this is not known, and
`optimizer.step()` updates the group, which is always right. If something uses or adds to a group after its update, that
raises an error, by the version of the parameter at the latest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from swapper.tensors.torch_private import backward_task, dispatch_modes, keeps_graph, will_run, without_torch_functions
from swapper.train.groups.parameter_group import GroupParameters
from swapper.train.layout.slices import Trainable


class Caller(Protocol):
    """The relevant part of a module's call.

    Attributes:
        use: the period in which it was counted as a use; -1 if it is not.
        groups: the indices of the groups that it uses.
    """

    use: int
    groups: list[int]

    @property
    def module(self) -> Hashable: ...


class PendingUses:
    """Counts the uses of each group since the last `clear`: the groups that a backward may still need.

    Each call of a module in a forward is one use of its groups, until a backward has finished with that call: its saved
    tensors may be needed until then ([Note: when a backward lease ends], train_hooks.py). A call without autograd saves
    nothing. But reentrant checkpointing first runs each forward so, and again, with autograd, in backward: until that
    second call's backward is over, the first one is a use; and beyond it if the graph is retained, as the next backward
    runs it once more. It may also have been an evaluation, without a backward: then its groups stay in use until
    `clear`. So no use is forgotten too early, and some are kept too long.

    Attributes:
        graph_stays: another backward over the same graph may follow the running one.
    """

    graph_stays = False

    def __init__(self) -> None:
        self._period = 0
        self._of_group: Counter[int] = Counter()
        self._without_graph: Counter[Hashable] = Counter()  # by module: its calls without autograd

    def has(self, group: int) -> bool:
        """Return True if a backward may still need `group`."""
        return self._of_group[group] > 0

    def counts(self, call: Caller) -> bool:
        """Return True if `call` is a use, since the last `clear`."""
        return call.use == self._period

    def clear(self) -> None:
        """Forget all uses: a step is over, and a backward of an earlier call fails as in plain torch."""
        self._period += 1
        self._of_group.clear()
        self._without_graph.clear()

    def called(self, call: Caller, with_graph: bool) -> None:
        """A forward begins, outside of any backward."""
        self.begin(call)
        if not with_graph:
            self._without_graph[call.module] += 1

    def called_again(self, call: Caller, with_graph: bool) -> None:
        """A forward begins within a backward: with autograd it replaces one that had none."""
        if with_graph and not self.graph_stays and self._without_graph[call.module] > 0:
            self._without_graph[call.module] -= 1
            call.use = self._period

    def brought(self, call: Caller, group: int) -> None:
        """A call turned out to use one more group."""
        if call.use == self._period:
            self._of_group[group] += 1

    def begin(self, call: Caller) -> None:
        """Begin a use, if it has not begun: a call, or the backward of a call from before the last `clear`."""
        if call.use != self._period:
            call.use = self._period
            self._of_group.update(call.groups)

    def end(self, call: Caller) -> None:
        """A backward has finished with a call."""
        if call.use == self._period:
            call.use = -1
            self._of_group.subtract(call.groups)


class SharedBackward(Protocol):
    """The backwards of micro-batches that run together. See AccumulationPass."""

    def adds_to(self, parameter: int) -> bool:
        """Return True if one of them may still add to the gradient of the parameter with this id."""

    def make_room(self) -> bool:
        """Release the leases of those that wait."""


class BackwardProgress:
    """The running backward, and the gradients that it has made.

    Args:
        uses: maintained by the code that runs passes.

    Attributes:
        task: autograd's graph task of the outermost backward that runs, or has failed.
        together: those that run together; None: it is alone.
        is_last: its gradients may be used before it is over: no other backward adds to them.
    """

    def __init__(self, trainables: Iterable[Trainable], groups: Sequence[GroupParameters], uses: PendingUses) -> None:
        self._trainables = {trainable.group: trainable for trainable in trainables}
        self._group_of = {id(p): index for index, of in self._trainables.items() for p in of.parameters}
        self._groups = groups
        self._uses = uses
        self._arrivals: dict[int, dict[int, int]] = {}  # by group and id of a parameter: the task of its gradient
        self.task: int | None = None
        self.together: SharedBackward | None = None
        self.is_last = False

    def begin(self, task: int, is_accumulating: bool) -> None:
        """Note that the outermost backward begins."""
        self.task = task
        self._uses.graph_stays = keeps_graph()
        self.is_last = not is_accumulating and not self._uses.graph_stays
        arrivals, self._arrivals = self._arrivals, {}
        for group, tasks in arrivals.items():  # some may arrive before any module is called
            if now := {key: came_in for key, came_in in tasks.items() if came_in == task}:
                self._arrivals[group] = now

    def end(self) -> None:
        """Note that the outermost backward is over, or has failed."""
        self.task = None
        self.is_last = False
        self._arrivals.clear()

    def leave_to_step(self) -> None:
        """Have its gradients used in `optimizer.step()` only."""
        self.is_last = False

    @contextmanager
    def of(self, together: SharedBackward) -> Iterator[None]:
        """Return a context within which all backwards are one."""
        self.together = together
        try:
            yield
        finally:
            self.together = None

    def note_gradient(self, parameter: torch.Tensor) -> int:
        """Note that a parameter has got its gradient of the running graph task. Return its group."""
        key = id(parameter)
        group = self._group_of[key]
        self._arrivals.setdefault(group, {})[key] = backward_task()
        return group

    def complete(self, done: Container[int]) -> Iterator[int]:
        """Yield the groups with which the running backward is over, as far as that is known, without those that are done.

        The caller may update each before the next.
        """
        task = backward_task()
        is_part = task == self.task or self.together is not None
        if not self.is_last or not is_part or dispatch_modes():
            return  # selective checkpointing has modes of its own, in which nothing else may be computed
        for group in list(self._arrivals):
            if group not in done and self._is_complete(group, task):
                yield group

    def _is_complete(self, group: int, task: int) -> bool:
        if self._uses.has(group):
            return False
        parameters = self._trainables[group].parameters
        if self.together is not None:
            if any(self.together.adds_to(id(parameter)) for parameter in parameters):
                return False
            self.together.make_room()
            return not self._groups[group].is_leased
        if self._groups[group].is_leased:
            return False
        came_in = self._arrivals[group]
        others = [parameter for parameter in parameters if came_in.get(id(parameter)) != task]
        return not any(map(_gets_gradient, others))


def _gets_gradient(parameter: nn.Parameter) -> bool:
    """Return True if the running backward accumulates a gradient of `parameter`, or has done so."""
    if not parameter.requires_grad:
        return False
    with without_torch_functions():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    return will_run(node)

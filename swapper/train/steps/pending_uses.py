"""Counts the uses of each group that a backward may still need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Protocol


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

"""Which groups a backward may still need: each call of a module in a forward is one use of its groups, until a backward has done
with that call.

What a call saved may be needed until its backward is over ([Note: when a backward lease ends], hooks.py). A call without
autograd saves nothing; but reentrant checkpointing runs each forward so at first, and again, with autograd, in backward:
until that second call's backward is over, the first one is a use; beyond it, where the graph stays: the next backward runs
it once more. It may also have been an evaluation, after which no backward comes: then its groups stay in use until
`clear`. So no use is ever forgotten too early, and some are kept too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Protocol


class Caller(Protocol):
    """A call of a module, as far as it matters here.

    Attributes:
        use: in which period it was counted as a use; -1 if it is not.
        groups: the indices of those that it uses.
    """

    use: int
    groups: list[int]

    @property
    def module(self) -> Hashable: ...


class PendingUses:
    """Counts the uses of each group since the last `clear`.

    Attributes:
        graph_stays: the backward that runs can be followed by another one over the same graph.
    """

    graph_stays = False

    def __init__(self) -> None:
        self._period = 0
        self._of_group: Counter[int] = Counter()
        self._without_graph: Counter[Hashable] = Counter()  # by module: its calls without autograd

    def has(self, group: int) -> bool:
        """Whether a backward may still need `group`."""
        return self._of_group[group] > 0

    def clear(self) -> None:
        """A step is over: what was called before it will not be gone back to, or fails as in plain torch."""
        self._period += 1
        self._of_group.clear()
        self._without_graph.clear()

    def called(self, call: Caller, with_graph: bool) -> None:
        """A forward begins, outside of any backward."""
        self.begin(call)
        if not with_graph:
            self._without_graph[call.module] += 1

    def called_again(self, call: Caller, with_graph: bool) -> None:
        """A forward begins within a backward: with autograd it takes the place of one that had none."""
        if with_graph and not self.graph_stays and self._without_graph[call.module] > 0:
            self._without_graph[call.module] -= 1
            call.use = self._period

    def brought(self, call: Caller, group: int) -> None:
        """A call turned out to use one more group."""
        if call.use == self._period:
            self._of_group[group] += 1

    def begin(self, call: Caller) -> None:
        """A use begins, if it has not: a call, or the backward of one that is from before the last `clear`."""
        if call.use != self._period:
            call.use = self._period
            self._of_group.update(call.groups)

    def end(self, call: Caller) -> None:
        """A backward has done with a call."""
        if call.use == self._period:
            call.use = -1
            self._of_group.subtract(call.groups)

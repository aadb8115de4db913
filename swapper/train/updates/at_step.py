"""When parameters are updated: all of them in `optimizer.step()`, which is what stands here; or elsewhere, in a form of this.

`deferred.py` has them updated in the forward after the step, `during_backward.py` in the backward before it. Whoever
runs passes (hooks.py) and whoever looks at parameters or state (fault_handler.py, optimizer_state.py) tells what
happens, and does not ask which of the three it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from swapper.runtime.interrupts import defer_sigint
from swapper.train.updates.sweep import Sweep

Undo = Callable[[Collection[int], BaseException], bool]
"""Given groups and the error that their updates ended with: forgets all leases, has the groups as they were before the step, and
returns whether it could. With no group only leases are forgotten."""


class Updates:
    """Everything is updated in `optimizer.step()`.

    Args:
        sweep: what updates.

    Attributes:
        in_order: whether the updates of the last step were done where those of the next one will be.
        uses: which groups a backward may still need; kept by whoever runs passes.
        ahead: how many steps after the last one that was counted an update belongs to.
        follows_backward: whether it must be known when a backward has done with a group, though the group stays in memory.
    """

    in_order = True
    ahead = 1
    follows_backward = False

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self.uses = PendingUses()

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take note of the gradients of `parameters`, all that are trained, as they come."""

    def remove(self) -> None:
        """Take the hooks out, and forget a step that is still open."""

    @property
    def is_open(self) -> bool:
        """Whether some groups are updated by a step and others are not yet."""
        return False

    @property
    def has_begun_early(self) -> bool:
        """Whether the step that is about to be taken has updated groups already."""
        return False

    def take_step(self) -> None:
        """`optimizer.step()`: update every parameter that has a gradient. Writes may still be in flight on return."""
        self._sweep.begin()
        self._sweep.update_all(self._sweep.fix_all())
        self._sweep.end()

    def finish(self, in_order: bool = False) -> None:
        """Somebody is about to look at what a step changes.

        Args:
            in_order: it belongs to the order of a step that this happens here.
        """

    def check_clipping(self) -> None:
        """Gradients are about to be clipped."""
        self.finish()

    def drop(self) -> None:
        """The step that is open will not be finished: have everything as it was before it, if that can be."""

    def forget(self) -> None:
        """All groups have been put back to what they were before the step that is open: there is none."""

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backwards within the context are not the last ones of their step."""
        yield

    # --- what passes tell -----------------------------------------------------------------------------------------

    def pass_begins(self) -> None:
        """Something begins outside of any backward; if one was running, it has failed."""

    def forward_reaches(self, groups: Collection[int]) -> None:
        """A module that needs `groups` is about to be called outside of any backward."""

    def backward_begins(self, task: int) -> None:
        """A backward, autograd's graph task `task`, has begun, perhaps within another one."""

    def backward_goes_on(self) -> None:
        """A backward has come to where it may have done with some groups."""

    def backward_ends(self, task: int) -> None:
        """The backward `task` has come to its end."""


@contextmanager
def apart_from_pass() -> Iterator[None]:
    """What runs here, in the middle of a forward or a backward, knows nothing of the pass around it."""
    with defer_sigint, torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


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
    """Counts the uses of each group since the last `clear`: which groups a backward may still need.

    Each call of a module in a forward is one use of its groups, until a backward has done with that call: what it saved may be
    needed until then ([Note: when a backward lease ends], train_hooks.py). A call without autograd saves nothing; but reentrant
    checkpointing runs each forward so at first, and again, with autograd, in backward: until that second call's backward is
    over, the first one is a use; beyond it, where the graph stays: the next backward runs it once more. It may also have been
    an evaluation, after which no backward comes: then its groups stay in use until `clear`. So no use is ever forgotten too
    early, and some are kept too long.

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

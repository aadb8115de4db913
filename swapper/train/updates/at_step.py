"""Updates all parameters in `optimizer.step()`, and defines the interface of the other update times.

`deferred.py` updates in the forward after the step, `during_backward.py` in the backward before it. Code that runs
passes (train_hooks.py), and code that reads parameters or state (fault_handler.py, optimizer_state.py), notifies this
interface and does not ask which of the three it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from swapper.runtime.interrupts import defer_signals
from swapper.train.layout.trainable import GroupUpdate
from swapper.train.updates.sweep import Sweep

Undo = Callable[[Collection[GroupUpdate], BaseException], bool]
"""Called with updates and their error: drops all leases, restores the parameters to the state before the step, and
returns True if it could. Without updates it only drops leases."""


class Updates:
    """Updates everything in `optimizer.step()`.

    Attributes:
        in_order: the updates of the last step were done where those of the next one will be.
        uses: groups that a backward may still need; maintained by the code that runs passes.
        ahead: an update belongs to the step this many after the last counted one.
        follows_backward: the end of a group's backward must be known, even if the group stays in memory.
    """

    in_order = True
    ahead = 1
    follows_backward = False

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self.uses = PendingUses()
        self._accumulating = 0

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Observe the gradients of `parameters`, all trained ones, as they arrive."""

    def remove(self) -> None:
        """Remove the hooks, and forget an open step."""

    @property
    def is_open(self) -> bool:
        """True if some groups are updated by a step and others are not yet."""
        return False

    @property
    def has_begun_early(self) -> bool:
        """True if the next step has updated groups already."""
        return False

    def take_step(self, member: int, is_last: bool) -> None:
        """`optimizer.step()` of one optimizer: update all of its parameters that have a gradient.

        Writes may still be in flight on return.

        Args:
            is_last: all others have stepped in this training step.
        """
        self._sweep.begin(member)
        for update in self._sweep.fix_all(member):
            self._sweep.update(update)
        self._sweep.give_back()
        self._sweep.end()

    def has_open(self, member: int) -> bool:
        """Return True if this optimizer's last step is not finished."""
        return self.is_open

    def finish(self, in_order: bool = False) -> None:
        """Finish the step before an access to anything that it changes.

        Args:
            in_order: this access is part of the order of a step.
        """

    def check_clipping(self) -> None:
        """Check that gradients may be clipped now."""
        self.finish()

    def drop(self) -> None:
        """Drop the open step: restore the state before it, if possible."""

    def forget(self) -> None:
        """Forget the open step: all groups have been restored to the state before it."""

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Mark backwards within the context as not the last ones of their step."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    @contextmanager
    def together(self, adds_to: Callable[[int], bool], make_room: Callable[[], object]) -> Iterator[None]:
        """Take all backwards within the context for one: those of micro-batches that run together.

        Args:
            adds_to: returns True if one of them may still add to the gradient of the parameter with this id.
            make_room: releases leases of those that wait.
        """
        yield

    # --- notifications by passes --------------------------------------------------------------------------------------

    def pass_begins(self) -> None:
        """Something begins outside of any backward; if one was running, it has failed."""

    def forward_reaches(self, groups: Collection[int]) -> None:
        """A module that needs `groups` is about to be called outside of any backward."""

    def backward_begins(self, task: int) -> None:
        """A backward, autograd's graph task `task`, has begun, perhaps within another one."""
        if not self._accumulating and not self.is_open:
            with apart_from_pass():
                self._sweep.fetch_ahead()

    def backward_goes_on(self) -> None:
        """A backward has reached a point where it may have finished with some groups."""

    def backward_ends(self, task: int) -> None:
        """The backward `task` has ended."""


@contextmanager
def apart_from_pass() -> Iterator[None]:
    """Run the context, in the middle of a forward or a backward, without the modes of the pass around it."""
    with defer_signals, torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


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

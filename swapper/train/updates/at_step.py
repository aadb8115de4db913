"""When parameters are updated: all of them in `optimizer.step()`, which is what stands here; or elsewhere, in a form of this.

`deferred.py` has them updated in the forward after the step, `during_backward.py` in the backward before it. Whoever
runs passes (hooks.py) and whoever looks at parameters or state (fault_handler.py, optimizer_state.py) tells what
happens, and does not ask which of the three it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from swapper.runtime.interrupts import defer_sigint
from swapper.train.updates.pending_uses import PendingUses
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

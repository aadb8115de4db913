"""Tells when a training step is over: when each optimizer has stepped, or where the user's `one_step` ends.

[Note: what one training step is] A commit is a state that the user's script can resume from: between two of its
iterations. With one optimizer its `step()` ends an iteration. With several, swapper takes an iteration to have one
`step()` of each, in any order. An optimizer that steps again before all others have is not that, and is refused: the
state in between would be committed in the middle of an iteration, sooner or later. Such loops (several steps of a
discriminator for one of the generator) say where their iteration is, `with manager.one_step():`, and nothing between
its ends is committed, counted, or put into a snapshot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from swapper.errors import StateError
from swapper.train.optimizer.optimizer_set import OptimizerSet


class TrainingStep:
    """The training step that goes on, or the last one.

    Attributes:
        is_open: an optimizer has stepped in it, and it is not over.
        learn: see `Pager.end_step`.
    """

    def __init__(self, optimizers: OptimizerSet) -> None:
        self._optimizers = optimizers
        self._steps: Counter[int] = Counter()  # by optimizer; of the last training step if none is open
        self._skipped: set[int] = set()  # optimizers whose step torch.amp.GradScaler left out
        self._is_held = False
        self.is_open = False
        self.learn = True

    def check(self, member: int) -> None:
        """Raise StateError if optimizer `member` has stepped already in this training step, and another one has not."""
        if not self._is_held and member in self._done:
            raise StateError(
                f"{self._optimizers.describe_member(member)} is about to step again before {self._waiting()}, so the end of a "
                "training step, which is what is committed, is not known: put each iteration of such a loop, with the steps of "
                "all optimizers, into `with manager.one_step():`"
            )

    def check_between(self, verb: str) -> None:
        """Raise StateError if a training step is open."""
        if self.is_open:
            until = "manager.one_step ends" if self._is_held else self._waiting()
            raise StateError(f"{verb} in the middle of a training step, which goes on until {until}: wait for its end")

    def _waiting(self) -> str:
        waiting = [self._optimizers.describe_member(member) for member in self._all if member not in self._done]
        if not waiting:
            return "the iteration is over whose manager.one_step failed"
        return f"{' and '.join(waiting)} {'has' if len(waiting) == 1 else 'have'} stepped"

    def begin(self, member: int) -> None:
        """Note that an optimizer's step begins."""
        if not self.is_open:
            self._steps.clear()
            self.is_open = True
        self._steps[member] += 1

    def undo(self, member: int) -> None:
        """Note that it was undone."""
        self._steps[member] -= 1
        self._steps = +self._steps
        self.is_open = bool(self._steps)

    def skip(self, member: int) -> None:
        """Note that an optimizer's step is left out."""
        self._skipped.add(member)

    @property
    def is_over(self) -> bool:
        """True if nothing more belongs to it, unless a context of `hold` says so."""
        return not self._is_held and len(self._done) == len(self._all)

    def end(self) -> None:
        self.is_open = False
        self._skipped.clear()

    @property
    def is_first(self) -> bool:
        """True if one optimizer has stepped, once."""
        return self._steps.total() == 1

    def may_undo(self, members: Collection[int]) -> bool:
        """Return True if the last step of these optimizers was their only one in it."""
        return all(self._steps[member] <= 1 for member in members)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Have it go on as long as the context."""
        if self._is_held:
            raise StateError("manager.one_step inside manager.one_step: leave the outer one first")
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    @property
    def _all(self) -> range:
        return range(len(self._optimizers.members))

    @property
    def _done(self) -> set[int]:
        return {*(self._steps if self.is_open else ()), *self._skipped}

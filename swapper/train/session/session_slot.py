"""What a manager has at the moment: the run, where a model is offloaded, and whether it can be used. Every verb asks here first."""

from __future__ import annotations

import os

from swapper.durability.directory import RunDirectory
from swapper.errors import StateError
from swapper.modules.turns import Turns
from swapper.train.session.training_session import TrainingSession


class SessionSlot:
    """Owns which run there is; another one takes its place when there is more to train.

    Args:
        directory: the manager's.
        backend: how transfers are made.

    Attributes:
        turns: threads take them: a forward, a backward, a step, or whatever else goes through the model.
    """

    def __init__(self, directory: RunDirectory, backend: str) -> None:
        self.run: TrainingSession | None = None
        self.turns = Turns()
        self.directory = directory
        self.backend = backend
        self._pid = os.getpid()
        self._is_closed = False
        self._failure: BaseException | None = None
        self._failed_step = 0

    def running(self, verb: str) -> TrainingSession:
        """Return the run; for verbs that need an offloaded model."""
        if self.run is None:
            self.check_usable()
            raise StateError(f"{verb} needs an offloaded model: call manager.offload first")
        return self.run

    def check(self) -> None:
        """What every use begins with: check, and commit the step before if it is due and its writes are done."""
        self.check_usable()
        if self.run is not None:
            self.run.committer.enter()

    def check_to_write(self) -> None:
        """As `enter`, where something is about to be changed from outside: the step before is committed as it was."""
        self.check_usable()
        if self.run is not None:
            self.run.committer.finish()
            self.run.committer.changed_from_outside()

    def check_usable(self) -> None:
        """Raises: StateError."""
        if os.getpid() != self._pid:
            raise StateError(
                "the manager was touched in a forked child: it works only in the process that made it. "
                "Keep the model out of DataLoader workers, or start them by spawn"
            )
        if self._is_closed:
            raise StateError("the manager is closed: make a new one")
        if self._failure is not None:
            raise StateError(
                f"step {self._failed_step} failed half-way ({self._failure}): memory and files hold a mix of two steps. "
                "Close the manager and go on from the last commit (resume='auto') or snapshot"
            ) from self._failure

    @property
    def is_over(self) -> bool:
        """There is nothing to close: it is closed, or another process's."""
        return self._is_closed or os.getpid() != self._pid

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def fail(self, step: int, error: BaseException) -> None:
        """`step` failed half-way: from now on only closing is left, unless it is undone."""
        self._failure, self._failed_step = error, step

    def recover(self) -> None:
        """What failed is undone."""
        self._failure = None

    def end(self) -> None:
        """From now on it is closed, and there is no run."""
        self._is_closed = True
        self.run = None
        self._failure = None  # its traceback may hold a forward's tensors, and they our hooks

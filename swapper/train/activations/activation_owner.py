"""What hooks on saved activations need of a manager, and no more: whether it can be used, its drive, which memory is its model's.

A graph may outlive the manager, and must not keep it: everything is asked for when it is needed.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, Protocol

import torch

from swapper.errors import StateError
from swapper.io.engines import open_engine


class Current(Protocol):
    """What a manager has at the moment, as `swapper.train.session.session_slot.SessionSlot` is."""

    backend: str

    @property
    def directory(self) -> Any: ...
    @property
    def run(self) -> Any: ...
    def check_usable(self) -> None: ...


class ActivationOwner:
    """A manager, as hooks on saved activations see it.

    Args:
        manager: with a model that was offloaded, or without.

    Raises:
        StateError: it cannot be used.
    """

    def __init__(self, manager: Any) -> None:
        current: Current = manager.current
        current.check_usable()
        self.directory: Path = current.directory.path
        self._current = weakref.ref(current)
        self._own_engine: Any = None
        self._run: weakref.ref[Any] | None = None
        self._of_model: frozenset[int] = frozenset()

    def check_usable(self) -> None:
        """Raises: StateError."""
        current = self._current()
        if current is None:
            raise StateError("offload_activations outlived its manager: make both anew")
        current.check_usable()

    def find_engine(self) -> Any:
        """Return the engine of the manager's run, or one of its own where nothing was offloaded. Raises StateError."""
        current = self._current()
        if current is None:
            raise StateError("the manager is gone, and activations of this graph are on its drive: run backward before")
        current.check_usable()
        if current.run is not None and current.run.engine is not None:
            return current.run.engine
        if self._own_engine is None:
            self._own_engine = open_engine([self.directory], backend=current.backend)
        return self._own_engine

    def storages_of_model(self) -> frozenset[int]:
        """Return which storages are the manager's model's, in memory and away, by address."""
        current = self._current()
        run = None if current is None else current.run
        if run is None or not run.has_model:
            return frozenset()
        if self._run is None or self._run() is not run:
            model = run.model.model
            with torch._C.DisableTorchFunctionSubclass():
                tensors = [*model.parameters(), *model.buffers()]
                self._of_model = frozenset(t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided)
            self._run = weakref.ref(run)
        return self._of_model

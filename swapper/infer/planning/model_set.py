"""Several models in one budget: they are placed together, as one model whose parts run by themselves.

What is loaded inside of `shared_memory` is noted, and opened at its end, when it is known what has to share. The fixed set that
stays in memory is chosen over all of the models; the frames in which the rest streams serve whichever runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from torch import nn

from swapper.errors import ConfigError, StateError
from swapper.formats.concatenated import ConcatenatedFile
from swapper.formats.sources import FileStamp, Source
from swapper.infer.mapping.matching import Match
from swapper.modules.models import Models


class SharedBudget:
    """What was loaded inside of one `shared_memory`."""

    def __init__(self) -> None:
        self._loads: list[tuple[nn.Module, Source, Match, str]] = []

    def add(self, model: nn.Module, source: Source, matched: Match, backend: str) -> None:
        """
        Raises:
            StateError: a parameter belongs to a model that is here already.
        """
        known = {id(weight.parameter) for _, _, match, _ in self._loads for weight in match.weights}
        for weight in matched.weights:
            if id(weight.parameter) in known:
                raise StateError(f"parameter {weight.name} belongs to another model that shares this memory")
        self._loads.append((model, source, matched, backend))

    @property
    def is_empty(self) -> bool:
        return not self._loads

    def whole(self) -> tuple[nn.Module, Source, Match, str]:
        """Return all of it as one model, its source, what matches, and the I/O backend."""
        models: dict[str, nn.Module] = {}
        weights, buffers = [], []
        stamps: dict[Path, FileStamp] = {}
        joined: dict[Path, ConcatenatedFile] = {}
        for model, source, matched, _ in self._loads:
            name = type(model).__name__
            while name in models:
                name += "'"
            models[name] = model
            weights += [replace(weight, name=f"{name}.{weight.name}") for weight in matched.weights]
            buffers += matched.buffers
            stamps.update(source.stamps)
            joined.update(source.joined)
        first = self._loads[0][1]
        backends = {backend for *_, backend in self._loads}
        if len(backends) > 1:
            raise ConfigError(f"models that share memory have one backend, not {', '.join(sorted(backends))}")
        source = Source(first.path, first.kind, {}, stamps, {}, joined)
        return Models(models), source, Match(weights, buffers), backends.pop()


_room: ContextVar[SharedBudget | None] = ContextVar("room", default=None)


def current_room() -> SharedBudget | None:
    return _room.get()


@contextmanager
def noting(room: SharedBudget) -> Iterator[None]:
    """Have what is loaded inside noted in `room`."""
    token = _room.set(room)
    try:
        yield
    finally:
        _room.reset(token)

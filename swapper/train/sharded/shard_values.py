"""Initializes the shards of a model that was built on the meta device: no rank ever has the whole model in memory.

From a checkpoint a rank reads the bytes of its own rows. A function is called with each module in turn, whose own parameters are
whole meanwhile, as on the CPU; the rank keeps its rows of them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from swapper.errors import UnsupportedError
from swapper.formats.stored import StoredTensor
from swapper.io.engines import Engine
from swapper.modules.groups import Group
from swapper.train.layout.initial import Initialize, Values
from swapper.train.sharded.shards import Shard, Shards


class ShardValues(Values):
    """The source of initial values of a rank's shards. For arguments and errors see Values."""

    def __init__(
        self, init: Initialize | str | os.PathLike[str], shards: Shards, engine: Engine, external: Collection[str] = ()
    ) -> None:
        super().__init__(init, shards.model, engine, external)
        self._shard_of = {key: shard for key, shard in shards.of.items() if key in self._wanted}
        self._wanted = {id(shard.local) for shard in self._shard_of.values()}
        self._names = {id(shard.local): shard.name for shard in self._shard_of.values()}
        for shard in self._shard_of.values() if self._source is not None else ():
            self._stored[shard.name] = rows_of(self._stored[shard.name], shard)
        self._modules: Sequence[nn.Module] = ()
        self._whole: dict[int, nn.Parameter] = {}  # by id of the model's: those that another module owns too

    def batches(self, groups: Iterable[Group]) -> Iterator[tuple[list[nn.Parameter], list[nn.Parameter]]]:
        """See Values. A function is called in the order of `model.modules()`."""
        if self._source is not None:
            yield from super().batches(groups)
            return
        group_of = {id(local): group.index for group in groups for _, local in group.parameters}
        owning = ((module, self._own(module)) for module in self._model.modules())
        known = ((module, own) for module, own in owning if own)
        for _, batch in groupby(known, key=lambda item: {group_of[id(shard.local)] for shard in item[1].values()}):
            members = list(batch)
            self._modules = [module for module, _ in members]
            locals_ = list({id(s.local): s.local for _, own in members for s in own.values()}.values())
            yield locals_, locals_

    @torch.no_grad()
    def fill(self, parameters: Iterable[nn.Parameter]) -> None:
        if self._source is not None:
            super().fill(parameters)
            return
        for module in self._modules:
            self._fill_module(module, self._own(module))

    def _fill_module(self, module: nn.Module, own: dict[str, Shard]) -> None:
        """Call the function with `module` while its own parameters are whole, and keep this rank's rows."""
        sharded = dict(module._parameters)
        for name, shard in own.items():
            whole = self._whole.get(id(shard.parameter))
            if whole is None:
                zeros = torch.zeros(shard.parameter.shape, dtype=shard.local.dtype, device="cpu")
                whole = nn.Parameter(zeros, requires_grad=shard.local.requires_grad)
            module._parameters[name] = whole
        try:
            self._initialize(module)
            for name, shard in own.items():
                found: Any = module._parameters[name]
                shard.local.copy_(found[shard.rows.start : shard.rows.stop])
                if any(id(module) not in self._done for module in self._owners(shard)):
                    self._whole[id(shard.parameter)] = found
                else:
                    self._whole.pop(id(shard.parameter), None)
        finally:
            module._parameters.update(sharded)

    def _own(self, module: nn.Module) -> dict[str, Shard]:
        """Return the shards of the module's own parameters, by attribute."""
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        found = {name: self._shard_of[id(p)] for name, p in own.items() if id(p) in self._shard_of}
        if found and len(found) < len(own):
            raise UnsupportedError(
                f"{type(module).__name__} has parameters on the meta device ({', '.join(found)}) and others that are not: init= "
                "would be called with shards. Build all of them on the meta device, or none"
            )
        return found

    def _owners(self, shard: Shard) -> Iterator[nn.Module]:
        return (m for m in self._model.modules() if any(p is shard.parameter for p in m._parameters.values()))


def rows_of(stored: StoredTensor, shard: Shard) -> StoredTensor:
    """Return the place of a shard's rows in a stored tensor. Raises UnsupportedError: they are not one run of bytes."""
    rows = shard.rows
    if not rows:
        return replace(stored, shape=tuple(shard.local.shape), nbytes=0, stride=None)
    found = stored.rows(rows.start, rows.stop)
    if found is None:
        raise UnsupportedError(
            f"{stored.name!r} in {stored.path} is not contiguous, so rows of it cannot be read alone: make one file of it by "
            f"`swapper export {stored.path} NEW --to safetensors`"
        )
    return found

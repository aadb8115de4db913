"""`load`: a model runs with its weights read from the user's files. Finds out what fits where, and opens everything."""

from __future__ import annotations

import os

import torch
from torch import nn

from swapper.checkpoint.sources import Source, open_source
from swapper.config import parse_host_memory
from swapper.errors import BudgetError, ConfigError, InvariantError
from swapper.infer.blueprint import Blueprint, draw, with_cuts, with_lookups, with_single_experts
from swapper.infer.loaded import KEY, LoadedModel
from swapper.infer.matching import Match, Rename, match
from swapper.infer.placement import Placement, place
from swapper.infer.sharing import Room, current_room
from swapper.interrupts import held_back


def load(
    model: nn.Module,
    source: str | os.PathLike[str] | Source,
    *,
    host_memory: int | str = "auto",
    strict: bool = True,
    dtype: torch.dtype | None = None,
    rename: Rename = None,
    backend: str = "auto",
) -> nn.Module:
    """Have `model` run with its weights read from `source` as they are needed, and return it.

    The files are read in place and never written. A forward brings each module's weights in before it runs, and reads ahead;
    what `host_memory` can hold stays. Outputs are those of the model in memory, bit for bit. Gradients do not flow.

    Args:
        model: built on the meta device (better: `with swapper.without_weights():`) or on the CPU. On the meta device its
            parameters are replaced by new objects; tied ones stay tied.
        source: a safetensors file, a Hugging Face directory, a torch checkpoint, a swapper snapshot, or a directory of
            torch.distributed.checkpoint. It must stay as it is for as long as the model is used.
        host_memory: bytes, or "4GiB": everything that is held of the weights at one time. "auto": half of what is free.
        strict: refuse missing and unexpected names. Otherwise what is missing keeps the model's own values.
        dtype: convert floating-point weights on the way in. None: they are used in the checkpoint's own dtype.
        rename: a map from the checkpoint's names to the model's, or a function that gives the model's name or None (leave out).
        backend: of the I/O engine.

    Raises:
        CheckpointError: the source is not what it claims to be, or does not fit the model.
        BudgetError: `host_memory` is too small; says the smallest that works.
        UnsupportedError: the model cannot be loaded this way.
        StateError: the model is loaded or offloaded already.
        IoError: a file cannot be read.
    """
    opened = source if isinstance(source, Source) else open_source(source)
    parse_host_memory(host_memory)  # before anything that takes time
    matched = match(model, opened, strict=strict, dtype=dtype, rename=rename)
    return load_matched(model, opened, matched, host_memory, backend)


def load_matched(model: nn.Module, source: Source, matched: Match, host_memory: int | str, backend: str) -> nn.Module:
    """As `load`, for whoever has found out by itself which parameter gets which tensors."""
    room = current_room()
    if room is None:
        _open(model, source, matched, parse_host_memory(host_memory), backend)
    elif host_memory != "auto":
        raise ConfigError(f"host_memory={host_memory!r} is said inside of shared_memory, which says it for all models")
    else:
        room.add(model, source, matched, backend)
    return model


def open_room(room: Room, budget_bytes: int) -> None:
    """Load what was noted in a `shared_memory`."""
    together, source, matched, backend = room.whole()
    opened = _open(together, source, matched, budget_bytes, backend)
    for model in together.children():
        model.__dict__[KEY] = opened


def _open(model: nn.Module, source: Source, matched: Match, budget_bytes: int, backend: str) -> LoadedModel:
    blueprint = draw(model, matched)
    if blueprint.fixed_bytes + blueprint.staging_bytes + blueprint.streamed_bytes > budget_bytes:
        blueprint = with_single_experts(with_lookups(blueprint))
    blueprint, placement = _fit(blueprint, budget_bytes)
    with torch.inference_mode(False), torch.no_grad(), held_back:
        cache_bytes = blueprint.cache_bytes(budget_bytes)
        opened = LoadedModel(model, source, blueprint, matched.buffers, placement, cache_bytes, backend)
        model.__dict__[KEY] = opened
    return opened


def _fit(blueprint: Blueprint, budget_bytes: int) -> tuple[Blueprint, Placement]:
    """Place the model. Linear maps are cut where it does not fit otherwise, largest first; and where less is read then.

    That is so of weights that are made from fewer bytes: the whole of a large one takes memory in which more could stay.
    """
    refusal: BudgetError | None = None
    best: tuple[int, Blueprint, Placement] | None = None
    for candidate in (blueprint, *with_cuts(blueprint)):
        if best is not None and any(linear.weight.make is None for linear in candidate.cuts):
            break
        fixed_bytes = candidate.fixed_bytes + candidate.staging_bytes + candidate.cache_bytes(budget_bytes)
        names = [unit.name or type(unit.module).__name__ for unit in candidate.units]
        try:
            placed = place(budget_bytes, fixed_bytes, candidate.runs_of_used, candidate.working_sets, names)
        except BudgetError as error:
            refusal = error
            continue
        cut_bytes = sum(linear.stored_bytes for linear in candidate.cuts)
        cost = placed.read_bytes(candidate.runs_of_used) + cut_bytes + cut_bytes // 16  # they are not read ahead
        if best is None or cost < best[0]:
            best = cost, candidate, placed
    if best is None:
        raise refusal or InvariantError("a model has no blueprint")
    return best[1:]

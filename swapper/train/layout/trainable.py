"""Defines what an optimizer updates: a group's trainable parameters with the locations of their state, and their gradients."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from swapper.train.layout.slices import ParameterLocations, Slice, plan_slices

UPDATE_ELEMENTS = (1 << 18) * min(max(len(os.sched_getaffinity(0)), 2), 32)
"""Elements, 256 Ki for a core: their fp32 state fits its cache, and on two cores 256 Ki to 4 Mi in all were no faster; with
more cores, Python's own time for a run is for more elements. See [Note: small updates], updates/sweep.py."""
NO_GROUP = -1
"""The settings of a parameter in no group."""


@dataclass
class Trainable:
    """One group's trainable parameters that the optimizer has, with the locations of their state.

    `settings` has for each the number of its group in the OptimizerSet, NO_GROUP if it is in none any more: then it is
    not updated. See train/state/conditions.py.
    """

    group: int
    parameters: list[nn.Parameter]
    places: list[ParameterLocations]
    settings: list[int]
    _slices: dict[tuple[bool, ...], list[Slice]] = field(default_factory=dict)

    def slices(self, active: tuple[bool, ...], page_bytes: int) -> list[Slice]:
        if active not in self._slices:
            self._slices[active] = plan_slices(self.group, self.places, active, page_bytes)
        return self._slices[active]

    def all_slices(self, page_bytes: int) -> list[Slice]:
        return self.slices((True,) * len(self.places), page_bytes)


@dataclass(frozen=True, slots=True)
class GroupUpdate:
    """One group's part of a step: the gradients of its trainable parameters, None for one without."""

    trainable: Trainable
    gradients: tuple[torch.Tensor | None, ...]

    @property
    def active(self) -> tuple[bool, ...]:
        return tuple(gradient is not None for gradient in self.gradients)

    @property
    def names(self) -> list[str]:
        """Names of the parameters that it updates."""
        places = zip(self.trainable.places, self.gradients, strict=True)
        return [of.name for of, gradient in places if gradient is not None]

    def joined(self, other: GroupUpdate | None) -> GroupUpdate:
        """Return this update together with another optimizer's of the same group, of other parameters."""
        if other is None:
            return self
        pairs = zip(self.gradients, other.gradients, strict=True)
        return GroupUpdate(self.trainable, tuple(theirs if ours is None else ours for ours, theirs in pairs))


def decoded_bytes(trainables: Iterable[Trainable]) -> int:
    """Return the bytes of the scratch for encoded state. [Note: decoded runs], coded_run.py"""
    members = ([(p.numel, len(p.coded), p.may_cut) for p in of.places if p.coded] for of in trainables)
    return scratch_bytes(members, UPDATE_ELEMENTS)


def scratch_bytes(groups: Iterable[Sequence[tuple[int, int, bool]]], run_elements: int) -> int:
    """Return the maximum bytes of decoded values of a run.

    Args:
        groups: for each group, (elements, number of encoded tensors, may be cut) of its parameters with encoded state.
        run_elements: elements of a run; only a parameter that may not be cut makes a larger one.
    """
    most = 0
    for members in groups:
        together = min(run_elements, sum(numel for numel, _, _ in members))
        most = max([most, *(together * count for _, count, _ in members)])
        most = max([most, *(numel * count for numel, count, may_cut in members if not may_cut)])
    return most * torch.float32.itemsize

"""Provides the content of a run's sections from the swap files of another number of ranks.

A rank of a sharded model has some rows of each tensor; it reads them where the earlier ranks have them, bit for bit. A tensor
that is not in rows (a step counter, or anything of a model that is whole on each rank) is the first rank's that has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swapper.durability.beginning import CommittedRank
from swapper.errors import CheckpointError, UnsupportedError
from swapper.paging.planning.layout import SectionPlan, Slot, TensorSpec
from swapper.runtime.interrupts import close_all
from swapper.train.layout.content import CommittedFiles
from swapper.train.layout.slices import TensorLocation

Rows = Mapping[str, tuple[int, int]]
"""The first row of a rank's part of each sharded parameter, and the rows of the whole, by name."""
Form = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class _Part:
    """The elements of a whole tensor from `begin` on that one rank has."""

    begin: int
    place: TensorLocation
    files: CommittedFiles


class ReshardedSource:
    """Reads this rank's content from the files of the earlier ranks.

    Args:
        earlier: all ranks of the run that is continued.
        plans: of this rank's sections.
        rows: of its shards.

    Raises:
        CheckpointError: they are of another model or optimizer; lists the differences.
        UnsupportedError: the earlier ranks read parameters from files of the user's.
    """

    def __init__(self, earlier: Sequence[CommittedRank], plans: Sequence[SectionPlan], rows: Rows) -> None:
        self._rows = _RowsOf(plans, rows)
        self._parts: dict[tuple[str, str], list[_Part]] = {}
        theirs: dict[tuple[str, str], Form] = {}
        self._files: list[CommittedFiles] = []
        for rank in earlier:
            if rank.record.external:
                raise UnsupportedError(
                    "a run with external= cannot be resharded: load a snapshot of it with resume='discard'"
                )
            files = CommittedFiles(rank.sections, rank.files)
            self._files.append(files)
            of = _RowsOf([section.plan for section in rank.sections], rank.record.shards)
            for slot in of.slots():
                key = slot.spec.owner, slot.spec.kind
                theirs[key] = of.form(slot.spec)
                self._parts.setdefault(key, []).append(_Part(of.begin(slot.spec), files.places[key], files))
        ours = {(slot.spec.owner, slot.spec.kind): self._rows.form(slot.spec) for slot in self._rows.slots()}
        _check_forms({key: form for key, form in theirs.items() if self._rows.has_some(key[0])}, ours)

    def begin(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """See SectionSource."""

    def state(self, name: str) -> Mapping[str, Any]:
        """Return nothing: all of it is in sections."""
        return {}

    def fill(self, spec: TensorSpec, begin: int, end: int, view: torch.Tensor) -> None:
        """See SectionSource."""
        first = self._rows.begin(spec)
        at, stop = first + begin, first + end
        for part in self._parts.get((spec.owner, spec.kind), ()):
            low, high = max(at, part.begin), min(stop, part.begin + part.place.slot.spec.numel)
            if low < high:
                part.files.read(part.place, low - part.begin, high - part.begin, view[low - at : high - at])
                if (low, high) == (at, stop):
                    return

    def is_external(self, plan: SectionPlan) -> bool:
        """Return True: the model and the file are compared."""
        return True

    def value(self, name: str) -> None:
        """Return None: the model's values do not count."""

    def close(self) -> None:
        close_all([files.close for files in self._files])


class _RowsOf:
    """The parts of tensors that one rank has."""

    def __init__(self, plans: Sequence[SectionPlan], rows: Rows) -> None:
        self._plans, self._rows = plans, rows
        self._counts = {
            slot.spec.owner: slot.spec.shape[0]
            for plan in plans
            for slot in plan.slots
            if slot.spec.kind == "param" and slot.spec.owner in rows
        }

    def has_some(self, name: str) -> bool:
        """Return True unless this rank has no row of that sharded parameter."""
        return self._counts.get(name, 1) > 0

    def slots(self) -> Iterator[Slot]:
        """Yield the tensors of which this rank has some."""
        for plan in self._plans:
            yield from (slot for slot in plan.slots if self.has_some(slot.spec.owner))

    def _in_rows(self, spec: TensorSpec) -> bool:
        return bool(spec.shape) and spec.shape[0] == self._counts.get(spec.owner)

    def begin(self, spec: TensorSpec) -> int:
        """Return the first element that this rank has of a tensor."""
        return self._rows[spec.owner][0] * (spec.numel // spec.shape[0]) if spec.numel and self._in_rows(spec) else 0

    def form(self, spec: TensorSpec) -> Form:
        """Return dtype and shape of the whole tensor."""
        shape = (self._rows[spec.owner][1], *spec.shape[1:]) if self._in_rows(spec) else spec.shape
        return spec.dtype, shape


def _check_forms(theirs: Mapping[tuple[str, str], Form], ours: Mapping[tuple[str, str], Form]) -> None:
    """Raise CheckpointError if a tensor of this rank is not in the run, or the other way round."""
    lines = []
    for key in dict.fromkeys([*theirs, *ours]):
        if theirs.get(key) == ours.get(key):
            continue
        was, now = (
            "not there" if form is None else f"{str(form[0]).removeprefix('torch.')} {list(form[1])}"
            for form in (theirs.get(key), ours.get(key))
        )
        lines.append(f"- {' '.join(key)}: {was} in the run, {now} here")
    if lines:
        shown = "\n".join(lines[:20]) + (f"\n- and {len(lines) - 20} more" if len(lines) > 20 else "")
        raise CheckpointError(
            f"the run to be resharded is of another model or optimizer, or has other options:\n{shown}\n"
            "Build the same model and optimizer with the same options, or start over with resume='discard'"
        )

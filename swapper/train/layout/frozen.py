"""Maps frozen parameters to the user's own files, plans their sections, and checks that the files do not change.

Sections are runs of the file (formats/stored.py), so that bytes lie in memory as in the file. They include some
neighboring bytes, up to the next sectors, which nothing uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swapper.errors import CheckpointError
from swapper.formats.sources import FileStamp, Rename, Source, open_source, renamed
from swapper.formats.stored import StoredTensor, plan_runs
from swapper.options import ExternalWeights
from swapper.paging.layout import ExternalBytes, SectionPlan, Slot, TensorSpec

SHOWN_NAMES = 5  # in a message
REMEDY = "leave external= out, and the model's own values are copied to the swap files"


class FrozenFiles:
    """The files of frozen parameters.

    Args:
        rename: maps its names to the model's.
    """

    def __init__(self, source: Source, rename: Rename) -> None:
        self.source = source
        self._rename = rename

    @classmethod
    def of(cls, external: ExternalWeights) -> FrozenFiles:
        """Open the user's path.

        Raises:
            CheckpointError: it is no checkpoint, or damaged.
            IoError: it cannot be read.
        """
        return cls(open_source(external.path), external.rename)

    def find(
        self, model: nn.Module, frozen: Mapping[str, nn.Parameter], shapes: Mapping[int, torch.Size] | None = None
    ) -> dict[str, StoredTensor]:
        """Return the stored tensor of each of the `frozen` parameters of `model`, by name. Empty ones are in no file.

        Args:
            shapes: of whole parameters, by id, if they are shards.

        Raises:
            CheckpointError: the file lacks one, or has another shape or dtype.
            ConfigError: `rename` is wrong.
        """
        aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        wanted = {name: p for name, p in frozen.items() if p.numel()}
        stored = renamed(self.source, {alias for p in wanted.values() for alias in aliases[id(p)]}, self._rename)
        found, missing = {}, []
        for name, parameter in wanted.items():
            names = reversed(aliases[id(parameter)])  # of several the last counts, as for torch's load_state_dict
            tensor = next((stored[alias] for alias in names if alias in stored), None)
            if tensor is None:
                missing.append(name)
            else:
                shape = parameter.shape if shapes is None else shapes[id(parameter)]
                found[name] = self._check(name, parameter.dtype, shape, tensor)
        if missing:
            shown = ", ".join(missing[:SHOWN_NAMES]) + (", ..." if len(missing) > SHOWN_NAMES else "")
            raise CheckpointError(
                f"{self.source.path} lacks {len(missing)} of the model's {len(wanted)} frozen parameters: {shown}. Map its names "
                "to the model's with rename= (for a model of peft: swapper.integrations.peft.base_names(model)); or train what it "
                f"lacks; or {REMEDY}"
            )
        return found

    def _check(self, name: str, dtype: torch.dtype, shape: torch.Size, tensor: Any) -> StoredTensor:
        path = self.source.path
        if tuple(shape) != tuple(tensor.shape) or dtype != tensor.dtype:
            raise CheckpointError(
                f"frozen parameter {name} is of {dtype} {list(shape)}, and {tensor.name!r} in {path} of "
                f"{tensor.dtype} {list(tensor.shape)}: build the model with the file's dtype and shape; or {REMEDY}"
            )
        if not isinstance(tensor, StoredTensor) or tensor.stride is not None or tensor.path in self.source.joined:
            raise CheckpointError(
                f"{tensor.name!r}, frozen parameter {name}, is not one run of bytes in {path}: make one file of it by "
                f"`swapper export {path} NEW --to safetensors`; or {REMEDY}"
            )
        return tensor

    def plan(self, group: int, tensors: Iterable[tuple[TensorSpec, StoredTensor]]) -> list[SectionPlan]:
        """Return sections that hold `tensors`, one for each run of a file."""
        plans = []
        for batch in _apart(tensors):
            for run in plan_runs(stored for _, stored in batch):
                slots = tuple(Slot(batch[number][0], offset) for number, offset in run.places)
                external = ExternalBytes(
                    run.path, run.file_offset, min(run.nbytes, self.source.nbytes_of(run.path) - run.file_offset)
                )
                plans.append(SectionPlan(group, "param", slots[0].spec.dtype, slots, run.nbytes, external))
        return plans

    def stamps(self, plans: Iterable[SectionPlan]) -> dict[str, tuple[int, int]]:
        """Return the external files of `plans`: size in bytes and modification time in nanoseconds, by path."""
        used = dict.fromkeys(plan.external.path for plan in plans if plan.external is not None)
        return {str(path): (self.source.stamps[path].nbytes, self.source.stamps[path].changed_ns) for path in used}

    def check_unchanged(self) -> None:
        """Check that the files have not changed. Raises CheckpointError: a file has changed since it was opened."""
        for path, before in self.source.stamps.items():
            try:
                now = FileStamp.of(path)
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be checked any more ({error}), and frozen parameters are read from it: close the manager, "
                    "restore the file with its time, and resume with resume='auto'"
                ) from error
            if now != before:
                raise CheckpointError(
                    f"{path} was changed while frozen parameters are read from it (it had {before.nbytes} bytes, has "
                    f"{now.nbytes}): close the manager, restore the file with its time, and resume with resume='auto'"
                )


def check_external(run: Mapping[str, tuple[int, int]], ours: Mapping[str, tuple[int, int]]) -> None:
    """Raise CheckpointError unless a resumed run has the files that it read from. They may have moved.

    Args:
        run, ours: results of `FrozenFiles.stamps`: the run's, and the present ones.
    """
    if run and not ours:
        raise CheckpointError(
            f"the directory's run reads frozen parameters from {_listed(run)}: pass external= to resume it, or "
            "resume='discard' to delete the run"
        )
    if ours and not run:
        raise CheckpointError(
            f"the directory's run has all of its parameters in its own files: leave external= ({_listed(ours)}) out to "
            "resume it, or pass resume='discard' to delete the run"
        )
    unknown = list(ours.values())
    for path, (nbytes, changed_ns) in run.items():
        if (nbytes, changed_ns) not in unknown:
            raise CheckpointError(
                f"the directory's run reads frozen parameters from {path} as of then ({nbytes} bytes, last changed at "
                f"{changed_ns} ns), and {_listed(ours)} {'have' if len(ours) > 1 else 'has'} another size or time: put the file "
                "back with its time (cp -p), or pass resume='discard' and load the last snapshot"
            )
        unknown.remove((nbytes, changed_ns))


def _listed(stamps: Mapping[str, Any]) -> str:
    paths = list(stamps)
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _apart(tensors: Iterable[tuple[TensorSpec, StoredTensor]]) -> list[list[tuple[TensorSpec, StoredTensor]]]:
    """Return `tensors` in batches of one dtype in which no two share bytes, as tied ones may in a file."""
    batches: list[list[tuple[TensorSpec, StoredTensor]]] = []
    ends: list[tuple[Path, int]] = []
    for spec, stored in sorted(tensors, key=lambda item: (item[1].path, item[1].offset)):
        for number, batch in enumerate(batches):
            path, end = ends[number]
            if batch[0][0].dtype == spec.dtype and (path != stored.path or end <= stored.offset):
                break
        else:
            number, batch = len(batches), []
            batches.append(batch)
            ends.append((stored.path, 0))
        batch.append((spec, stored))
        ends[number] = stored.path, stored.offset + stored.nbytes
    return batches

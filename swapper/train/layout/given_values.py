"""Takes parameters from what the user names: initial values from a function or a file, and frozen parameters in their files.

A model that was built on the meta device is initialized group by group, so that it is never whole in memory. The
values come from a function that is called with each module, as torch's `reset_parameters`, or from a checkpoint whose
tensors are read straight to their targets.

Frozen parameters stay in the user's own files, which must not change. Sections are runs of the file
(formats/stored.py), so that bytes lie in memory as in the file. They include some neighboring bytes, up to the next
sectors, which nothing uses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swapper import _C
from swapper.errors import CheckpointError, ConfigError, InvariantError, UnsupportedError
from swapper.formats.sources import FileStamp, Rename, Source, open_source, opened, read_filled, renamed
from swapper.formats.stored import StoredTensor, plan_runs
from swapper.io.engines import Engine, all_over
from swapper.modules.groups import Group
from swapper.options import ExternalWeights
from swapper.paging.layout import ExternalBytes, SectionPlan, Slot, TensorSpec

Initialize = Callable[[nn.Module], Any]


class Values:
    """The source of initial values.

    Args:
        init: a function of a module that fills the module's own parameters and buffers, or a checkpoint's path: a
            safetensors file, a Hugging Face directory, a torch checkpoint, a DCP directory. A function object's
            `check`, if it has one, is called with the model first, before anything is placed.
        model: on the meta device, all or in part; then the other part keeps its values.
        engine: reads.
        external: names of the parameters with external values.

    Raises:
        ConfigError: `init` is neither.
        CheckpointError: the checkpoint is none, or damaged.
        UnsupportedError: it lacks a parameter, has another shape, or lacks buffers of the model that are on meta.
    """

    def __init__(
        self,
        init: Initialize | str | os.PathLike[str],
        model: nn.Module,
        engine: Engine,
        external: Collection[str] = (),
    ) -> None:
        self._engine = engine
        self._call: Initialize | None = None
        self._source: Source | None = None
        self._wanted = ids_to_fill(model, external)
        if isinstance(init, str | os.PathLike):
            self._source = open_source(init)
            self._stored = find_stored(self._source, model, self._wanted)
        elif callable(init):
            self._call = init
            check = getattr(init, "check", None)
            if check is not None:
                check(model)
        else:
            raise ConfigError(f"init={init!r} is neither a function of a module nor the path of a checkpoint")
        self._model = model
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._done: set[int] = set()

    def batches(self, groups: Iterable[Group]) -> Iterator[tuple[list[nn.Parameter], list[nn.Parameter]]]:
        """Yield the parameters to `fill` together, and all that must be in memory for that.

        Those that were on the meta device need values, or all if none was.
        """
        for group in groups:
            missing = [parameter for _, parameter in group.parameters if id(parameter) in self._wanted]
            if missing:
                yield missing, self._owners_of(missing)

    @torch.no_grad()
    def fill(self, parameters: Iterable[nn.Parameter]) -> None:
        """Fill `parameters`, which are in memory; with a function, all modules that own one of them."""
        if self._source is not None:
            self._read([(self._names[id(p)], p) for p in parameters])
            return
        for module, _ in self._owning(parameters):
            if id(module) not in self._done:
                self._initialize(module)

    def _owners_of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return all parameters that must be in memory for `fill(parameters)`: those of the modules that own one."""
        found = {id(parameter): parameter for parameter in parameters}
        for _, own in self._owning(list(found.values())) if self._call is not None else ():
            found.update({id(p): p for p in own})
        return list(found.values())

    def _owning(self, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """Yield the modules that own one of `parameters`, and all parameters of each."""
        wanted = {id(parameter) for parameter in parameters}
        for module in self._model.modules():
            own = [p for p in module._parameters.values() if p is not None]
            if any(id(p) in wanted for p in own):
                yield module, own

    @torch.no_grad()
    def finish(self) -> None:
        """Fill buffers of modules without parameters."""
        if self._source is not None:
            self._read_buffers()
            return
        for module in self._model.modules():
            if id(module) not in self._done and any(b is not None and b.is_meta for b in module._buffers.values()):
                self._initialize(module)

    def _initialize(self, module: nn.Module) -> None:
        self._done.add(id(module))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        if self._call is not None:
            self._call(module)

    def _read_buffers(self) -> None:
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: a shared one stays shared
        for prefix, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                full_name = f"{prefix}.{name}" if prefix else name
                if buffer is None or full_name not in self._stored:
                    continue
                if id(buffer) not in made:
                    made[id(buffer)] = buffer, torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
                    self._read([(full_name, made[id(buffer)][1])])
                if buffer.is_meta:
                    module._buffers[name] = made[id(buffer)][1]
                else:
                    buffer.copy_(made[id(buffer)][1])

    def _read(self, targets: list[tuple[str, Any]]) -> None:
        """Read stored tensors into tensors in memory, converting dtypes."""
        if self._source is None:
            raise InvariantError("values are read without a checkpoint")
        files: dict[Any, Any] = {}
        landed = []
        try:
            with all_over() as pending:
                for name, target in targets:
                    stored = self._stored[name]
                    straight = stored.dtype == target.dtype and stored.stride is None
                    landing = target if straight else torch.empty(stored.nbytes, dtype=torch.uint8, device="cpu")
                    for at, extent in self._source.extents(stored.path, stored.offset, stored.nbytes):
                        if extent.path not in files:
                            files[extent.path] = _C.File(str(extent.path), read_only=True)
                        file, address = files[extent.path], landing.data_ptr() + at
                        pending.append(self._engine.read(file, extent.offset, address, extent.nbytes, keep=landing))
                    landed.append((stored, target, landing))
            for stored, target, landing in landed:
                if landing is not target:
                    flat = landing.view(stored.dtype)
                    stride = stored.stride or torch.empty(stored.shape, device="meta").stride()
                    target.copy_(flat.as_strided(stored.shape, stride))
        finally:
            for file in files.values():
                file.close()


def check_buffers(model: nn.Module, why: str) -> None:
    """Raise UnsupportedError if a buffer is on the meta device.

    Args:
        why: for the error: the source that has parameters, and not buffers.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UnsupportedError(
                f"buffer {name} is on the meta device, and {why} does not have it: build the model's buffers on the CPU, as "
                "`with swapper.without_weights():` does"
            )


def ids_to_fill(model: nn.Module, external: Collection[str]) -> set[int]:
    """Return the ids of the parameters that get initial values: those on the meta device, or all if none is there.

    Args:
        external: names of the parameters with external values.
    """
    absent = {id(parameter) for parameter in model.parameters() if parameter.is_meta}
    in_place = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in external}
    return (absent or {id(parameter) for parameter in model.parameters()}) - in_place


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a state dict has, by name. A shared one has several names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def buffers_to_fill(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that get initial values, by name: those on the meta device, and if the model keeps no values of its own,
    as its parameters are all there, or none, the persistent ones."""
    found = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_meta}
    keeps_some = len({parameter.is_meta for parameter in model.parameters()}) > 1
    return found if keeps_some else {**found, **dict(persistent_buffers(model))}


def find_stored(source: Source, model: nn.Module, ids: Collection[int]) -> dict[str, StoredTensor]:
    """Return the stored tensor of each parameter with its id in `ids`, and of each buffer that gets a value, by name.

    Buffers that are not on the meta device may be missing.

    Raises:
        UnsupportedError: it lacks one, or has another shape.
    """
    if source.grids:
        raise UnsupportedError(
            f"{source.path}: {next(iter(source.grids))} is in chunks along several dimensions: make one file of it by "
            f"`swapper export {source.path} NEW --to safetensors`"
        )
    # A training checkpoint has its model under "model".
    prefixes = ["", "model."] if source.kind in ("torch", "dcp") else [""]
    aliases: dict[int, list[str]] = {}
    wanted: dict[str, torch.Tensor] = {}
    parameters = ((name, p) for name, p in model.named_parameters(remove_duplicate=False) if id(p) in ids)
    for name, tensor in (*parameters, *buffers_to_fill(model).items()):
        aliases.setdefault(id(tensor), []).append(name)
        wanted[name] = tensor
    found: dict[str, StoredTensor] = {}
    missing = []
    for names in aliases.values():
        stored = {n: source.tensors[p + n] for n in names for p in reversed(prefixes) if p + n in source.tensors}
        for name, one in stored.items():
            if tuple(one.shape) != tuple(wanted[name].shape):
                raise UnsupportedError(
                    f"{source.path} has {name} of shape {list(one.shape)}; the model's is {list(wanted[name].shape)}: "
                    "build the model of this checkpoint, or name the model's own"
                )
        if not stored and (wanted[names[0]].is_meta or isinstance(wanted[names[0]], nn.Parameter)):
            missing += names
        found.update(
            dict.fromkeys(names, next(reversed(stored.values()))) if stored else {}
        )  # as torch ends with the last
    if missing:
        some = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        remedy = ": name the checkpoint of this model, or give init= a function that fills them"
        if not any(isinstance(wanted[name], nn.Parameter) for name in missing):
            remedy = (
                ". Buffers that no checkpoint has get their values when the model is built within swapper.without_weights(), "
                "which leaves them on the CPU"
            )
        raise UnsupportedError(f"{source.path} lacks {len(missing)} of the model's tensors: {some}{remedy}")
    return found


# --- frozen parameters in the user's files ----------------------------------------------------------------------------

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

    @torch.no_grad()
    def fill_buffers(self, model: nn.Module, external: Collection[str]) -> None:
        """Copy the file's persistent buffers to a model whose parameters that the file has are on the meta device.

        Args:
            external: names of the parameters.

        Raises:
            CheckpointError: a buffer has another shape.
            IoError: the file cannot be read.
        """
        if not all(parameter.is_meta for name, parameter in model.named_parameters() if name in external):
            return
        stored = renamed(self.source, set(external), self._rename)
        for name, buffer in persistent_buffers(model):
            if name not in stored:
                continue
            if tuple(stored[name].shape) != tuple(buffer.shape):
                raise CheckpointError(
                    f"buffer {name} is {list(buffer.shape)}, and in {self.source.path} {list(stored[name].shape)}: build the model "
                    f"of this file; or {REMEDY}"
                )
            buffer.copy_(self._read(self._check(name, stored[name].dtype, buffer.shape, stored[name])))

    def _read(self, stored: StoredTensor) -> torch.Tensor:
        content = bytearray()
        for _, extent in self.source.extents(stored.path, stored.offset, stored.nbytes):
            with opened(extent.path) as descriptor:
                content += read_filled(descriptor, extent.path, extent.offset, extent.nbytes)
        return (
            torch.frombuffer(content, dtype=stored.dtype).view(stored.shape) if content else torch.empty(stored.shape)
        )

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

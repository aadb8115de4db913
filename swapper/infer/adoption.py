"""Gives a model the memory that its weights will be read into. From here on the model is changed.

Parameters on the meta device cannot get data: new objects replace them, one for each, so that tied ones stay tied.
Those on the CPU stay the same objects. A model can also be built without weights (`without_weights`), or get a
checkpoint's tensors as mappings of its files (`MappedSource`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from itertools import count
from pathlib import Path

import torch
from torch import nn

from swapper.checkpoint.mapped_files import FileMapping, ShownFile, guard_saves
from swapper.errors import CheckpointError
from swapper.formats.sources import FileStamp, Source
from swapper.formats.stored import FileRange, StoredTensor
from swapper.infer.matching import BufferPlace, Recipe, Weight
from swapper.paging.section import Section

_INITIALISERS = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
"""Of torch.nn.init: they fill a tensor."""


class Places:
    """All module attributes at which a parameter is registered."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.setdefault(id(parameter), []).append((module, name))

    def replace(self, parameter: nn.Parameter, new: nn.Parameter) -> None:
        places = self._places.pop(id(parameter), [])  # none, if the user has replaced it
        for module, name in places:
            module._parameters[name] = new
        self._places[id(new)] = places


def adopt(places: Places, weight: Weight, data: torch.Tensor) -> nn.Parameter:
    """Give a parameter `data`, without a gradient; return the one that has it, on the meta device a new one."""
    parameter = weight.parameter
    if parameter.device.type == "meta":
        parameter = nn.Parameter(data, requires_grad=False)
        places.replace(weight.parameter, parameter)
    else:
        parameter.requires_grad_(False)
        parameter.grad = None
        parameter.data = data
    return parameter


def empty(places: Places, parameters: Iterable[nn.Parameter]) -> None:
    """Free the parameters' memory: the model has shapes on the meta device, as before it was loaded."""
    for parameter in parameters:
        shape, dtype = parameter.shape, parameter.dtype
        places.replace(parameter, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False))


def fill(places: Sequence[BufferPlace], tensors: Sequence[torch.Tensor]) -> None:
    """Give buffers their values, in place, as load_state_dict does: whatever holds one, or a view of it, sees them.

    Of another dtype than the buffer's a tensor takes its place then, as by Module.to. On the meta device new tensors replace
    the buffers, one for each.
    """
    buffers = [place.module._buffers[place.name] for place in places]
    made = {id(buffer): tensor for buffer, tensor in zip(buffers, tensors, strict=True)}
    for place, buffer in zip(places, buffers, strict=True):
        assert buffer is not None
        tensor = made[id(buffer)]
        if buffer.is_meta:
            place.module._buffers[place.name] = tensor
            continue
        has_its_own = all(stride or size <= 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
        if has_its_own:
            with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                buffer.copy_(tensor)
        if not has_its_own or buffer.dtype != tensor.dtype:
            buffer.data = tensor


def view_of(memory: torch.Tensor, offset: int, stored: StoredTensor) -> torch.Tensor:
    """Return `stored` as it lies in `memory` (uint8) at `offset`. Touches nothing."""
    flat = memory[offset : offset + stored.nbytes].view(stored.dtype)
    if stored.stride is not None:
        return flat.as_strided(stored.shape, stored.stride, flat.storage_offset())
    return flat.view(stored.shape)


def locate(
    runs: Sequence[FileRange], sections: Sequence[Section], weights: Sequence[Weight]
) -> list[list[torch.Tensor]]:
    """Return for each weight its parts, as views of the sections that the runs are read into."""
    pairs = zip(runs, sections, strict=True)
    places = {number: (section, offset) for run, section in pairs for number, offset in run.places}
    numbers = count()
    return [[_view(places.get(next(numbers)), part) for part in weight.recipe.parts] for weight in weights]


def _view(place: tuple[Section, int] | None, stored: StoredTensor) -> torch.Tensor:
    if place is None:  # it has no bytes
        return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
    section, offset = place
    return view_of(section.own_bytes(offset, offset + stored.nbytes), 0, stored)


class MappedSource:
    """A checkpoint's tensors as mappings of its files: nothing is read before an access.

    Owns the mappings. Writes to their tensors stay in memory. The tensors are FileTensors: each use checks the file.

    Args:
        source: the checkpoint.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._mappings: dict[Path, FileMapping] = {}

    def made(self, recipe: Recipe) -> torch.Tensor:
        """Return the result of `recipe` for the mapped tensors."""
        return recipe.from_parts([self.tensor(part) for part in recipe.parts])

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        if stored.path in self._source.joined:  # a mapping cannot join its extents
            extents = [e for _, e in self._source.extents(stored.path, stored.offset, stored.nbytes)]
            parts = [replace(stored, path=e.path, offset=e.offset, nbytes=e.nbytes, shape=(-1,)) for e in extents]
            return torch.cat([self.tensor(part) for part in parts]).view(stored.shape)
        guard_saves()
        number = stored.nbytes // stored.dtype.itemsize
        mapping = self._mapping(stored.path)
        flat = torch.frombuffer(mapping, dtype=stored.dtype, count=number, offset=stored.offset)
        shaped = flat.view(stored.shape) if stored.stride is None else flat.as_strided(stored.shape, stored.stride)
        return ShownFile(mapping, stored).watch(shaped)

    def _mapping(self, path: Path) -> FileMapping:
        """Return the mapping of a file. Raises CheckpointError if it is not that of the source."""
        mapping = self._mappings.get(path)
        stamp = self._source.stamps[path]
        if mapping is None or mapping.changed_ns != stamp.changed_ns:  # of another time, which was accepted
            mapping = self._mappings[path] = FileMapping(path, is_fixed=True)
            if FileStamp.of(mapping.descriptor) != stamp:
                del self._mappings[path]
                raise CheckpointError(f"{path} was changed while its weights are in use: load the model again")
        return mapping

    def forget(self) -> None:
        """Forget the mappings. Tensors in use keep their file mapped."""
        self._mappings.clear()


@contextmanager
def without_weights() -> Iterator[None]:
    """Within the context, parameters of new modules have shapes and no memory; buffers are made as usual.

    (`with torch.device("meta")` makes buffers without values too, and those that no checkpoint holds would never get
    any. Initial values of `torch.nn.init` are not computed: for a tensor without memory torch would import a second's
    worth of modules.) Not thread-safe: it changes `nn.Module.register_parameter` and `torch.nn.init` meanwhile.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is None or parameter.device.type == "meta" or nn.parameter.is_lazy(parameter):
            return  # a lazy module makes its parameters at its first call, in memory
        with torch.no_grad():
            empty = torch.empty_like(parameter, device="meta")
        module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)

    initialisers = {name: getattr(nn.init, name) for name in _INITIALISERS}
    try:
        nn.Module.register_parameter = register  # type: ignore[assignment, method-assign]
        for name, function in initialisers.items():
            setattr(nn.init, name, _unless_on_meta(function))
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
        for name, function in initialisers.items():
            setattr(nn.init, name, function)


def _unless_on_meta(initialise: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(initialise)
    def checked(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return tensor if tensor.is_meta else initialise(tensor, *args, **kwargs)

    return checked

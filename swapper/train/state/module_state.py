"""Keeps buffers and the extra state of modules, which a model's state_dict has in addition to parameters.

[Note: buffers in commits] Running statistics, the vectors of spectral norm and queues change in forwards, and a step that follows
depends on them: a commit has them, as a snapshot does. It has those that are not as the script has made them, so that
masks and tables of positions cost nothing. The checksum of a buffer decides, not its version, which a write through
`.data` leaves as it was; once changed it stays in. Buffers that are not persistent are in neither.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from swapper import _C
from swapper.durability.commit import check_state
from swapper.errors import CheckpointError
from swapper.tensors.torch_private import without_torch_functions

log = logging.getLogger("swapper")

EXTRA = "_extra_state"
"""Torch's key for the result of a module's `get_extra_state`."""
LARGE_BYTES = 1 << 16
"""Of a buffer on a device: larger ones are copied to the host only if their version is another. A choice."""


class ModuleState:
    """Finds the part of a model's state that commits need besides its parameters, and restores it.

    Args:
        model: as the user gave it.
        resumed: of the resumed commit, as `in_commit` returned it.
    """

    def __init__(self, model: nn.Module, resumed: Mapping[str, object]) -> None:
        self._resumed = dict(resumed)
        self._changed = set(resumed)
        self._left_out: set[str] = set()
        self._looked_at: dict[str, tuple[weakref.ref[torch.Tensor], int, object]] = {}
        with torch.no_grad(), without_torch_functions():
            self._first = {name: self._digest(name, buffer) for name, buffer in self._buffers(model)}

    def in_commit(self, model: nn.Module) -> dict[str, Any]:
        """Return what differs from what the script has made, by its name in the state_dict, and copied."""
        if self._resumed:  # not restored yet
            return dict(self._resumed)
        found: dict[str, Any] = {}
        with torch.no_grad(), without_torch_functions():
            for name, buffer in self._buffers(model):
                if name not in self._changed and self._digest(name, buffer) != self._first.get(name):
                    self._changed.add(name)
                if name in self._changed:
                    found[name] = buffer.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, module in _with_extra_state(model):
            state = copy.deepcopy(module.get_extra_state())
            if self._may_keep(name, state):
                found[name] = state
        return found

    def restore(self, model: nn.Module) -> None:
        """Give the model what the commit has.

        Raises:
            CheckpointError: the model lacks a buffer, or a module with extra state.
        """
        resumed, self._resumed = self._resumed, {}
        buffers, extra = dict(self._all_buffers(model)), dict(_with_extra_state(model))
        for name, value in resumed.items():
            if name in extra:
                extra[name].set_extra_state(copy.deepcopy(value))
            elif name in buffers and isinstance(value, torch.Tensor):
                _put(model, name, value)
            else:
                raise CheckpointError(
                    f"the commit has {name}, a buffer or a module's extra state, and the model does not: build the same model, or "
                    "say resume='discard' to throw the run away"
                )

    def _digest(self, name: str, buffer: torch.Tensor) -> Any:
        """Return what is another if the content is, and always for a buffer without values."""
        if buffer.is_meta:
            return object()
        if buffer.device.type != "cpu" and buffer.nbytes > LARGE_BYTES:
            of, version, digest = self._looked_at.get(name, (None, 0, None))
            if of is not None and of() is buffer and version == buffer._version:
                return digest
        data = buffer.detach().cpu().contiguous()
        digest = tuple(buffer.shape), buffer.dtype, _C.crc32_address(data.data_ptr(), data.nbytes)
        self._looked_at[name] = weakref.ref(buffer), _version(buffer), digest
        return digest

    def _buffers(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the persistent buffers that a commit can have, each once."""
        seen: set[int] = set()
        for name, buffer in self._all_buffers(model):
            if buffer is None or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            is_plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided and not buffer.is_quantized
            if is_plain:
                yield name, buffer.resolve_conj().resolve_neg()
            else:
                self._leave_out(name, f"a {type(buffer).__name__} of {buffer.layout}")

    def _all_buffers(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}" if prefix else name, buffer

    def _may_keep(self, name: str, state: object) -> bool:
        try:
            check_state(state)
        except CheckpointError as error:
            self._leave_out(name, f"torch.load(weights_only=True) could not read it: {error}")
            return False
        return True

    def _leave_out(self, name: str, why: str) -> None:
        if name not in self._left_out:
            self._left_out.add(name)
            log.warning("commits are without %s (%s): a resumed run has it as the script makes it", name, why)


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}.{EXTRA}" if prefix else EXTRA, module


def _version(buffer: torch.Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _put(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Give a buffer its value: in place, or in all modules that have it, if it has another form now."""
    path, _, key = name.rpartition(".")
    buffer = model.get_submodule(path)._buffers[key]
    if buffer is not None and not buffer.is_meta and buffer.is_contiguous() and _are_alike(buffer, value):
        with torch.no_grad(), without_torch_functions():
            buffer.copy_(value)
        return
    device = "cpu" if buffer is None or buffer.is_meta else buffer.device
    replaced = value.to(device, copy=True)
    for module in [model.get_submodule(path)] if buffer is None else model.modules():
        for other, held in module._buffers.items():
            if held is buffer and (buffer is not None or other == key):
                module._buffers[other] = replaced

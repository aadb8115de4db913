"""Decodes the optimizer state of snapshots that hold it encoded (`state_codec=` of `manager.offload`).

Such a snapshot says so, `content["swapper"]["state_codec"]`, and has in place of a tensor a dictionary: "codec", the
codec's name, and its parts. `torch.load` gives those, which torch's optimizers refuse; swapper's readers give fp32.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from swapper.codecs import CODECS
from swapper.errors import CheckpointError

STATE_CODEC = "state_codec"
"""In the entry "swapper" of a snapshot: the codec of each key that is encoded."""
MARK = ".codec"
"""With what the name ends of an entry of a DCP directory that names a codec."""
RUN_ELEMENTS = 1 << 20
"""Elements that are decoded at once: a choice."""

MakeTensor = Callable[[int], torch.Tensor]
"""Returns memory for a number of fp32 elements."""


def codecs_of(content: object) -> dict[str, str]:
    """Return the codecs that a checkpoint names, by key of the state; none if nothing is encoded."""
    ours = content.get("swapper") if isinstance(content, Mapping) else None
    named = ours.get(STATE_CODEC) if isinstance(ours, Mapping) else None
    texts = named.items() if isinstance(named, Mapping) else ()
    return {key: codec for key, codec in texts if isinstance(key, str) and isinstance(codec, str)}


def decode_state(content: Any, where: str, make: MakeTensor = torch.empty) -> object:
    """Replace the encoded state of a loaded snapshot by fp32 tensors, in place, and return it; anything else is returned as it is.

    Args:
        where: the checkpoint's path, for errors.
        make: makes the memory of a tensor.

    Raises:
        CheckpointError: the state is not what the codec's parts are.
    """
    if not codecs_of(content):
        return content
    try:
        saved = content["optimizer"]
        for optimizer in saved if isinstance(saved, list) else [saved]:  # a list: of several
            for state in optimizer["state"].values():
                state.update({k: _decoded(v, None, make) for k, v in state.items() if _is_encoded(v)})
        masters = content.get("master", {})
        for name, value in masters.items():
            if _is_encoded(value):
                masters[name] = _decoded(value, _find(content["model"], name), make)
        del content["swapper"][STATE_CODEC]
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError, CheckpointError) as error:
        raise CheckpointError(f"{where}: its encoded optimizer state cannot be decoded: {error!r}") from error
    return content


def in_nameless_file(directory: Path) -> MakeTensor:
    """Return a function that makes tensors in files without a name: they take no memory for long."""

    def make(numel: int) -> torch.Tensor:
        nbytes = numel * torch.float32.itemsize
        with tempfile.TemporaryFile(dir=directory) as file:
            file.truncate(nbytes)
            return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.float32)

    return make


def _is_encoded(value: object) -> bool:
    codec = value.get("codec") if isinstance(value, dict) else None
    return isinstance(codec, str) and codec in CODECS


def _find(model: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return a parameter of the model, or of one of several by their names."""
    if name in model:
        found: torch.Tensor = model[name]
        return found
    first, _, rest = name.partition(".")
    return _find(model[first], rest)


def _decoded(value: Mapping[str, Any], parameter: torch.Tensor | None, make: MakeTensor) -> torch.Tensor:
    codec = CODECS[value["codec"]]
    tensors = [value[part.suffix] for part in codec.layout]
    shape = tensors[0].shape
    parts = [tensor.detach().cpu().reshape(-1) for tensor in tensors]
    flat = None if parameter is None else parameter.detach().cpu().reshape(-1)
    numel = parts[0].numel()
    if [part.numel() for part in parts] != [count for _, _, count in codec.parts(numel)]:
        raise CheckpointError(f"parts of the codec {codec.name!r} have other sizes than it makes of {numel} elements")
    found = make(numel)
    for begin in range(0, numel, RUN_ELEMENTS):
        end = min(begin + RUN_ELEMENTS, numel)
        pieces = [part[begin * part.numel() // numel : end * part.numel() // numel] for part in parts]
        codec.decode(pieces, found[begin:end], None if flat is None else flat[begin:end])
    return found.view(shape).to(tensors[0].device)

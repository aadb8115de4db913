"""Maps names of a checkpoint's tensors to a model's names: they differ by a prefix, or by the user's map."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from swapper.errors import ConfigError
from swapper.formats.sources import Source
from swapper.formats.stored import ChunkedTensor, StoredTensor

NESTED = ("model.", "state_dict.", "model_state_dict.", "module.", "_orig_mod.")
"""Prefixes of a model's names in a training checkpoint; also nested ("state_dict.model.")."""

Rename = Mapping[str, str] | Callable[[str], str | None] | None


def renamed(source: Source, wanted: set[str], rename: Rename) -> dict[str, StoredTensor | ChunkedTensor]:
    """Return the source's tensors under the model's names."""
    tensors = source.everything
    if rename is None:
        prefixes = ("", *NESTED, *(outer + inner for outer in NESTED for inner in NESTED))
        prefix = max(prefixes, key=lambda p: sum(p + name in tensors for name in wanted))  # the first of equals
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if not callable(rename) and not isinstance(rename, Mapping):
        raise ConfigError(
            f"rename={rename!r} must be a map from the checkpoint's names to the model's, or a function of them"
        )
    found: dict[str, StoredTensor | ChunkedTensor] = {}
    for name, tensor in tensors.items():
        new = rename(name) if callable(rename) else rename.get(name, name)
        if new is None:
            continue
        if not isinstance(new, str):
            raise ConfigError(f"rename gives {name!r} the name {new!r}, which is not a string")
        if new in found:
            raise ConfigError(f"rename gives both {found[new].name!r} and {name!r} the name {new!r}")
        found[new] = tensor
    return found

"""Sorts options of transformers' from_pretrained: accepted, passed to the configuration, or refused with the
alternative."""

from __future__ import annotations

import os
from typing import Any

import torch

from swapper.errors import ConfigError

_BUDGETS = "weights are read as they are needed: say host_memory=, device= and device_memory="
_QUANTISED = "`swapper export --quantize int8` (or int4) makes weights that run quantised"
_PATH = "give the path of the directory or file itself, in the form that is to be read"
NOT_TAKEN = {
    **dict.fromkeys(("device_map", "max_memory", "offload_folder", "offload_state_dict", "offload_buffers"), _BUDGETS),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "quantization_config"), _QUANTISED),
    **dict.fromkeys(("subfolder", "variant", "gguf_file"), _PATH),
    **dict.fromkeys(("tp_plan", "tp_size", "device_mesh"), "the model runs in one process, on one device"),
    "output_loading_info": "what is missing and unexpected is in transformers' own report",
    "state_dict": "weights are read from `path`; models with other weights are loaded by swapper.load",
}
"""Options of transformers' from_pretrained that make no sense here, and the alternatives."""
FOR_LOADING = (
    "attn_implementation",
    "experts_implementation",
    "ignore_mismatched_sizes",
    "key_mapping",
    "use_safetensors",
    "weights_only",
)
"""Options that are not passed to the configuration, though it may have the name."""


def taken(options: dict[str, Any], dtype: torch.dtype | str | None) -> torch.dtype | str:
    """Refuse unsupported options; remove `torch_dtype`, the old name of `dtype`, and return the given dtype."""
    for name, advice in NOT_TAKEN.items():
        if options.pop(name, None) not in (None, False):
            raise ConfigError(f"{name}= is not taken by swapper's from_pretrained: {advice}")
    old = options.pop("torch_dtype", None)
    if old is not None and dtype is not None and old != dtype:
        raise ConfigError(f"dtype={dtype!r} and torch_dtype={old!r} are both given: pass dtype only")
    return dtype or old or "auto"


def read_config(cls: Any, path: str | os.PathLike[str], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the configuration, changed by those of `options` that are its own, and the others."""
    from transformers import AutoConfig

    reader = getattr(cls, "config_class", None) or AutoConfig
    own = {name: value for name, value in options.items() if name not in FOR_LOADING}
    own["local_files_only"] = True
    config, others = reader.from_pretrained(path, return_unused_kwargs=True, **own)
    others.pop("local_files_only", None)
    return config, {**{name: value for name, value in options.items() if name in FOR_LOADING}, **others}

"""Options of transformers' from_pretrained, and directories of models: taken, passed on, or refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from swapper.errors import CheckpointError, ConfigError, UnsupportedError
from swapper.formats.sources import SUFFIXES, Source, is_plain_name, open_source, parse_object, read_whole
from swapper.runtime.records import short

_BUDGETS = "weights are read as they are needed: say host_memory=, device= and device_memory="
_QUANTIZED = "`swapper export --quantize int8` (or int4) makes weights that run quantized"
_PATH = "give the path of the directory or file itself, in the form that is to be read"
NOT_TAKEN = {
    **dict.fromkeys(("device_map", "max_memory", "offload_folder", "offload_state_dict", "offload_buffers"), _BUDGETS),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "quantization_config"), _QUANTIZED),
    **dict.fromkeys(("subfolder", "variant", "gguf_file"), _PATH),
    **dict.fromkeys(
        ("tp_plan", "tp_size", "device_mesh", "distributed_config"), "the model runs in one process, on one device"
    ),
    "output_loading_info": "what is missing and unexpected is in transformers' own report",
    "state_dict": "weights are read from `path`; models with other weights are loaded by swapper.load",
}
"""Options that make no sense here, and the alternatives."""
FOR_LOADING = (
    "adapter_name", "allow_all_kernels", "attn_implementation", "disable_mmap", "experts_implementation", "fusion_config",
    "generation_config", "ignore_mismatched_sizes", "kernel_config", "key_mapping", "tqdm_class", "use_kernels", "use_safetensors",
    "weights_only",
)  # fmt: skip
"""Options that transformers' loader gets, and the configuration does not, though it may have the name."""
WITHOUT_EFFECT = ("_fast_init", "from_flax", "from_tf", "low_cpu_mem_usage", "mirror")
"""Options that transformers itself ignores."""
OF_THE_HUB = (
    "_commit_hash", "adapter_kwargs", "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision",
    "token", "trust_remote_code",
)  # fmt: skip
"""Options that say where a model of the hub comes from; here it is a directory."""
MAX_CONFIG_BYTES = 10_000_000  # of a sane adapter_config.json; it is read whole


def take_dtype(options: dict[str, Any], dtype: torch.dtype | str | None) -> torch.dtype | str:
    """Refuse unsupported options; remove `torch_dtype`, the old name of `dtype`, and return the given dtype.

    Args:
        options: of the user; changed.
        dtype: as given by its present name.

    Raises:
        ConfigError: an option is not taken, or both names are given.
    """
    for name, advice in NOT_TAKEN.items():
        if options.pop(name, None) not in (None, False, ""):
            raise ConfigError(f"{name}= is not taken by swapper's from_pretrained: {advice}")
    old = options.pop("torch_dtype", None)
    if old is not None and dtype is not None and old != dtype:
        raise ConfigError(f"dtype={dtype!r} and torch_dtype={old!r} are both given: pass dtype only")
    return dtype or old or "auto"


def read_config(cls: Any, path: str | os.PathLike[str], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the configuration in `path`, changed by those of `options` that are its own, and the others.

    Args:
        cls: the model's class, or an auto class.
        path: a directory, or a configuration's file.
        options: of the user.

    Raises:
        CheckpointError: there is none. transformers would take its class's default, a model of another size.
    """
    from transformers import AutoConfig

    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise CheckpointError(
            f"{path} has no config.json: pass config=, the model's configuration, or put the file there"
        )
    reader = getattr(cls, "config_class", None) or AutoConfig
    own = {name: value for name, value in options.items() if name not in FOR_LOADING}
    own["local_files_only"] = True
    config, others = reader.from_pretrained(path, return_unused_kwargs=True, **own)
    others.pop("local_files_only", None)
    return config, {**{name: value for name, value in options.items() if name in FOR_LOADING}, **others}


def check_config(cls: Any, config: Any, path: str | os.PathLike[str], options: dict[str, Any]) -> None:
    """Refuse what the configuration says of weights and code that would not be followed.

    Args:
        cls: the model's class, or an auto class.
        config: the model's.
        path: of the model, for messages, and to look for files.
        options: of the user.

    Raises:
        UnsupportedError: weights are quantized, or in further files; or the model's class is code in the directory.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        kind = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        kind = kind or "bitsandbytes"  # whose older files do not say it
        raise UnsupportedError(
            f"{path} has weights that {getattr(kind, 'value', kind)} has quantized (quantization_config in config.json), and only "
            "its own kernels read them. Name the model's checkpoint that is not quantized, or save one by transformers "
            f"(model.dequantize(), model.save_pretrained()); {_QUANTIZED}"
        )
    others = [name for name in getattr(type(config), "extra_files", ()) if (Path(path) / name).is_file()]
    if others:
        raise UnsupportedError(
            f"{path} has weights in {', '.join(others)}, too, which are not read: use transformers itself"
        )
    reference = (getattr(config, "auto_map", None) or {}).get(getattr(cls, "__name__", ""))
    if options.get("trust_remote_code") and reference is not None:
        raise UnsupportedError(
            f"the class of {path} is its own code ({reference}): pass that class, which "
            "transformers.dynamic_module_utils.get_class_from_dynamic_module gets, instead of "
            f"{cls.__name__} with trust_remote_code=True"
        )


def check_directory(path: str | os.PathLike[str]) -> None:
    """Refuse a path that does not exist, and one with an adapter of peft.

    Raises:
        CheckpointError: there is no such path.
        UnsupportedError: it has an adapter.
    """
    directory = Path(path)
    if not directory.exists():
        raise CheckpointError(
            f"{path} does not exist: a model is read in place, from a directory on this machine. huggingface_hub.snapshot_download "
            "gets one from the hub, and returns its path"
        )
    adapter = directory / "adapter_config.json"
    if not adapter.is_file():
        return
    if (directory / "config.json").is_file():
        base = (
            "its base from the file of weights itself (with config=), or from a directory without adapter_config.json"
        )
    else:
        found = parse_object(str(adapter), read_whole(adapter, MAX_CONFIG_BYTES))
        base = f"the base model first, from its own directory (it was {short(found.get('base_model_name_or_path'))})"
    raise UnsupportedError(
        f"{path} has an adapter of peft (adapter_config.json), which is not loaded with the model: load {base}, and then the "
        f"adapter by peft.PeftModel.from_pretrained(model, {str(path)!r})"
    )


def open_weights(path: str | os.PathLike[str], config: Any, use_safetensors: bool | None) -> Source:
    """Open the weights that transformers would take.

    Args:
        path: a directory or a file.
        config: may name the file (`transformers_weights`).
        use_safetensors: True: only such files; False: only others; None: safetensors first.

    Raises:
        CheckpointError: there are none, or they are damaged.
    """
    named = getattr(config, "transformers_weights", None)
    if Path(path).is_dir() and named is not None:
        if not is_plain_name(named):
            raise CheckpointError(
                f"{path}: transformers_weights={short(named)} in config.json names no file of the directory"
            )
        return open_source(Path(path) / named)
    safe, others = SUFFIXES[:1], SUFFIXES[1:]
    wanted = SUFFIXES if use_safetensors is None else safe if use_safetensors else others
    source = open_source(path, wanted)
    if use_safetensors is not None and source.kind == ("torch" if use_safetensors else "safetensors"):
        raise ConfigError(
            f"use_safetensors={use_safetensors}, and {path} is a {source.kind} file: leave the option out"
        )
    return source

"""Makes a model on the meta device, from a configuration, a function, or a checkpoint; and a rank's part of it."""

from __future__ import annotations

import copy
import importlib
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swapper.errors import ConfigError, SwapperError
from swapper.formats.sources import open_source

KINDS = "a Hugging Face config.json or its directory, a .safetensors file or its index, or package.module:function"
SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
)
SHARDED_DTYPE = torch.float32
"""Of the shards of `fully_shard` with a mixed-precision policy, which are the masters."""


def make_model(source: str, dtype: torch.dtype) -> nn.Module:
    """Return a model on the meta device. Raises ConfigError: there is none, or it cannot be made."""
    module, colon, function = source.partition(":")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = _call(module, function) if colon else _from_path(Path(source))
    except SwapperError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # of the user's code, or of transformers
        raise ConfigError(f"no model can be made from {source}: {type(error).__name__}: {error}") from error
    finally:
        torch.set_default_dtype(before)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{source} returned a {type(model).__name__}: it must return a torch.nn.Module")
    if not any(parameter.numel() for parameter in model.parameters()):
        raise ConfigError(f"{source} has no parameters: give {KINDS}")
    return model.to(dtype)


def _call(module: str, function: str) -> object:
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current directory, as with python -m: a command has its own directory there
    return getattr(importlib.import_module(module), function)()


def _from_path(path: Path) -> nn.Module:
    config = path / "config.json" if path.is_dir() else path
    if config.suffix == ".json" and not config.name.endswith(".index.json") and config.is_file():
        return _from_config(config)
    if not path.exists():
        raise ConfigError(f"{path} does not exist: give {KINDS}")
    return _from_checkpoint(path)


def _from_config(path: Path) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("a Hugging Face configuration needs transformers: pip install transformers") from error
    config = AutoConfig.from_pretrained(path)
    sizes = {name: value for name in SIZES if type(value := getattr(config, name, None)) is int}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{path}: {name} is {value}, and must be at least 1")
    heads, key_heads = (sizes.get(name, 1) for name in SIZES[:2])
    if heads % key_heads:  # transformers accepts it
        raise ConfigError(f"{path}: num_attention_heads {heads} is no multiple of num_key_value_heads {key_heads}")
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def _from_checkpoint(path: Path) -> nn.Module:
    root = nn.Module()
    for name, stored in open_source(path).everything.items():
        if not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
            raise ConfigError(
                f"{path}: tensor {name} is {stored.dtype}: quantized weights cannot be trained. Give a checkpoint in bf16, fp16 or "
                "fp32"
            )
        *modules, leaf = name.split(".")
        _module_of(root, modules).register_parameter(leaf, nn.Parameter(torch.empty(stored.shape, device="meta")))
    return root


def _module_of(root: nn.Module, names: list[str]) -> nn.Module:
    """Return the module at a path, made where it is missing: numbered modules are children of a list, whose layers are units."""
    at: Any = root
    for name, below in itertools.zip_longest(names, names[1:]):
        if name not in at._modules:
            is_list = below is not None and below.isdigit()
            is_table = below is None and ("embed" in name or name in ("wte", "wpe"))
            child = nn.ModuleList() if is_list else nn.Embedding(1, 1) if is_table else nn.Module()
            at._modules[name] = child
        at = at._modules[name]
    module: nn.Module = at
    return module


def shard_of(model: nn.Module, ranks: int) -> nn.Module:
    """Return what the first rank has of a model under `fully_shard`: a part of the rows of each parameter, in fp32."""

    def shard(parameter: nn.Parameter) -> nn.Parameter:
        shape = parameter.shape
        rows = (math.ceil(shape[0] / ranks), *shape[1:]) if shape else shape
        return nn.Parameter(torch.empty(rows, dtype=SHARDED_DTYPE, device="meta"), parameter.requires_grad)

    return copy.deepcopy(model, {id(parameter): shard(parameter) for parameter in model.parameters()})

"""Makes a model on the meta device, from a configuration, a function, or a checkpoint's header; and a rank's part of it."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swapper.errors import ConfigError
from swapper.formats.safetensors import DTYPES, MAX_HEADER_BYTES, METADATA_KEY, SIZE_BYTES
from swapper.io.beneath import read_small
from swapper.runtime.records import parse_json

KINDS = "a Hugging Face config.json or its directory, a .safetensors file or its index, or package.module:function"
INDEX = "model.safetensors.index.json"
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
    except ConfigError:
        raise
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
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{module}:{function} cannot be imported: {error}. Give package.module:function; the module is looked for here "
            "and among what is installed"
        ) from error
    if not callable(found):
        raise ConfigError(f"{module}:{function} is a {type(found).__name__}: give a function that returns the model")
    needed = _needed_arguments(found)
    if needed:
        raise ConfigError(
            f"{module}:{function} needs {', '.join(needed)}, which a command cannot give: name a function without arguments, as "
            f"`def model(): return {function}(...)`"
        )
    return found()


def _needed_arguments(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some of C have none
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is inspect.Parameter.empty and one.kind not in kinds]


def _from_path(path: Path) -> nn.Module:
    if path.is_dir():
        names = ("config.json", INDEX, "model.safetensors")
        path = next((path / name for name in names if (path / name).is_file()), path / "config.json")
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give {KINDS}")
    if path.suffix == ".safetensors":
        return _from_tensors(path, _header_of(path))
    if path.name.endswith(".index.json"):
        return _from_tensors(path, _headers_of_index(path))
    return _from_config(path)


# --- a Hugging Face configuration -------------------------------------------------------------------------------------


def _from_config(path: Path) -> nn.Module:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("a Hugging Face configuration needs transformers: pip install transformers") from error
    content = _read_json(path)
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        has = (
            "has no model_type, so its architecture is not known: add it, as 'llama'"
            if kind is None
            else f"has the model_type {kind!r}, which this transformers does not know: a newer one may"
        )
        raise ConfigError(
            f"{path} {has}; else give its weights' .safetensors file or index, of which the header is read, or "
            "package.module:function"
        )
    _check_sizes(path, content)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return model


def _check_sizes(path: Path, content: Mapping[str, object]) -> None:
    """Raise ConfigError for sizes that contradict each other, some of which transformers accepts."""
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        value = content.get(name, 1)
        if type(value) is int and value < 1:
            raise ConfigError(f"{path}: {name} is {value}, and must be at least 1")
    width, heads, key_heads = (content.get(n) for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if type(width) is int and type(heads) is int and content.get("head_dim") is None and width % heads:
        raise ConfigError(f"{path}: hidden_size {width} is no multiple of num_attention_heads {heads}: give head_dim")
    if type(heads) is int and type(key_heads) is int and (key_heads < 1 or heads % key_heads):
        raise ConfigError(f"{path}: num_attention_heads {heads} is no multiple of num_key_value_heads {key_heads}")


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = parse_json(read_small(path, MAX_HEADER_BYTES, follow=True), finite=False)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}): give {KINDS}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} has a {type(content).__name__} instead of an object: give {KINDS}")
    return content


# --- a checkpoint's header --------------------------------------------------------------------------------------------


class _PlannedModule(nn.Module):
    """A module that has parameters, and is never called."""

    def forward(self) -> None:
        raise NotImplementedError("it is planned, and computes nothing")


def _header_of(path: Path) -> dict[str, object]:
    """Return the header of a safetensors file, of which no more than the header needs to be there."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(SIZE_BYTES), "little")
        if size > MAX_HEADER_BYTES:
            raise ConfigError(f"{path} is not a safetensors file: it states a header of {size} bytes")
        text = file.read(size)
    if len(text) < size or not size:
        raise ConfigError(f"{path} is cut off in its header of {size} bytes: read at least {SIZE_BYTES + size} bytes")
    try:
        header = parse_json(text)
        return {name: entry for name, entry in header.items() if name != METADATA_KEY}
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not a safetensors file: its header is not a JSON object") from error


def _headers_of_index(path: Path) -> dict[str, object]:
    files = _read_json(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ConfigError(f"{path} has no weight_map: it is not an index of safetensors files")
    tensors: dict[str, object] = {}
    for name in sorted({str(file) for file in files.values()}):
        file = path.parent / Path(name).name
        if not file.is_file():
            raise ConfigError(
                f"{path} names {name}, which is not beside it: that has the tensors' shapes in its first bytes, an index has "
                "none. Fetch it, whole or its header alone, or give the config.json"
            )
        tensors |= _header_of(file)
    missing = sorted(files.keys() - tensors.keys())
    if missing:
        raise ConfigError(f"{path} names the tensor {missing[0]}, which no file has")
    return {name: tensors[name] for name in files}


def _from_tensors(path: Path, tensors: Mapping[str, Any]) -> nn.Module:
    root = _PlannedModule()
    for name, entry in tensors.items():
        try:
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            if not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(shape)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: tensor {name} has no known dtype and shape: {entry!r}") from error
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ConfigError(
                f"{path}: tensor {name} is {entry['dtype']}: quantized weights cannot be trained. Give a checkpoint in BF16, F16 "
                "or F32"
            )
        *modules, leaf = name.split(".")
        _module_of(root, modules).register_parameter(leaf, nn.Parameter(torch.empty(shape, device="meta")))
    return root


def _module_of(root: nn.Module, names: list[str]) -> nn.Module:
    """Return the module at a path, made where it is missing: numbered modules are children of a list, whose layers are units."""
    at = root
    for name, below in itertools.zip_longest(names, names[1:]):
        if name not in at._modules:
            is_list = below is not None and below.isdigit()
            is_table = below is None and ("embed" in name or name in ("wte", "wpe"))
            child = nn.ModuleList() if is_list else nn.Embedding.__new__(nn.Embedding) if is_table else _PlannedModule()
            if is_table:
                nn.Module.__init__(child)
                child.sparse = False
            at._modules[name] = child
        at = at._modules[name]  # type: ignore[assignment]
    return at


# --- a rank's ---------------------------------------------------------------------------------------------------------


def shard_of(model: nn.Module, ranks: int) -> nn.Module:
    """Return what the first rank has of a model under `fully_shard`: a part of the rows of each parameter, in fp32."""

    def shard(parameter: nn.Parameter) -> nn.Parameter:
        shape = parameter.shape
        rows = (math.ceil(shape[0] / ranks), *shape[1:]) if shape else shape
        return nn.Parameter(torch.empty(rows, dtype=SHARDED_DTYPE, device="meta"), parameter.requires_grad)

    return copy.deepcopy(model, {id(parameter): shard(parameter) for parameter in model.parameters()})

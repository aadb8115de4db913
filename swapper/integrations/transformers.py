"""Loads models of transformers with their weights on NVMe: `from_pretrained` with a budget, and `for_training`; and trains
them by a Trainer that is `offloaded` (trainer.py).

transformers itself decides the model and which tensor of the checkpoint goes where: its own `from_pretrained` runs on
tensors without data that record their source (swapper.infer.tracing). Renamed keys, tied weights, dtypes,
buffers that are not in the checkpoint and the report of missing keys are therefore its own; swapper reads the bytes, in
place.

    model = from_pretrained(AutoModelForCausalLM, "path/to/model", host_memory="4GiB")
    model.generate(...)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swapper.checkpoint.quantization import layouts_of
from swapper.device.device import Device
from swapper.errors import CheckpointError, ConfigError, StateError, UnsupportedError
from swapper.formats.sources import SUFFIXES, Source, is_plain_name, open_source, parse_object, read_whole
from swapper.infer.adoption import MappedSource, Places
from swapper.infer.load_model import Budgets, load_matched
from swapper.infer.matching import BufferPlace, Match, Weight, check_values
from swapper.infer.tracing import Traced, recipe_of
from swapper.integrations.trainer import OffloadTrainerMixin, offloaded
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


def open_weights(path: str | os.PathLike[str], config: object, use_safetensors: bool | None) -> Source:
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


__all__ = ["FirstValues", "OffloadTrainerMixin", "for_training", "from_pretrained", "offloaded", "streamed"]

STREAMED = "_swapper_streamed"


def from_pretrained(
    cls: Any,
    path: str | os.PathLike[str],
    *,
    host_memory: int | str = "auto",
    device: str | torch.device | Device = "cpu",
    device_memory: int | str = "auto",
    config: Any = None,
    dtype: torch.dtype | str | None = None,
    backend: str = "auto",
    **options: Any,
) -> Any:
    """Return a model as `cls.from_pretrained(path)` does, in evaluation mode, but with its weights read from `path` as
    needed.

    Args:
        cls: a model class of transformers, or an auto class (AutoModelForCausalLM).
        path: a directory with config.json and weights; or a file of weights, with `config` given.
        host_memory, device, device_memory: see swapper.load.
        config: the model's configuration, if it is not to be read from `path`.
        dtype: None or "auto" is the checkpoint's; weights are converted to another one as they are read. Also as
            `torch_dtype`.
        backend: of the I/O engine.
        options: for `cls.from_pretrained`, such as attn_implementation="sdpa", or for the configuration, such as
            num_labels=3. The default of experts_implementation is "eager", the only one that uses single experts.

    Raises:
        As swapper.load; and errors of transformers.
        ConfigError: an option places weights, which `host_memory` and the others here do.
    """
    budgets = Budgets.of(host_memory, device, device_memory)  # before anything slow
    model, source = _traced_model(cls, path, config, dtype, options)
    if "experts_implementation" not in options:
        _take_experts_one_by_one(model)
    return load_matched(model, source, _take_out(model), budgets, backend)


@contextmanager
def streamed(
    *,
    host_memory: int | str = "auto",
    device: str | torch.device | Device = "cpu",
    device_memory: int | str = "auto",
    backend: str = "auto",
) -> Iterator[None]:
    """Have a library that calls transformers' `from_pretrained` inside get a model of this module's `from_pretrained`.

            with streamed(host_memory="1GiB"):
                model = SentenceTransformer("path/to/model")

    For one model; several share a budget by `swapper.shared_memory` around this, without `host_memory`.

    Args:
        host_memory, device, device_memory, backend: as of `from_pretrained`.

    Raises:
        StateError: it is used inside of another; or by several threads at once.
        ConfigError: a second model is loaded inside, although `host_memory` is for one.
    """
    from transformers import PreTrainedModel

    models: Any = PreTrainedModel
    usual = vars(models)["from_pretrained"]
    if getattr(usual, "__func__", None) is None or hasattr(usual.__func__, STREAMED):
        raise StateError("streamed is used inside of another: one is enough")
    loaded: list[str] = []

    def read_in_place(cls: Any, path: Any, *arguments: Any, **options: Any) -> Any:
        if path is None:  # as this module calls it, with traced tensors
            return usual.__func__(cls, path, *arguments, **options)
        if arguments:
            raise ConfigError(f"arguments of {cls.__name__} after the path are not taken: give them by name")
        if loaded and host_memory != "auto":
            raise ConfigError(
                f"{path} would be a second model with host_memory={host_memory!r}, after {loaded[0]}: load each in a streamed of "
                "its own, or all inside of swapper.shared_memory"
            )
        if adapter := (options.get("adapter_kwargs") or {}).get("_adapter_model_path"):  # `path` is its base then
            check_directory(adapter)
        options = {name: value for name, value in options.items() if name not in OF_THE_HUB}
        if not options.get("subfolder"):
            options.pop("subfolder", None)
        model = from_pretrained(
            cls, path, host_memory=host_memory, device=device, device_memory=device_memory, backend=backend, **options
        )
        loaded.append(str(path))
        return model

    setattr(read_in_place, STREAMED, True)
    models.from_pretrained = classmethod(read_in_place)
    try:
        yield
    finally:
        models.from_pretrained = usual


def for_training(
    cls: Any,
    path: str | os.PathLike[str],
    *,
    config: Any = None,
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> tuple[Any, FirstValues]:
    """Return a model as `cls.from_pretrained(path)` does but without its values, and their source for
    `manager.offload`.

            model, values = for_training(AutoModelForCausalLM, "path/to/model")
            model, optimizer = manager.offload(model, AdamW(model.parameters()), init=values)

    So the model is never whole in memory. transformers makes values that are not in the checkpoint (a new head), in
    memory. In evaluation mode, as from transformers; a Trainer sets training mode.

    Args:
        cls, path, config, options: as for `from_pretrained`; but transformers chooses the default of
            experts_implementation.
        dtype: of the parameters; None or "auto" is the checkpoint's.

    Raises:
        CheckpointError: `path` is no checkpoint, or damaged.
        UnsupportedError: values would be missing.
        Errors of transformers.
    """
    model, source = _traced_model(cls, path, config, dtype, options)
    match = _take_out(model)
    for weight in match.weights:
        weight.parameter.requires_grad_(weight.parameter.dtype.is_floating_point)
    return model, FirstValues(source, match)


class FirstValues:
    """The values of a model of `for_training`: an `init` for `manager.offload`.

    Args:
        source: the checkpoint.
        match: the source of each parameter and buffer.
    """

    def __init__(self, source: Source, match: Match) -> None:
        self._source = source
        self._weights = {id(weight.parameter): weight for weight in match.weights}
        self._buffers = {(id(place.module), place.name): place.recipe for place in match.buffers}

    def check(self, model: nn.Module) -> None:
        """Raise UnsupportedError if a parameter without values was put into the model since."""
        for name, parameter in model.named_parameters():
            if parameter.is_meta and id(parameter) not in self._weights:
                raise UnsupportedError(
                    f"parameter {name} has no values, and is not in {self._source.path}. Parameters added to the model later "
                    "must have values: adapters of peft by swapper.integrations.peft.get_peft_model"
                )

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        """Fill the module's own parameters and buffers.

        Raises:
            CheckpointError: the checkpoint has changed since.
        """
        self._source.check_unchanged()
        mapped = MappedSource(self._source)  # a new one each time: its pages stay in the process until it is closed
        for name, buffer in module._buffers.items():
            if buffer is not None and (id(module), name) in self._buffers:
                buffer.copy_(mapped.made(self._buffers[id(module), name]))
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) in self._weights:
                parameter.copy_(mapped.made(self._weights[id(parameter)].recipe))


def _traced_model(
    cls: Any, path: str | os.PathLike[str], config: Any, dtype: Any, options: dict[str, Any]
) -> tuple[nn.Module, Source]:
    """Return the model that transformers makes of traced tensors, and their source."""
    dtype = take_dtype(options, dtype)
    check_directory(path)
    given = dict(options)
    if config is None or isinstance(config, str | os.PathLike):
        config, options = read_config(cls, config or path, options)
    else:
        options = {name: value for name, value in options.items() if name not in OF_THE_HUB}
    check_config(cls, config, path, given)
    source = open_weights(path, config, options.get("use_safetensors"))
    layouts = layouts_of(source.metadata, source.path)
    traced = {name: Traced.of(stored, layouts.get(name)) for name, stored in source.everything.items()}
    made = _model_class(cls, config).from_pretrained(None, config=config, state_dict=traced, dtype=dtype, **options)
    made.config.name_or_path = str(path)
    is_auto = hasattr(cls, "_model_mapping")
    _read_generation_config(made, path, options if is_auto else given, is_auto)
    return made, source


def _model_class(cls: Any, config: Any) -> Any:
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is None:
        return cls
    if type(config) not in mapping:
        raise UnsupportedError(f"{cls.__name__} has no model for a {type(config).__name__}: name the model's class")
    found = mapping[type(config)]
    if not isinstance(found, tuple):
        return found
    named = [model_class for model_class in found if model_class.__name__ in (config.architectures or ())]
    return (named or found)[0]


def _read_generation_config(model: Any, path: str | os.PathLike[str], options: dict[str, Any], is_auto: bool) -> None:
    """Have transformers read what `path` says of generation, with those of the user's options that are its own."""
    if not Path(path).is_dir() or not model.can_generate():
        return
    own = {name: value for name, value in options.items() if name not in (*FOR_LOADING, *OF_THE_HUB, *WITHOUT_EFFECT)}
    hub = dict.fromkeys(("cache_dir", "proxies", "token", "revision")) | {"force_download": False, "subfolder": ""}
    model.adjust_generation_fn(
        options.get("generation_config"), is_auto, None, str(path), local_files_only=True,
        trust_remote_code=options.get("trust_remote_code"), **hub, **own,
    )  # fmt: skip


def _take_experts_one_by_one(model: nn.Module) -> None:
    """Choose the mixture-of-experts form that indexes experts, so that only the used ones are read."""
    for name, module in model.named_modules():
        config: object = getattr(module, "config", None)
        if name.split(".")[-1] == "experts" and hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"


def _take_out(model: nn.Module) -> Match:
    """Return the recipes of the model's traced tensors, and replace those with plain tensors without data."""
    places = Places(model)
    weights, buffers = [], []
    for name, parameter in list(model.named_parameters()):
        if isinstance(parameter, Traced):
            plain = nn.Parameter(
                torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=False
            )
            places.replace(parameter, plain)
            weights.append(Weight(name, plain, recipe_of(parameter)))
    empty: dict[int, torch.Tensor] = {}  # by id: a shared one stays shared
    found = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if isinstance(b, Traced)]
    for module, name, buffer in found:
        module._buffers[name] = empty.setdefault(
            id(buffer), torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
        )
        buffers.append(BufferPlace(module, name, recipe_of(buffer)))
    check_values(model, {id(weight.parameter) for weight in weights}, buffers)
    return Match(weights, buffers)

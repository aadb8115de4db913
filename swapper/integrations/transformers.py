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
from swapper.errors import ConfigError, StateError, UnsupportedError
from swapper.formats.sources import Source
from swapper.infer.adoption import MappedSource, Places
from swapper.infer.load_model import Budgets, load_matched
from swapper.infer.matching import BufferPlace, Match, Weight, check_values
from swapper.infer.tracing import Traced, recipe_of
from swapper.integrations.pretrained_options import (
    FOR_LOADING,
    OF_THE_HUB,
    WITHOUT_EFFECT,
    check_config,
    check_directory,
    open_weights,
    read_config,
    take_dtype,
)
from swapper.integrations.trainer import OffloadTrainerMixin, offloaded

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
        config: Any = getattr(module, "config", None)
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

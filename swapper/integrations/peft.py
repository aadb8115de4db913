"""Adds adapters of the peft library to a model whose values come later (`for_training`, `swapper.without_weights`).

peft puts an adapter's parameters on the device of the adapted layer. Next to one on the meta device they would be there
too, and have no values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from swapper.errors import UnsupportedError

INDEPENDENT = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` for adapters that are not initialized from the adapted layers."""

WRAPPED = (".base_layer.", ".original_module.")
"""Parts that peft inserts into the names of parameters whose modules it wraps."""


def get_peft_model(model: nn.Module, config: Any, **options: Any) -> Any:
    """Return the result of `peft.get_peft_model(model, config, **options)`, with initialized adapters, in memory.

    Args:
        model: peft sees parameters on the meta device as zeros that take no memory; they are on meta again afterwards.
        config: a LoraConfig whose adapters are not initialized from the adapted layers.
        options: peft's own.

    Raises:
        UnsupportedError: peft's result would depend on the model's values.
    """
    import peft

    _check_independent(config)
    stand_ins: dict[int, nn.Parameter] = {}
    absent: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                absent.append((module, name, parameter))
                zeros = torch.zeros((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)
                stand_in = nn.Parameter(zeros, requires_grad=parameter.requires_grad)
                module._parameters[name] = stand_ins.setdefault(id(parameter), stand_in)
    try:
        return peft.get_peft_model(model, config, **options)
    finally:
        for module, name, parameter in absent:
            parameter.requires_grad_(stand_ins[id(parameter)].requires_grad)
            module._parameters[name] = parameter


def _check_independent(config: Any) -> None:
    """Raise UnsupportedError unless the result of `config` is independent of the model's values."""
    kind = getattr(getattr(config, "peft_type", None), "value", type(config).__name__)
    if kind != "LORA":
        raise UnsupportedError(f"peft_type {kind} in a model without values is not supported: use a LoraConfig")
    wanted = {
        "init_lora_weights": config.init_lora_weights not in INDEPENDENT,
        "use_dora": config.use_dora,
        "modules_to_save": config.modules_to_save,
        "trainable_token_indices": getattr(config, "trainable_token_indices", None),
        "target_parameters": getattr(config, "target_parameters", None),
    }
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise UnsupportedError(
                f"{name}={getattr(config, name)!r} needs the model's values, which come in manager.offload: leave it out, or load "
                "the model with its values (transformers' from_pretrained) before"
            )


def base_names(model: nn.Module) -> dict[str, str]:
    """Return, by the name of a parameter or buffer without adapters, its name in `model`: a `rename` for
    `swapper.ExternalWeights`.

            plain, config = AutoModelForCausalLM.from_config(...), LoraConfig(...)
            model = get_peft_model(plain, config)
            base = swapper.ExternalWeights(path="path/to/base", rename=base_names(model))
            manager.offload(model, optimizer, external=base)

    Args:
        model: a result of `get_peft_model`, peft's or this module's.
    """
    found: dict[str, str] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, _ in tensors:
        plain = name.removeprefix("base_model.model.")
        for part in WRAPPED:
            plain = plain.replace(part, ".")
        found.setdefault(plain, name)
    return found

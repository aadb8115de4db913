"""Building a model without its weights: parameters on the meta device, buffers as they should be.

`with torch.device("meta")` puts buffers there too, and those that no checkpoint holds (rotary frequencies, masks) have no values
then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def without_weights() -> Iterator[None]:
    """Within, parameters of modules that are made have shapes and no memory; buffers are made as always.

    Not for several threads at one time: it changes `nn.Module.register_parameter` while it lasts.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            with torch.no_grad():
                empty = torch.empty_like(parameter, device="meta")
            module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = register  # type: ignore
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore

"""Loads models of diffusers (UNets, transformers, VAEs) with their weights on NVMe: `from_pretrained` with a budget.

unet = from_pretrained(UNet2DConditionModel, "path/to/pipeline/unet", host_memory="2GiB")
pipeline = DiffusionPipeline.from_pretrained("path/to/pipeline", unet=unet)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from swapper.device.device import Device
from swapper.errors import CheckpointError, UnsupportedError
from swapper.infer.adoption import without_weights
from swapper.infer.load_model import Budgets, load


def from_pretrained(
    cls: Any,
    path: str | os.PathLike[str],
    *,
    host_memory: int | str = "auto",
    device: str | torch.device | Device = "cpu",
    device_memory: int | str = "auto",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
) -> Any:
    """Return a model as `cls.from_pretrained(path, torch_dtype=dtype)` does, but with its weights read from `path` as needed.

    Args:
        cls: a model class of diffusers (UNet2DConditionModel).
        path: a directory of `save_pretrained`; of a pipeline, the folder of this model.
        host_memory, device, device_memory, backend: see swapper.load.
        dtype: of floating-point weights, which are converted as they are read. diffusers' own default.

    Raises:
        As swapper.load; and errors of diffusers.
        CheckpointError: `path` has no config.json; its names are not the model's, as in checkpoints that diffusers renames.
        UnsupportedError: the model is quantized, or keeps some modules in fp32.
    """
    Budgets.of(host_memory, device, device_memory)  # before anything slow
    if not Path(path, "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json: name the folder of one model, as save_pretrained writes it")
    config = cls.load_config(path, local_files_only=True)
    if config.get("quantization_config"):
        raise UnsupportedError(f"{path} is quantized by diffusers: use its files of full precision")
    if cls._keep_in_fp32_modules and dtype != torch.float32:
        kept = ", ".join(cls._keep_in_fp32_modules)
        raise UnsupportedError(f"{cls.__name__} keeps {kept} in fp32, so dtype={dtype} is not exact: leave it out")
    with without_weights():
        model = cls.from_config(config)
    model.register_to_config(_name_or_path=str(path))
    return load(
        model.eval(), path, host_memory=host_memory, device=device, device_memory=device_memory, dtype=dtype, backend=backend
    )  # fmt: skip

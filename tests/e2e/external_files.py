"""Models of which most is frozen, the files that their parameters are read from in place, and what a run made of those."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

import swapper
from e2e.models import Net
from e2e.twins import adamw
from swapper.paging.section import EXTERNAL

WORD_BYTES = 8
NEEDLE_WORDS = 5
"""So many different words of a tensor's are in a file by no chance; rows of zeros are everywhere."""


def half_frozen(dtype: torch.dtype = torch.float32) -> Net:
    """Large weights are frozen; of most modules that have one the bias is trained."""
    model = Net(depth=8).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or "norm" in name)
    return model


def saved(model: nn.Module, path: Path) -> Path:
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, path)
    return path


def shifted(model: nn.Module, path: Path) -> Path:
    """A safetensors file in which nothing lies at a multiple of its size: a tensor of one byte comes first."""
    tensors: dict[str, torch.Tensor] = {"a": torch.zeros(1, dtype=torch.uint8)}
    tensors.update({name: p.detach().clone() for name, p in model.named_parameters()})
    header, payload = {}, b""
    for name, tensor in tensors.items():
        data = tensor.view(-1).view(torch.uint8).numpy().tobytes()
        kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}[tensor.dtype]
        places = [len(payload), len(payload) + len(data)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": places}
        payload += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)
    return path


def torch_file(model: nn.Module, path: Path) -> Path:
    torch.save({"model": model.state_dict()}, path)
    return path


def sharded(model: nn.Module, path: Path) -> Path:
    path.mkdir()
    names: dict[str, str] = {}
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    for number in range(3):
        part = dict(list(tensors.items())[number::3])
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file(part, path / file)
        names.update(dict.fromkeys(part, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return path


FORMS: dict[str, Callable[[nn.Module, Path], Path]] = {
    "safetensors": saved,
    "at odd places": shifted,
    "torch": torch_file,
    "sharded": sharded,
}


def bytes_of(path: Path) -> dict[str, bytes]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {str(file): file.read_bytes() for file in files if file.is_file()}


def frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def words_of(content: bytes | memoryview) -> np.ndarray:
    return np.frombuffer(content[: len(content) // WORD_BYTES * WORD_BYTES], np.uint64)


def found_in(directory: Path, tensors: dict[str, nn.Parameter]) -> list[str]:
    """Names of the tensors of which some bytes are in the run's files. Those are random: they are nowhere by chance."""
    files = [words_of(file.read_bytes()) for file in directory.rglob("*") if file.is_file()]
    content = np.sort(np.concatenate(files))
    found = []
    for name, tensor in tensors.items():
        data = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
        for shift in range(WORD_BYTES):  # it may lie anywhere in a file, whose words are taken from its beginning
            words = np.sort(words_of(data[shift:]))  # in order they are found ten times as fast
            places = np.searchsorted(content, words).clip(max=len(content) - 1)
            if len(np.unique(words[content[places] == words])) >= NEEDLE_WORDS:
                found.append(name)
                break
    return found


def lent_pages(manager: swapper.SwapManager) -> int:
    sections = manager.current.run.sections
    return sum(page.location == EXTERNAL for section in sections for page in section.pages or [section.piece])


def trained(model: nn.Module) -> torch.optim.Optimizer:
    return adamw([p for p in model.parameters() if p.requires_grad])

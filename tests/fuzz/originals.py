"""Sound files of every kind that swapper reads, small: what the fuzzer damages. Each maker fills an empty directory."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import swapper
from swapper.checkpoint import save
from swapper.checkpoint.exporting import export


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    shared = torch.arange(60.0)
    return {
        "model": OrderedDict({"a.weight": torch.randn(12, 7), "a.bias": torch.ones(7, dtype=torch.bfloat16)}),
        "views": [shared, shared[5:10], shared.view(6, 10).t(), torch.zeros(1).expand(5)],
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "extra": {("tuple", 1): {1, 2}, "bytes": bytearray(b"abc"), "none": None, "large": 1 << 80},
    }


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def torch_file(directory: Path) -> None:
    torch.save(state(), directory / "x.pt")


def swapper_file(directory: Path) -> None:
    save(state(), directory / "x.pt", durable=False)


def old_torch_file(directory: Path) -> None:
    torch.save(state(), directory / "x.pt", _use_new_zipfile_serialization=False)


def safetensors_file(directory: Path) -> None:
    tensors = {"a": torch.randn(5, 4), "b.c": torch.ones(3, dtype=torch.int8), "empty": torch.zeros(0, 3)}
    torch.save(tensors, directory / "x.pt")
    export(directory / "x.pt", directory / "x.safetensors", "safetensors")
    (directory / "x.pt").unlink()


def huggingface(directory: Path) -> None:
    torch.save({f"{n}.weight": torch.randn(6, 5) for n in range(4)}, directory / "x.pt")
    export(directory / "x.pt", directory / "sharded", "huggingface", shard_bytes=300)
    for file in (directory / "sharded").iterdir():
        file.rename(directory / file.name)
    (directory / "sharded").rmdir()
    (directory / "x.pt").unlink()


def dcp(directory: Path) -> None:
    torch.save({"a": torch.randn(6, 5), "b": torch.arange(7)}, directory / "x.pt")
    export(directory / "x.pt", directory / "made", "dcp")
    for file in (directory / "made").iterdir():
        file.rename(directory / file.name)
    (directory / "made").rmdir()
    (directory / "x.pt").unlink()


def flat_dcp(directory: Path) -> None:
    """As dcp.save writes a flat state dict, with values that are no tensors."""
    import torch.distributed.checkpoint as saved

    tensors = {"model.a": torch.randn(6, 5), "head": torch.arange(7)}
    saved.save({**tensors, "step": 3, "history": [1, {"lr": 0.1}]}, checkpoint_id=directory, no_dist=True)


def adapter(directory: Path) -> None:
    """As peft writes it."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    LoraConfig(r=2, target_modules=["q_proj"], base_model_name_or_path="base").save_pretrained(str(directory))
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{prefix}.lora_A.weight": torch.randn(2, 8), f"{prefix}.lora_B.weight": torch.zeros(8, 2)}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def zero(directory: Path) -> None:
    from checkpoint.test_zero import write

    write(directory / "made", 2, 2)
    for file in (directory / "made" / "global_step3").iterdir():
        file.rename(directory / file.name)
    shutil.rmtree(directory / "made")


def quantised(directory: Path) -> None:
    torch.manual_seed(0)
    torch.save({f"{n}.{kind}": torch.randn(64, 64) for n in (0, 1) for kind in ("weight",)}
               | {f"{n}.bias": torch.randn(64) for n in (0, 1)}, directory / "x.pt")  # fmt: skip
    export(directory / "x.pt", directory / "x.safetensors", "safetensors", quantize="int8")
    (directory / "x.pt").unlink()


def _train(directory: Path, count: int = 1, **options: Any) -> Path:
    """Train by `count` optimizers, take a snapshot, and return its path."""
    torch.manual_seed(0)
    trained = nn.Sequential(nn.Linear(160, 160), nn.Linear(160, 160))
    given = [torch.optim.AdamW(list(trained.parameters())[number::count]) for number in range(count)]
    optimizer = given[0] if count == 1 else given
    with swapper.SwapManager(directory, host_memory="8MiB") as manager:
        paged, paged_optimizer = manager.offload(trained, optimizer, params="nvme", optimizer_state="nvme", **options)
        paged(torch.ones(2, 160)).sum().backward()
        for one in [paged_optimizer] if count == 1 else paged_optimizer:
            one.step()
        path = manager.snapshot(directory / "x.pt", keep=2).path
    path.chmod(0o600)
    return path


def snapshot(directory: Path, **options: Any) -> None:
    run = directory / "run"
    run.mkdir()
    shutil.copy(_train(run, **options), directory / "x.pt")
    shutil.rmtree(run)


def encoded_snapshot(directory: Path) -> None:
    """Of two optimizers, with encoded state."""
    snapshot(directory, count=2, state_codec="8bit")


def run_directory(directory: Path) -> None:
    run = directory / "made"
    run.mkdir()
    _train(run)
    for file in (run / "rank-0-of-1").iterdir():
        shutil.copy(file, directory / file.name)
    shutil.rmtree(run)


def stripes(directory: Path) -> None:
    from swapper.io.files import OpenFiles, Stripes

    for name in ("one", "two"):
        (directory / name).mkdir()
    files = OpenFiles()
    opened = Stripes([directory / "one", directory / "two"], stripe_bytes=4096).open("x", files, writing=True)
    for file in opened.files:
        files.release(file)


def drives(directory: Path) -> None:
    content = {"format": 1, "run": "0" * 16, "directories": [str(directory), "/b"], "weights": [1.0, 2.0], "index": 0}
    (directory / "drives.json").write_text(json.dumps(content))


MAKERS: dict[str, Callable[[Path], None]] = {
    maker.__name__.replace("_", "-"): maker
    for maker in (
        torch_file, swapper_file, old_torch_file, safetensors_file, huggingface, dcp, flat_dcp, adapter, zero, quantised, snapshot,
        encoded_snapshot, run_directory, stripes, drives,
    )
}  # fmt: skip

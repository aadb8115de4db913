"""The mistakes of a first day: each error names the thing, the place and what to do, in the words of the interface in use."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import swapper
from swapper.cli import app

NVME = {"params": "nvme", "optimizer_state": "nvme"}
WIDTH = 256


def net(layers: int = 2, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def train(model: nn.Module, directory: str = "run", budget: str = "32MiB", **options: Any) -> None:
    """Take one step in a manager of its own."""
    optimizer = options.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=1e-3)
    resume, dtype = options.pop("resume", "error"), next(model.parameters()).dtype
    with swapper.SwapManager(directory, budget, resume=resume) as manager:
        model, optimizer = manager.offload(model, optimizer, **{**NVME, **options})
        width = model[0].in_features
        model(torch.randn(2, width, dtype=dtype)).float().square().mean().backward()
        optimizer.step()


def resumed(first: nn.Module, then: nn.Module, **options: Any) -> None:
    train(first)
    train(then, resume="auto", **options)


def on_meta(**options: Any) -> None:
    with torch.device("meta"):
        model = net()
    train(model, **options)


def loaded(model: nn.Module, path: str, budget: str = "8MiB", **options: Any) -> None:
    torch.save(net().state_dict(), "net.pt")
    Path("words.txt").write_text("hello, world")
    swapper.load(model, path, host_memory=budget, **options)


def offloaded_twice(same_manager: bool) -> None:
    model = net()
    with swapper.SwapManager("run", "32MiB") as one, swapper.SwapManager("other", "32MiB") as other:
        _, optimizer = one.offload(model, torch.optim.AdamW(model.parameters()), **NVME)
        (one if same_manager else other).offload(model, optimizer, **NVME)


def kept_the_old_optimizer() -> None:
    model = net()
    old = torch.optim.AdamW(model.parameters())
    with swapper.SwapManager("run", "32MiB") as manager:
        manager.offload(model, old, **NVME)
        model(torch.randn(2, WIDTH)).sum().backward()
        old.step()


def used_after_close() -> None:
    model = net()
    train(model)
    model(torch.randn(2, WIDTH))


def halved() -> None:
    model = net()
    with swapper.SwapManager("run", "32MiB") as manager:
        manager.offload(model, torch.optim.AdamW(model.parameters()), **NVME)
        model.half()


def started_twice() -> None:
    with swapper.SwapManager("run", "32MiB"):
        swapper.SwapManager("run", "32MiB")


def snapshot(path: str) -> None:
    model = net()
    Path("there.pt").touch()
    with swapper.SwapManager("run", "32MiB") as manager:
        manager.offload(model, torch.optim.AdamW(model.parameters()), **NVME)
        manager.snapshot(path).wait()


def another_models_optimizer(_: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net().parameters(), **options)


def no_optimizer(*_: Any, **__: Any) -> Any:
    return torch.optim.AdamW


MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a drive that is not mounted": (lambda: train(net(), "/mnt/none/run"), swapper.DirectoryError, "/mnt/none.*mount"),
    "a size in words": (lambda: train(net(), budget="32 gigs"), swapper.ConfigError, "host_memory='32 gigs'.*8GiB"),
    "a budget too small": (
        lambda: train(net(), budget="64KiB"), swapper.BudgetError, r"host_memory=64.*at least.*raise host_memory.*gradients=",
    ),
    "no optimizer but its class": (lambda: train(net(), optimizer=no_optimizer), swapper.UnsupportedError, "torch.optim"),
    "another model's optimizer": (
        lambda: train(net(), optimizer=another_models_optimizer), swapper.UnsupportedError, "parameter 0 .*model.parameters()",
    ),
    "an optimizer that couples parameters": (
        lambda: train(net(), optimizer=torch.optim.LBFGS), swapper.UnsupportedError, "LBFGS.*Use an optimizer",
    ),
    "the optimizer of before": (kept_the_old_optimizer, swapper.StateError, "step the one that it returned"),
    "a placement that is none": (lambda: train(net(), params="disk"), swapper.ConfigError, "params='disk'.*'nvme'"),
    "a dtype in words": (lambda: train(net(), master_weights="fp32"), swapper.ConfigError, "'fp32'.*torch.float32"),
    "a model offloaded twice": (lambda: offloaded_twice(True), swapper.StateError, "one manager for each"),
    "a model of another manager": (lambda: offloaded_twice(False), swapper.StateError, "0.weight.*close the other"),
    "meta without values": (on_meta, swapper.UnsupportedError, "0.weight.*init="),
    "init= of no file": (lambda: on_meta(init="none.pt"), swapper.IoError, "none.pt.*correct the path"),
    "the script started twice": (started_twice, swapper.DirectoryError, r"run/rank-0-of-1.*this process.*close"),
    "the script started again": (lambda: [train(net()) for _ in range(2)], swapper.DirectoryError, 'run.*resume="auto"'),
    "resumed with more layers": (
        lambda: resumed(net(), net(3)), swapper.CheckpointError, r"\n- only in the model: 2.weight param.*\n[^$]*Build",
    ),
    "resumed with another width": (
        lambda: resumed(net(), net(width=128)), swapper.CheckpointError,
        r"\n- 0.weight param: float32 \[256, 256\] in the run, float32 \[128, 128\] in the model\n[^$]*Build",
    ),
    "resumed with another dtype": (
        lambda: resumed(net(), net().bfloat16()), swapper.CheckpointError, r"\n- 0.weight param: float32 .* in the run, bfloat16",
    ),
    "resumed with another optimizer": (
        lambda: resumed(net(), net(), optimizer=torch.optim.SGD), swapper.CheckpointError, r"SGD instead of.*AdamW[^$]*Build",
    ),
    "a snapshot that exists": (lambda: snapshot("there.pt"), swapper.CheckpointError, "there.pt exists.*another name"),
    "a snapshot's drive": (lambda: snapshot("/mnt/none/a/x.pt"), swapper.CheckpointError, "/mnt/none.*mount"),
    "a device that is none": (lambda: train(net(), device="cuda:77"), swapper.DeviceError, "cuda:77.*device='cpu'"),
    "params on no device": (lambda: train(net(), params="device"), swapper.ConfigError, "params='device'.*device='cuda'"),
    "half() afterwards": (halved, swapper.ColdParameterError, "0.weight.*apply them before"),
    "a model of a closed manager": (used_after_close, swapper.ColdParameterError, "closed.*manager.snapshot"),
    "load of no file": (lambda: loaded(net(), "none.pt"), swapper.IoError, "none.pt.*correct the path"),
    "load of a text": (lambda: loaded(net(), "words.txt"), swapper.CheckpointError, "words.txt.*name such a file"),
    "load of another model": (lambda: loaded(net(3), "net.pt"), swapper.CheckpointError, "net.pt.*2.weight.*rename="),
    "load of another width": (lambda: loaded(net(width=128), "net.pt"), swapper.CheckpointError, "0.weight.*net.pt.*build the"),
    "load into too little": (lambda: loaded(net(), "net.pt", "8KiB"), swapper.BudgetError, "at least.*raise host_memory"),
}  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_first_mistake_names_thing_place_and_remedy(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, kind, words = MISTAKES[mistake]
    with pytest.raises(kind) as caught:
        make()
    assert re.search(words, str(caught.value)), str(caught.value)


COMMANDS: dict[str, tuple[int, str]] = {
    "doctor none": (1, "Directory.* bad .*none .*make it, or name another"),
    "bench none": (1, "none is not a directory"),
    "tune none": (1, "none is not a directory"),
    "bench . --sizes 1000B": (2, "--sizes 1000B.*multiples"),
    "bench . --file-size big": (2, "--file-size='big'.*8GiB"),
    "plan none.json --host 8GiB --nvme 1GB/s,1GB/s": (2, "none.json does not exist: give"),
    "plan net.pt --host many --nvme 1GB/s,1GB/s": (2, "--host.*8GiB"),
    "plan net.pt --host 8GiB --nvme fast": (2, "--nvme.*7GB/s"),
    "runs none": (1, "none is not a directory: name one"),
    "clean none": (1, "none is not a directory: name one"),
    "inspect none.pt": (1, "none.pt.*correct the path"),
    "inspect words.txt": (1, "words.txt.*name such a file"),
    "verify none.pt": (2, "none.pt"),
    "export none.pt x --to torch": (1, "none.pt.*correct the path"),
    "export net.pt x --to onnx": (2, "--to.*'onnx'.*safetensors"),
    "export net.pt words.txt --to torch": (1, "words.txt.*--overwrite"),
    "export net.pt x --to torch --quantize int3": (2, "--quantize.*int8"),
    "report none.json": (1, "none.json"),
    "report words.txt": (1, "words.txt"),
    "demo --directory none": (1, "none is not a directory.*--directory"),
    "demo --budget much": (2, "--budget.*8GiB"),
    "demo --parameters 1M --budget 64kB --directory . --drive-seconds 0.05": (
        1,
        "--budget 62.5 KiB.*at least.*raise --budget$",
    ),
}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_mistaken_command_names_thing_place_and_remedy(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(net().state_dict(), "net.pt")
    Path("words.txt").write_text("hello, world")
    code, words = COMMANDS[line]
    done = CliRunner(env={"COLUMNS": "300", "TERM": "dumb"}).invoke(app, line.split(), prog_name="swapper")
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == code, done.output
    assert re.search(words, done.output, re.MULTILINE), done.output
    assert line.startswith("doctor") or "host_memory" not in done.output

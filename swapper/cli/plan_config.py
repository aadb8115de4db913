"""Implements `swapper plan CONFIG`: what a model would need and how long a step would take, without the model's weights."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from swapper.cli.command import reported
from swapper.errors import ConfigError
from swapper.manager import SwapManager
from swapper.paging.virtual_drive import DriveRates
from swapper.runtime.sizes import format_bytes, parse_bytes
from swapper.runtime.stats import StepStats
from swapper.train.session.compute_times import ComputeTimes, find_compute
from swapper.train.session.plan import Plan

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adam": torch.optim.Adam,
    "sgd": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
}
DAY_S = 86400


@dataclass(frozen=True)
class Machine:
    """What a step is predicted for: bytes of host memory, bytes a second of the drive, operations a second of the processor.

    Attributes:
        flops: floating-point operations a second in products of matrices; None: measured on this processor.
        updates: parameters a second that the optimizer updates; None: measured.
        tokens: of a step.
    """

    host_bytes: int
    drive: DriveRates
    flops: float | None
    updates: float | None
    tokens: int


def plan(
    config: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face config.json or its directory, or package.module:function, which returns a model."
        ),
    ],
    host: Annotated[str, typer.Option(help="Host memory for swapper: 64GiB.")],
    drive_read: Annotated[str, typer.Option(help="Bytes a second that the drive reads: 7GB.")],
    drive_write: Annotated[str, typer.Option(help="Bytes a second that it writes: 5GB.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step, of all samples together.")] = 4096,
    flops: Annotated[
        float | None,
        typer.Option(help="Floating-point operations a second: 1e14. Default: measured on this processor."),
    ] = None,
    updates: Annotated[
        float | None, typer.Option(help="Parameters a second that the optimizer updates: 1e9. Default: measured.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)}.")] = "adamw",
    dtype: Annotated[
        str, typer.Option(help="Of the parameters: bfloat16 and float16 have fp32 masters; float32.")
    ] = "bfloat16",
    update: Annotated[str, typer.Option(help="step, deferred or backward.")] = "step",
    as_json: Annotated[bool, typer.Option("--json", help="Print figures only.")] = False,
) -> None:
    """Predict placement, bytes and seconds of a training step for a machine, and what would make it faster."""
    console = Console(stderr=as_json)
    with reported(console):
        read, write = parse_bytes(drive_read, "--drive-read"), parse_bytes(drive_write, "--drive-write")
        machine = Machine(parse_bytes(host, "--host"), DriveRates(read, write, read + write), flops, updates, tokens)
        for name, given in (("--flops", flops), ("--updates", updates)):
            if given is not None and not given > 0:
                raise ConfigError(f"{name} {given} must be more than 0")
        if optimizer not in OPTIMIZERS:
            raise ConfigError(f"--optimizer {optimizer} is not known: use one of {', '.join(OPTIMIZERS)}")
        if dtype not in ("bfloat16", "float16", "float32"):
            raise ConfigError(f"--dtype {dtype} is not known: use bfloat16, float16 or float32")
        with console.status("planning"):
            model = make_model(config, getattr(torch, dtype))
            made = OPTIMIZERS[optimizer](model.parameters())
            text, figures = predict(Prediction(model, made, update), machine)
    print(json.dumps(figures, indent=2) if as_json else text)


def make_model(source: str, dtype: torch.dtype) -> nn.Module:
    """Return a model on the meta device.

    Args:
        source: a Hugging Face config.json, its directory, or package.module:function.

    Raises:
        ConfigError: there is none, or it cannot be made.
    """
    module, colon, function = source.partition(":")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = _call(module, function) if colon else _from_config(Path(source))
    except ConfigError:
        raise
    except Exception as error:  # of the user's code, or of transformers
        raise ConfigError(f"no model can be made from {source}: {type(error).__name__}: {error}") from error
    finally:
        torch.set_default_dtype(before)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{source} returned a {type(model).__name__}: it must return a torch.nn.Module")
    return model.to(dtype)


def _call(module: str, function: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current directory, as with python -m: a command has its own directory there
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{module}:{function} cannot be imported: {error}") from error
    return found()


def _from_config(path: Path) -> nn.Module:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give a Hugging Face config.json, or package.module:function")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("a Hugging Face configuration needs transformers: pip install transformers") from error
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))  # type: ignore[no-untyped-call]
    return model


class Prediction:
    """Predicts a step of one model and optimizer on several machines.

    Args:
        model: on the meta device.
        optimizer: of its parameters.
        update: see `manager.offload`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, update: str) -> None:
        self._model = model
        self._optimizer = optimizer
        self._update = update
        self._compute: ComputeTimes | None = None

    def plan(self, host_bytes: int) -> Plan:
        """Return the plan. Raises BudgetError if the model does not fit this host memory."""
        masters = None if next(self._model.parameters()).dtype == torch.float32 else torch.float32
        with tempfile.TemporaryDirectory() as directory, SwapManager(directory, host_memory=host_bytes) as manager:
            return manager.plan(self._model, self._optimizer, update=self._update, master_weights=masters)

    def step(self, machine: Machine) -> tuple[Plan, StepStats]:
        """Return the plan and the predicted step."""
        plan = self.plan(machine.host_bytes)
        if self._compute is None:  # it is the same for all machines
            updates = None if machine.updates is None else 1 / machine.updates
            self._compute = find_compute(
                self._model, plan.inventory, self._optimizer, machine.tokens, machine.flops, updates
            )
        return plan, plan.simulate(machine.drive, self._compute)


def upgrades_of(machine: Machine) -> dict[str, Machine]:
    """Return machines that are better in one respect, by what is better."""
    drive = machine.drive
    return {
        "twice the host memory": replace(machine, host_bytes=2 * machine.host_bytes),
        "a drive twice as fast": replace(machine, drive=DriveRates(2 * drive.read, 2 * drive.write, 2 * drive.both)),
    }


def predict(prediction: Prediction, machine: Machine) -> tuple[str, dict[str, Any]]:
    """Return a prediction for people, and its figures."""
    plan, step = prediction.step(machine)
    written_a_day = plan.traffic.total_written_bytes / step.wall_s * DAY_S
    tokens_a_day = machine.tokens / step.wall_s * DAY_S
    upgrades = {name: prediction.step(better)[1].wall_s for name, better in upgrades_of(machine).items()}
    figures = {
        "places": plan.places,
        "step_s": step.wall_s,
        "phases": {name: asdict(phase) for name, phase in step.phases.items()},
        "tokens_a_day": tokens_a_day,
        "read_bytes": step.read_bytes,
        "written_bytes": step.written_bytes,
        "written_bytes_a_day": written_a_day,
        "space_bytes": plan.space_bytes,
        "upgrades_step_s": upgrades,
    }
    lines = [
        *(str(plan), "", str(step), ""),
        f"tokens: {tokens_a_day:,.0f} a day; {format_bytes(written_a_day)} written a day",
        *(f"with {name}: {seconds:.2f} s a step" for name, seconds in upgrades.items()),
    ]
    return "\n".join(lines), figures

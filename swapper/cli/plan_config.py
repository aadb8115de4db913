"""Implements `swapper plan CONFIG`: what a model would need and how long a step would take, without the model's weights."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from swapper.cli.command import make_console, print_table, reported
from swapper.errors import ConfigError
from swapper.forecast.accelerator import DeviceRates
from swapper.forecast.machine import (
    AUTO_SHARE,
    KNOWN,
    OPTIMIZERS,
    REACHED_FLOPS,
    Forecast,
    Forecaster,
    Machine,
    Setting,
)
from swapper.forecast.model_source import KINDS, make_model
from swapper.forecast.search import find_table, find_upgrades, smallest_budget
from swapper.io.drives import find_tuning, tuning_path
from swapper.options import UPDATES, parse_choice
from swapper.paging.virtual_drive import DriveRates
from swapper.runtime.sizes import format_bytes, parse_bytes, parse_bytes_a_second
from swapper.train.layout.state_codecs import PRESETS

DAY_S = 86400
PLACES = ("auto", "host", "nvme")
DTYPES = ("bfloat16", "float16", "float32")


def plan(
    config: Annotated[str, typer.Argument(help=f"{KINDS}, which returns a model.")],
    host: Annotated[str, typer.Option(help="Host memory of a node for swapper: 64GiB.")],
    nvme: Annotated[
        list[str],
        typer.Option(
            help="A drive of a node: bytes a second that it reads and writes, 7GB/s,5GB/s; or a directory on a drive that "
            "`swapper tune` measured. Repeat it for each drive."
        ),
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step, of all samples and ranks together.")] = 4096,
    flops: Annotated[
        float | None,
        typer.Option(help="Floating-point operations a second of a rank: 1e14. Default: measured on this processor."),
    ] = None,
    updates: Annotated[
        float | None, typer.Option(help="Parameters a second that a node's optimizers update: 1e9. Default: measured.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help=f"Of each rank: {', '.join(KNOWN)}, as its data sheet says; or its memory for swapper, 24GiB. Default: none."
        ),
    ] = None,
    device_memory: Annotated[str | None, typer.Option(help="Of it for swapper: 24GiB. Default: half of it.")] = None,
    link: Annotated[
        str | None, typer.Option(help="Bytes a second to the accelerator, each way: 25GB/s. It goes with --device.")
    ] = None,
    update_on: Annotated[str, typer.Option(help="Where an accelerator's updates run: device, cpu.")] = "device",
    recompute: Annotated[bool, typer.Option("--recompute", help="Activations are checkpointed.")] = False,
    optimizer: Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)}.")] = "adamw",
    codec: Annotated[str, typer.Option(help=f"Of the optimizer's state: {', '.join(PRESETS)}.")] = "exact",
    dtype: Annotated[
        str, typer.Option(help="Of the parameters: bfloat16 and float16 have fp32 masters; float32.")
    ] = "bfloat16",
    update: Annotated[str, typer.Option(help=f"{', '.join(UPDATES)}.")] = "step",
    gradients: Annotated[str, typer.Option(help=f"{', '.join(PLACES)}: auto is host.")] = "auto",
    accumulate: Annotated[int, typer.Option(min=1, help="Forwards and backwards of a step, each of a part of it.")] = 1,
    ranks: Annotated[int, typer.Option(min=1, help="Processes that share the model by fully_shard, of all nodes.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Machines, with equally many ranks.")] = 1,
    network: Annotated[
        str | None, typer.Option(help="Bytes a second of a rank to others: 50GB/s. Default: it takes no time.")
    ] = None,
    endurance: Annotated[str | None, typer.Option(help="What a drive is rated to be written in all: 600TB.")] = None,
    table: Annotated[bool, typer.Option(help="Compare codecs, times of updates, placements and passes.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures only.")] = False,
) -> None:
    """Predict placement, bytes and seconds of a training step for a machine, and what would make it faster."""
    began_s = time.monotonic()
    console = make_console(stderr=as_json)
    with reported(console):
        parse_choice(optimizer, "--optimizer", list(OPTIMIZERS))
        parse_choice(dtype, "--dtype", DTYPES)
        parse_choice(codec, "--codec", list(PRESETS))
        parse_choice(update, "--update", UPDATES)
        parse_choice(gradients, "--gradients", PLACES)
        parse_choice(update_on, "--update-on", ("device", "cpu"))
        for option, rate in (("--flops", flops), ("--updates", updates)):
            _check(rate is None or 0 < rate < math.inf, f"{option} {rate} must be more than 0, and a number")
        _check(ranks > 1 or network is None, "--network is between ranks: give --ranks")
        _check(not ranks % nodes, f"--ranks {ranks} are of all nodes together: give a multiple of --nodes {nodes}")
        _check(
            tokens >= accumulate * ranks,
            f"--tokens {tokens} are of a whole step: --accumulate {accumulate} passes on --ranks {ranks} need at least "
            f"{accumulate * ranks}",
        )
        machine = Machine(
            host_bytes=parse_bytes(host, "--host"),
            drive=joined([_drive(text) for text in nvme]),
            drives=len(nvme),
            updates=updates,
            ranks=ranks,
            nodes=nodes,
            network=math.inf if network is None else parse_bytes_a_second(network, "--network"),
            **_accelerator(device, device_memory, link, flops),
        )
        setting = Setting(
            optimizer, codec, update, gradients=gradients, passes=accumulate, update_on=update_on, recompute=recompute
        )
        endurance_bytes = None if endurance is None else parse_bytes(endurance, "--endurance")
        with console.status("planning"), _without_collection():
            forecaster = Forecaster(make_model(config, getattr(torch, dtype)), tokens)
            found = forecaster.forecast(machine, setting)
            figures = figures_of(forecaster, machine, setting, found)
            if endurance_bytes is not None:
                daily = figures["written_bytes_a_day_a_drive"]
                figures["days_to_endurance"] = endurance_bytes / daily if daily else None
            figures["upgrades"] = find_upgrades(forecaster, machine, setting)
            figures["table"] = [asdict(row) for row in find_table(forecaster, machine, setting)] if table else []
        figures["planned_in_s"] = time.monotonic() - began_s
    print(json.dumps(figures, indent=2) if as_json else describe(found, machine, figures))
    if not as_json:
        _print_tables(figures)


def _accelerator(
    device: str | None, device_memory: str | None, link: str | None, flops: float | None
) -> dict[str, Any]:
    """Return what a Machine has of an accelerator: one that is known, or of which the memory is said."""
    if device is None:
        _check(link is None, "--link is to an accelerator: give --device, its memory, as 24GiB")
        _check(device_memory is None, "--device-memory is of an accelerator: give --device")
        return {"flops": flops}
    names, known = ", ".join(KNOWN), KNOWN.get(device.upper().replace(" ", ""))
    _check(known is not None or device_memory is None, f"--device-memory goes with a --device that is known: {names}")
    _check(
        known is not None or (flops is not None and device[0].isdigit()),
        f"--device {device} is not known: give one of {names}, or its memory, as 24GiB, with --flops, its operations "
        "a second, as --flops 1e14",
    )
    rates, nbytes = (
        DeviceRates() if known is None else known.rates,
        0 if known is None else int(known.nbytes) // AUTO_SHARE,
    )
    if link is not None:
        rates = replace(rates, link=parse_bytes_a_second(link, "--link"))
    if known is None or device_memory is not None:
        nbytes = parse_bytes(device_memory or device, "--device" if known is None else "--device-memory")
    flops = flops if flops is not None or known is None else known.flops * REACHED_FLOPS
    return {"device_bytes": nbytes, "device": rates, "flops": flops, "is_from_data_sheet": known is not None}


@contextmanager
def _without_collection() -> Iterator[None]:
    """Return a context without garbage collection, which goes through all pages and tasks again and again: a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check(is_right: bool, otherwise: str) -> None:
    """Raise ConfigError unless it is right."""
    if not is_right:
        raise ConfigError(otherwise)


def figures_of(forecaster: Forecaster, machine: Machine, setting: Setting, found: Forecast) -> dict[str, Any]:
    """Return the figures of a forecast. Bytes are of a node, or of each drive where they are named so."""
    step, here = found.step, machine.of_node
    written_bytes = found.written_bytes * here
    return {
        "parameters": sum(p.numel() for p in forecaster.model.parameters()),
        "places": found.plan.places,
        "step_s": step.wall_s,
        "phases": {name: asdict(phase) for name, phase in step.phases.items()},
        "tokens_a_day": forecaster.tokens / step.wall_s * DAY_S,
        "read_bytes": found.read_bytes * here,
        "written_bytes": written_bytes,
        "page_bytes": found.plan.budget.page_bytes,
        "bytes_are_exact": found.exact,
        "space_bytes": found.plan.space_bytes * here,
        "written_bytes_a_day_a_drive": written_bytes / step.wall_s * DAY_S / machine.drives,
        "memory_bytes": found.memory_bytes * here,
        "smallest_host_bytes": smallest_budget(forecaster, machine, setting),
        "assumed": assumptions(machine),
    }


def assumptions(machine: Machine) -> list[str]:
    """Return in words what a forecast takes for granted."""
    said = ["activations are outside of the memory", "attention, norms and the loss take no time"]
    if machine.ranks > 1:
        said.append(f"{machine.of_node} ranks of a node share its memory, drives and updates alike; shards are fp32")
        if math.isinf(machine.network):
            said.append("the network takes no time (give --network)")
    if machine.is_from_data_sheet:
        said.append("the accelerator's rates are shares of its data sheet's that one model reached on an H200")
    if machine.device_bytes is not None and math.isinf(machine.device.link):
        said.append("copies to the accelerator take no time (give --link)")
    return said


def describe(found: Forecast, machine: Machine, figures: dict[str, Any]) -> str:
    """Return a forecast as people read it. `figures`: of `figures_of`."""
    node = " of a node" if machine.nodes > 1 else ""
    exact = "" if figures["bytes_are_exact"] else " (about: simulated with larger pages)"
    phases = ", ".join(f"{name} {phase.wall_s:.2f}" for name, phase in found.step.phases.items() if phase.wall_s)
    smallest = figures["smallest_host_bytes"]
    lasts = ""
    if "days_to_endurance" in figures:
        days = figures["days_to_endurance"]
        lasts = "; it never wears out" if days is None else f"; its endurance lasts {days:,.0f} days"
    lines = [
        ("parameters", f"{figures['parameters']:,} on {found.plan.places['param']}"),
        ("optimizer state", f"on {found.plan.places['state']}"),
        ("gradients", f"on {found.plan.places['grad']}"),
        (
            "host memory",
            f"{format_bytes(figures['memory_bytes'])}{node}; {format_bytes(smallest)} ({smallest} bytes) is the "
            "smallest that works",
        ),
        ("drive space", f"{format_bytes(figures['space_bytes'])}{node}"),
        ("a step", f"{figures['step_s']:.2f} s: {phases}; {found.step.total.wait_s:.2f} s of it waits for the drive"),
        ("tokens", f"{figures['tokens_a_day']:,.0f} a day"),
        ("a step reads", f"{format_bytes(figures['read_bytes'])}{node}{exact}"),
        ("a step writes", f"{format_bytes(figures['written_bytes'])}{node}{exact}"),
        ("wear", f"{figures['written_bytes_a_day_a_drive'] / 1e12:.2f} TB a day written to each drive{lasts}"),
        ("assumed", "; ".join(figures["assumed"])),
        ("planned in", f"{figures['planned_in_s']:.1f} s"),
    ]
    return "\n".join(f"{name:<18}{text}" for name, text in lines)


def _print_tables(figures: dict[str, Any]) -> None:
    print("\nWhat would be faster")
    _print_rows(("next upgrade", "s a step", "s saved", "s saved a GiB"), figures["upgrades"], 1)
    if figures["table"]:
        print("\nSettings that no other beats in all three, exact ones by exact ones")
        columns = ("codec", "update", "on NVMe", "passes", "s a step", "memory", "written a step")
        _print_rows(columns, figures["table"], 3)
        print("memory: of a node, with the inputs of matrices that autograd keeps on a CPU")


def _print_rows(columns: Sequence[str], rows: Sequence[dict[str, Any]], left: int) -> None:
    print_table(columns, [[_cell(*item) for item in row.items()] for row in rows], left=columns[:left])


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if name.endswith("gib") else f"{value:.2f}"
    return "" if value is None else format_bytes(value) if name.endswith("bytes") else str(value)


def _drive(text: str) -> DriveRates:
    """Return the rates of a drive: "READ,WRITE", as "7GB/s,5GB/s", or a directory on a drive that `swapper tune` measured.

    Raises:
        ConfigError: a rate is none or could be bits, or a drive does not exist, or was not measured.
    """
    parts, path = text.split(","), Path(text)
    if len(parts) == 2:
        return DriveRates(*(parse_bytes_a_second(part, "--nvme") for part in parts))
    otherwise = "or its rates, read and write, as 7GB/s,5GB/s; repeat --nvme for more"
    _check(path.is_dir(), f"--nvme {text}: there is no such directory. Give a directory on the drive, {otherwise}")
    tuning = find_tuning(path)
    if tuning is None:
        raise ConfigError(
            f"--nvme {text}: {tuning_path()} has no measurement of this drive (those of other drives do not count): run "
            f"`swapper tune {text}`, {otherwise}"
        )
    return DriveRates(tuning.read_bytes_per_s, tuning.write_bytes_per_s)


def joined(drives: Sequence[DriveRates]) -> DriveRates:
    """Return the rates of several drives that each have a share of the bytes by their speed."""
    weights = [min(drive.read, drive.write) for drive in drives]
    read, write = (
        min(getattr(drive, name) * sum(weights) / weight for drive, weight in zip(drives, weights, strict=True))
        for name in ("read", "write")
    )
    return DriveRates(read, write)

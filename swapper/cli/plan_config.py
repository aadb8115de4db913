"""Implements `swapper plan CONFIG`: what a model would need and how long a step would take, without the model's weights."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from swapper.cli.command import make_console, reported
from swapper.errors import ConfigError
from swapper.forecast.accelerator import DeviceRates
from swapper.forecast.machine import (
    AUTO_SHARE,
    KNOWN,
    OPTIMIZERS,
    REACHED_FLOPS,
    REACHED_LINK,
    REACHED_MEMORY,
    Forecast,
    Forecaster,
    KnownDevice,
    Machine,
    Setting,
)
from swapper.forecast.model_source import KINDS, make_model
from swapper.forecast.search import (
    SettingCosts,
    Upgrade,
    as_dicts,
    find_table,
    find_upgrades,
    smallest_budget,
)
from swapper.io.drives import Tuning, find_tuning, tuning_path
from swapper.options import UPDATES
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
        if device is None and link is not None:
            raise ConfigError("--link is to an accelerator: give --device, its memory, as 24GiB")
        known = None if device is None else KNOWN.get(device.upper().replace(" ", ""))
        if device_memory is not None and known is None:
            raise ConfigError(f"--device-memory goes with a --device that is known: {', '.join(KNOWN)}")
        if device is not None and known is None and (flops is None or not device[0].isdigit()):
            raise ConfigError(
                f"--device {device} is not known: give one of {', '.join(KNOWN)}, or its memory, as 24GiB, with --flops, its "
                "operations a second, as --flops 1e14"
            )
        if ranks == 1 and network is not None:
            raise ConfigError("--network is between ranks: give --ranks")
        drives = parse_drives(nvme)
        machine = Machine(
            host_bytes=parse_bytes(host, "--host"),
            drive=joined(drives),
            drives=len(drives),
            flops=flops if flops is not None or known is None else known.flops * REACHED_FLOPS,
            updates=updates,
            device_bytes=_device_bytes(device, device_memory, known),
            device=_device_rates(link, known),
            is_from_data_sheet=known is not None,
            network=math.inf if network is None else parse_bytes_a_second(network, "--network"),
            ranks=ranks,
            nodes=nodes,
        )
        setting = Setting(
            optimizer, codec, update, gradients=gradients, passes=accumulate, update_on=update_on, recompute=recompute
        )  # fmt: skip
        _check(machine, setting, dtype, tokens)
        endurance_bytes = None if endurance is None else parse_bytes(endurance, "--endurance")
        with console.status("planning"), _without_collections():
            forecaster = Forecaster(make_model(config, getattr(torch, dtype)), tokens)
            found = forecaster.forecast(machine, setting)
            figures = figures_of(forecaster, machine, setting, found, endurance_bytes)
            upgrades = find_upgrades(forecaster, machine, setting)
            rows = find_table(forecaster, machine, setting) if table else []
        figures |= {"upgrades": as_dicts(upgrades), "table": as_dicts(rows), "planned_in_s": time.monotonic() - began_s}
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        print(describe(found, machine, figures))
        _print_tables(upgrades, rows)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Do without Python's garbage collector, which goes through all of torch again and again: a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check(machine: Machine, setting: Setting, dtype: str, tokens: int) -> None:
    """Raise ConfigError for options that are not known, or contradict each other."""
    known: dict[str, tuple[str, Any]] = {
        "--optimizer": (setting.optimizer, OPTIMIZERS),
        "--dtype": (dtype, DTYPES),
        "--codec": (setting.codec, PRESETS),
        "--update": (setting.update, UPDATES),
        "--gradients": (setting.gradients, PLACES),
        "--update-on": (setting.update_on, ("device", "cpu")),
    }
    for option, (given, choices) in known.items():
        if given not in choices:
            raise ConfigError(f"{option} {given} is not known: use one of {', '.join(choices)}")
    for option, rate in (("--flops", machine.flops), ("--updates", machine.updates)):
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError(f"{option} {rate} must be more than 0, and a number")
    ranks, passes = machine.ranks, setting.passes
    if ranks % machine.nodes:
        raise ConfigError(f"--ranks {ranks} are of all nodes together: give a multiple of --nodes {machine.nodes}")
    if tokens < passes * ranks:
        raise ConfigError(
            f"--tokens {tokens} are of a whole step: --accumulate {passes} passes on --ranks {ranks} need at least "
            f"{passes * ranks}"
        )


def figures_of(
    forecaster: Forecaster, machine: Machine, setting: Setting, found: Forecast, endurance_bytes: int | None
) -> dict[str, object]:
    """Return the figures of a forecast. Bytes are of a node, or of each drive where they are named so.

    Args:
        forecaster, machine, setting: as of `Forecaster.plan`.
        found: the forecast.
        endurance_bytes: that a drive is rated to be written in all.
    """
    step, here = found.step, machine.of_node
    written_bytes = found.written_bytes * here
    daily_bytes = written_bytes / step.wall_s * DAY_S / machine.drives
    figures: dict[str, object] = {
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
        "written_bytes_a_day_a_drive": daily_bytes,
        "memory_bytes": found.memory_bytes * here,
        "smallest_host_bytes": smallest_budget(forecaster, machine, setting),
        "assumed": assumptions(machine),
    }
    if endurance_bytes is not None:
        figures["days_to_endurance"] = endurance_bytes / daily_bytes if daily_bytes else None
    return figures


def assumptions(machine: Machine) -> list[str]:
    """Return in words what a forecast takes for granted."""
    said = ["activations are outside of the memory", "attention, norms and the loss take no time"]
    if machine.ranks > 1:
        said.append(f"{machine.of_node} ranks of a node share its memory, drives and updates alike; shards are fp32")
        if math.isinf(machine.network):
            said.append("the network takes no time (give --network)")
    if machine.device_bytes is not None:
        if machine.is_from_data_sheet:
            said.append("the accelerator's rates are shares of its data sheet's that one model reached on an H200")
        if math.isinf(machine.device.link):
            said.append("copies to the accelerator take no time (give --link)")
    return said


def describe(found: Forecast, machine: Machine, figures: dict[str, Any]) -> str:
    """Return a forecast as people read it.

    Args:
        found: the forecast.
        machine: that it is for.
        figures: of `figures_of`.
    """
    node = " of a node" if machine.nodes > 1 else ""
    where = {family: figures["places"][family] for family in ("param", "state", "grad")}
    exact = "" if figures["bytes_are_exact"] else " (about: simulated with larger pages)"
    lines = [
        ("parameters", f"{figures['parameters']:,} on {where['param']}"),
        ("optimizer state", f"on {where['state']}"),
        ("gradients", f"on {where['grad']}"),
        (
            "host memory",
            f"{format_bytes(figures['memory_bytes'])}{node}; {_smallest(figures)} is the smallest that works",
        ),
        ("drive space", f"{format_bytes(figures['space_bytes'])}{node}"),
        ("a step", f"{figures['step_s']:.2f} s: {_phases(found)}"),
        ("tokens", f"{figures['tokens_a_day']:,.0f} a day"),
        ("a step reads", f"{format_bytes(figures['read_bytes'])}{node}{exact}"),
        ("a step writes", f"{format_bytes(figures['written_bytes'])}{node}{exact}"),
        ("wear", f"{figures['written_bytes_a_day_a_drive'] / 1e12:.2f} TB a day written to each drive{_days(figures)}"),
        ("assumed", "; ".join(figures["assumed"])),
        ("planned in", f"{figures['planned_in_s']:.1f} s"),
    ]
    return "\n".join(f"{name:<18}{text}" for name, text in lines)


def _phases(found: Forecast) -> str:
    phases = {name: phase for name, phase in found.step.phases.items() if phase.wall_s}
    waits_s = found.step.total.wait_s
    parts = ", ".join(f"{name} {phase.wall_s:.2f}" for name, phase in phases.items())
    return f"{parts}; {waits_s:.2f} s of it waits for the drive"


def _smallest(figures: dict[str, Any]) -> str:
    return f"{format_bytes(figures['smallest_host_bytes'])} ({figures['smallest_host_bytes']} bytes)"


def _days(figures: dict[str, object]) -> str:
    if "days_to_endurance" not in figures:
        return ""
    days = figures["days_to_endurance"]
    return "; it never wears out" if days is None else f"; its endurance lasts {days:,.0f} days"


def _print_tables(upgrades: list[Upgrade], rows: list[SettingCosts]) -> None:
    console = make_console()
    better = Table("next upgrade", "s a step", "s saved", "s saved a GiB", title="What would be faster")
    for one in upgrades:
        a_gib = "" if one.saved_s_a_gib is None else f"{one.saved_s_a_gib:.3f}"
        better.add_row(one.what, f"{one.step_s:.2f}", f"{one.saved_s:.2f}", a_gib)
    console.print(better)
    if rows:
        settings = Table("codec", "update", "on NVMe", "passes", "s a step", "memory", "written a step")
        settings.title = "Settings that no other beats in all three, exact ones by exact ones"
        for row in rows:
            costs = f"{row.step_s:.2f}", format_bytes(row.memory_bytes), format_bytes(row.written_bytes)
            settings.add_row(row.codec, row.update, row.on_nvme, str(row.passes), *costs)
        console.print(settings)
        console.print("memory: of a node, with the inputs of matrices that autograd keeps on a CPU")


# --- units ---


def _device_bytes(device: str | None, memory: str | None, known: KnownDevice | None) -> int | None:
    if device is None:
        return None
    if known is None:
        return parse_bytes(device, "--device")
    return int(known.nbytes) // AUTO_SHARE if memory is None else parse_bytes(memory, "--device-memory")


def _device_rates(link: str | None, known: KnownDevice | None) -> DeviceRates:
    rate = math.inf if known is None else known.link * REACHED_LINK
    rate = rate if link is None else parse_bytes_a_second(link, "--link")
    return DeviceRates(rate, rate, math.inf if known is None else known.memory * REACHED_MEMORY)


def parse_drives(drives: Sequence[str]) -> list[DriveRates]:
    """Return the rates of each drive.

    Args:
        drives: for each "READ,WRITE", as "7GB/s,5GB/s", or a directory on a drive that `swapper tune` measured.

    Raises:
        ConfigError: a rate is none or could be bits, or a drive does not exist, or was not measured.
    """
    return [_drive(text) for text in drives]


def _drive(text: str) -> DriveRates:
    if "," in text:
        parts = text.split(",")
        if len(parts) != 2:
            raise ConfigError(f"--nvme {text}: give two rates, read and write, as 7GB/s,5GB/s; repeat --nvme for more")
        read, write = (parse_bytes_a_second(part, "--nvme") for part in parts)
        return DriveRates(read, write, read + write)
    if re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]i?B(/s)?", text, re.IGNORECASE) and not Path(text).exists():
        raise ConfigError(f"--nvme {text} is one rate: give two, read and write, as {text},{text}")
    tuning = _measured(Path(text))
    rates = tuning.read_bytes_per_s, tuning.write_bytes_per_s
    return DriveRates(*rates, sum(rates))


def _measured(directory: Path) -> Tuning:
    if not directory.is_dir():
        raise ConfigError(
            f"--nvme {directory}: there is no such directory. Give a directory on the drive, or its rates, read and write, "
            "as 7GB/s,5GB/s"
        )
    tuning = find_tuning(directory)
    if tuning is None:
        raise ConfigError(
            f"--nvme {directory}: {tuning_path()} has no measurement of this drive (those of other drives do not count): run "
            f"`swapper tune {directory}`, or give its rates, read and write, as 7GB/s,5GB/s"
        )
    return tuning


def joined(drives: Sequence[DriveRates]) -> DriveRates:
    """Return the rates of several drives that each have a share of the bytes by their speed."""
    weights = [min(drive.read, drive.write) for drive in drives]
    shares = [weight / sum(weights) for weight in weights]
    read, write, both = (
        min(getattr(drive, name) / share for drive, share in zip(drives, shares, strict=True))
        for name in ("read", "write", "both")
    )
    return DriveRates(read, write, both)

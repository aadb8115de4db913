"""Checks that training of each architecture stays within its budget and one working set, in a control group.

    PYTHONPATH=tests python tests/e2e/memory_check.py [--only Llama,T5] [--width 512] [--layers 8] [--directory DIR] [--json FILE]

`tools/test_memory` runs it. For each architecture three kinds of processes, each in a control group: one that only warms up, as the
others do first (*import*); one that trains in plain torch, whose peak beyond that and beyond parameters, gradients and AdamW's
state is the *working set* (activations, and what the optimizer and the allocator take in passing); and the swapped training. Plain
torch's peak differs by some 25 MB from run to run, so it trains a few times, and the highest counts.
That one builds its model on the meta device, has everything on NVMe and a budget of a quarter of parameters and state, and its
control group is allowed import + budget + working set: more, and the kernel kills it. Killed, it runs once more without a limit,
to say what it takes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import swapper
from e2e.architectures import MODELS, Size

CAPPED = Path(__file__).resolve().parents[2] / "tools" / "capped"
STEPS = 3
BYTES_A_PARAMETER = 16  # fp32: itself, its gradient, two of AdamW's
BUDGET_SHARE = 4  # of parameters and state: a quarter of them
PLAIN_RUNS = 3
NOT_PERMITTED = 77


def train(model: Any, optimizer: Any, loss_of: Any) -> list[float]:
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Filler:
    """First values, alike wherever they are made: of parameters by their names, of buffers as in a model of one layer."""

    def __init__(self, model: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
        first_names = {id(parameter): name for name, parameter in model.named_parameters()}  # of what is tied, one
        self._seeds = {
            (id(module), name): sum(first_names[id(parameter)].encode())
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }
        self._names = {id(module): name for name, module in model.named_modules()}
        self._buffers = buffers

    def __call__(self, module: nn.Module) -> None:
        prefix = self._names[id(module)]
        for name, parameter in module.named_parameters(recurse=False):
            generator = torch.Generator().manual_seed(self._seeds[id(module), name])
            with torch.no_grad():
                parameter.normal_(0, 0.02, generator=generator)
        for name, buffer in module.named_buffers(recurse=False):
            whole = f"{prefix}.{name}" if prefix else name
            buffer.copy_(self._buffers[re.sub(r"\.\d+\.", ".0.", whole)])


def warm_up(name: str) -> None:
    """Train a tiny model of the kind: what of torch and transformers is imported when it is first needed is there then. So is
    what of swapper is, some 4.5 MB of code."""
    importlib.import_module("swapper.train.session.first_session")
    make, loss_of = MODELS[name]
    with torch.device("meta"):
        make(Size(layers=1))
    model = make(Size(layers=1))
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_of)


def buffers_of(name: str, size: Size) -> dict[str, torch.Tensor]:
    return dict(MODELS[name][0](Size(size.width, 1, vocabulary=2)).named_buffers())


def run_plain(name: str, size: Size) -> dict[str, Any]:
    make, loss_of = MODELS[name]
    buffers = buffers_of(name, size)
    model = make(size)
    fill = Filler(model, buffers)
    for module in model.modules():
        fill(module)
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_of)
    return {"losses": losses, "parameters": sum(parameter.numel() for parameter in model.parameters())}


def run_swapped(name: str, size: Size, directory: Path, budget_bytes: int) -> dict[str, Any]:
    make, loss_of = MODELS[name]
    buffers = buffers_of(name, size)
    with torch.device("meta"):
        model = make(size)
    with swapper.SwapManager(directory, host_memory=budget_bytes) as manager:
        model, optimizer = manager.offload(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            params="nvme",
            optimizer_state="nvme",
            gradients="nvme",
            init=Filler(model, buffers),
        )
        losses = train(model, optimizer, loss_of)
    return {"losses": losses}


def run_role(
    role: str, name: str, options: argparse.Namespace, memory_bytes: int | None, budget: int
) -> dict[str, Any]:
    """Run this file in a process of its own, in a control group; returns its figures with those of the group."""
    with tempfile.TemporaryDirectory(prefix="swapper-memory-", dir=options.directory) as scratch:
        figures, report = Path(scratch) / "figures.json", Path(scratch) / "report.json"
        command = [str(CAPPED), "--json", str(report), "--directory", scratch]
        command += ["--memory", str(memory_bytes)] if memory_bytes else []
        command += ["--", sys.executable, __file__, "--role", role, "--only", name, "--directory", scratch]
        command += ["--json", str(figures), "--budget", str(budget)]
        command += ["--width", str(options.width), "--layers", str(options.layers)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == NOT_PERMITTED:
            print(done.stderr, file=sys.stderr)
            raise SystemExit(NOT_PERMITTED)
        answer = json.loads(report.read_text())
        if done.returncode == 0:
            answer |= json.loads(figures.read_text())
        elif not answer["oom_kills"]:
            raise SystemExit(f"{role} {name}: exit code {done.returncode}\n{done.stderr}")
        return answer


def check(name: str, options: argparse.Namespace) -> dict[str, Any]:
    imported = run_role("imported", name, options, None, 0)["peak_memory_bytes"]
    plain = max(
        (run_role("plain", name, options, None, 0) for _ in range(PLAIN_RUNS)), key=lambda run: run["peak_memory_bytes"]
    )
    state = plain["parameters"] * (BYTES_A_PARAMETER - 4)
    working_set = plain["peak_memory_bytes"] - imported - plain["parameters"] * BYTES_A_PARAMETER
    budget = state // BUDGET_SHARE
    cap = imported + budget + working_set
    swapped = run_role("swapped", name, options, cap, budget)
    free = run_role("swapped", name, options, None, budget) if swapped["oom_kills"] else swapped
    return {
        "name": name,
        "parameters": plain["parameters"],
        "state_bytes": state,
        "budget_bytes": budget,
        "working_set_bytes": working_set,
        "imported_bytes": imported,
        "cap_bytes": cap,
        "peak_bytes": free["peak_memory_bytes"],
        "kills": swapped["oom_kills"],
        "equal": swapped.get("losses") == plain["losses"],
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="MB; the budget is a quarter of parameters and state", title_justify="left")
    for heading in (
        "",
        "parameters",
        "state",
        "budget",
        "working set",
        "import",
        "allowed",
        "peak",
        "killed",
        "losses",
    ):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        keys = ("state", "budget", "working_set", "imported", "cap", "peak")
        sizes = [f"{row[f'{key}_bytes'] / 1e6:,.0f}" for key in keys]
        equal = "equal" if row["equal"] else "differ"
        table.add_row(row["name"], f"{row['parameters'] / 1e6:.1f} M", *sizes, str(row["kills"]), equal)
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of architectures, with commas")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the drive to swap to (default: here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--role", choices=("imported", "plain", "swapped"), help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(MODELS)
    if unknown := set(names) - set(MODELS):
        parser.error(f"--only: {', '.join(sorted(unknown))}: there are {', '.join(MODELS)}")
    size = Size(options.width, options.layers, vocabulary=8192)
    if options.role:
        figures: dict[str, Any] = {}
        warm_up(names[0])
        if options.role == "plain":
            figures = run_plain(names[0], size)
        elif options.role == "swapped":
            figures = run_swapped(names[0], size, options.directory, options.budget)
        options.json.write_text(json.dumps(figures))
        return 0
    rows = []
    for name in names:
        rows.append(check(name, options))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    Console().print(table_of(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 1 if any(row["kills"] or not row["equal"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())

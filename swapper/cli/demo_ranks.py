"""Implements `swapper demo --ranks N`: a GPT that FSDP2 shards over processes of this machine, all of it on the drive.

The ranks are killed half-way, and resume. Then plain FSDP2 trains the same, and losses, shards and optimizer state are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from swapper.bench.hardware import DriveSpeed, StepLimit, measure_drive
from swapper.bench.plain import GptConfig
from swapper.bench.sharded import StartedRanks

STATE_BYTES = 12
"""Of a parameter: the fp32 shard, and AdamW's two moments."""
FILES_OF_STATE = 3
"""Two alternating swap files, and the one that is used while ranks are at different commits."""
SMALLEST_BUDGET_BYTES = 96 << 20

Watch = Callable[[str, list[float]], None]
"""Shows the stage, and the losses so far."""


@dataclass(frozen=True, kw_only=True)
class RanksTask:
    """The training task. `masters`: it computes in bf16, on fp32 shards."""

    ranks: int
    config: GptConfig
    masters: bool
    steps: int
    batch: int
    given_budget_bytes: int | None
    learning_rate: float
    drive_s: float

    @property
    def state_bytes(self) -> int:
        """Bytes of all shards with their optimizer state."""
        return STATE_BYTES * self.config.parameters

    @property
    def budget_bytes(self) -> int:
        """What was given for all ranks, or half of the state: gradients in host memory are a third."""
        return self.given_budget_bytes or max(self.state_bytes // 2, self.ranks * SMALLEST_BUDGET_BYTES)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the run needs on the drive."""
        return FILES_OF_STATE * self.state_bytes + (576 << 20)


@dataclass(kw_only=True)
class Measurements:
    """The measurements of a demo. Lists have an entry for each step."""

    drive: DriveSpeed
    losses: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)
    written_bytes: list[int] = field(default_factory=list)
    growth_bytes: int = 0
    plain_losses: list[float] = field(default_factory=list)
    plain_step_s: float = 0.0


@dataclass(kw_only=True)
class RanksRecord(Measurements):
    """The measurements of the first rank."""

    task: RanksTask
    killed_after: int = 0
    resumed_at: int = 0
    resume_s: float = 0.0
    plain_growth_bytes: int = 0
    different: list[str] = field(default_factory=list)
    """Names of shards and state that differ from plain FSDP2's."""

    @property
    def is_equal(self) -> bool:
        return bool(self.plain_losses) and self.losses == self.plain_losses and not self.different


def measure(task: RanksTask, directory: Path, watch: Watch) -> RanksRecord:
    """Run the demo in `directory`.

    Args:
        task: what is trained.
        directory: exists, and is empty.
        watch: shows the progress.
    """
    watch("measuring the drive", [])
    record = RanksRecord(task=task, drive=measure_drive(directory, duration_s=task.drive_s))
    order = {
        "config": asdict(task.config),
        "masters": task.masters,
        "steps": task.steps,
        "batch": task.batch,
        "learning_rate": task.learning_rate,
    }
    swapped = {**order, "directory": str(directory / "run"), "host_memory": f"{task.budget_bytes}B/node"}
    watch("moving shards to the drive", [])
    record.killed_after = max(task.steps // 2, 1)
    with StartedRanks(task.ranks, swapped, directory) as ranks:
        _follow(ranks, record, watch, kill_after=record.killed_after)
    watch("resuming after kill -9", record.losses)
    began_s = time.perf_counter()
    with StartedRanks(task.ranks, swapped, directory) as ranks:
        ours, record.growth_bytes = _follow(ranks, record, watch, lambda: time.perf_counter() - began_s)
    plain = RanksRecord(task=task, drive=record.drive)
    with StartedRanks(task.ranks, order, directory) as ranks:
        theirs, record.plain_growth_bytes = _follow(
            ranks, plain, lambda _, losses: watch("the same in plain FSDP2", losses)
        )
    record.plain_losses, record.plain_step_s = plain.losses, min(plain.times_s[1:] or plain.times_s)
    pairs = enumerate(zip(ours, theirs, strict=True))
    different = [(name, rank) for rank, (mine, others) in pairs for name in others if mine.get(name) != others[name]]
    record.different = [f"{name} of rank {rank}" for name, rank in different]
    record.drive = record.drive.better(measure_drive(directory, duration_s=task.drive_s))
    return record


def _follow(
    ranks: StartedRanks,
    record: RanksRecord,
    watch: Watch,
    clock: Callable[[], float] = float,
    kill_after: int | None = None,
) -> tuple[list[dict[str, str]], int]:
    """Note in `record` what the first rank prints, to the end of all.

    Args:
        clock: returns the seconds since they were started.
        kill_after: kill all ranks once there are that many steps.

    Returns:
        For each rank the digests of its shards and their state, and the growth of the first one's memory.
    """
    row: dict[str, Any] = {}
    is_killed = False
    for row in ranks.lines(0):
        if "begun" in row:
            record.resumed_at, record.resume_s = row["begun"], clock()
            for values in (record.losses, record.times_s, record.read_bytes, record.written_bytes):
                del values[row["begun"] :]
        elif "loss" in row:
            record.losses.append(row["loss"])
            record.times_s.append(row["seconds"])
            record.read_bytes.append(row.get("read", 0))
            record.written_bytes.append(row.get("written", 0))
            watch("training", record.losses)
        if len(record.losses) == kill_after:
            ranks.kill()  # in the next step; rows that it has printed are still read
            is_killed = True
    if is_killed:
        return [], 0
    last = [row, *(([*ranks.lines(rank)] or [{}])[-1] for rank in range(1, record.task.ranks))]
    ranks.check()
    return [row["digests"] for row in last], last[0]["growth"]


def show(console: Console, record: RanksRecord) -> None:
    """Print the measurements of a demo on ranks as a table."""
    task = record.task
    step_s = steady(record.times_s)
    read_bytes, written_bytes = (task.ranks * steady(values) for values in (record.read_bytes, record.written_bytes))
    limit = StepLimit.of(record.drive, read_bytes, written_bytes, record.plain_step_s)
    kind = "bf16, on fp32 shards" if task.masters else "fp32"
    rows = [
        (
            "Parameters",
            f"{task.config.parameters / 1e6:,.1f} million, {kind}, sharded by FSDP2 over {task.ranks} ranks",
        ),
        ("State on the drive", f"{megabytes(task.state_bytes)}: shards and optimizer state"),
        (
            "Budget",
            f"{megabytes(task.budget_bytes)} of all ranks, {task.budget_bytes / task.state_bytes:.0%} of the state",
        ),
        (
            "Peak memory",
            f"{megabytes(record.growth_bytes)} over a sharded model in a rank; plain FSDP2 {megabytes(record.plain_growth_bytes)}",
        ),
        ("Step", f"{step_s:.2f} s, {step_s / limit.seconds:.2f} times the limit, which is by {limit.cause}"),
        ("Limit", ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in limit.by_cause.items())),
        ("Moved in a step", f"read {megabytes(read_bytes)}, written {megabytes(written_bytes)} by all ranks"),
        (
            "Killed",
            f"all ranks after step {record.killed_after}; resumed at {record.resumed_at} in {record.resume_s:.1f} s",
        ),
        ("Loss", f"{record.losses[0]:.3f} → {record.losses[-1]:.3f}"),
        ("Last losses, swapped", "  ".join(f"{loss!r}" for loss in record.losses[-2:])),
        ("Last losses, plain FSDP2", "  ".join(f"{loss!r}" for loss in record.plain_losses[-2:])),
    ]
    print_facts(console, "Trained from the drive, by ranks", rows)
    if record.is_equal:
        console.print("[green]Losses, shards and optimizer state are those of plain FSDP2, bit for bit.[/green]")
    else:
        what = ", ".join(record.different[:3]) or "losses"
        console.print(f"[red]They differ from plain FSDP2's[/red] ({what}). Please report this.")


def print_facts(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a table of two columns.

    Args:
        console: where.
        title: of the table.
        rows: (name, value).
    """
    table = Table(show_header=False, title=title, title_justify="left")
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def steady(values: Sequence[float]) -> float:
    """Return the median step, without the first two: they record the order and make the optimizer's state."""
    return median(values[2:] or values)


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f} MB"

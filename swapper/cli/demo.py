"""Implements `swapper demo`: trains a byte-level GPT that lives on the drive, and shows the cost.

This module has the options, the screen and the cleanup; demo_run.py does the work. The command's own directory is
removed at the end, also on Ctrl-C.
"""

from __future__ import annotations

import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from swapper.cli.place import check_directory, choose_directory
from swapper.errors import ConfigError, SwapperError
from swapper.runtime.sizes import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapper.bench.demo_run import DemoRecord, DemoTask

INTERRUPTED = 130  # exit code, 128 + SIGINT
STAGES = {
    "drive": "measuring the drive",
    "offload": "moving the model to the drive",
    "train": "training",
    "snapshot": "writing a snapshot",
    "compare": "going on in plain torch",
}


def demo(
    directory: Annotated[
        Path | None, typer.Option(help="Swap under this directory. [default: here, where this is a drive]")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help='Host memory for swapper: "350MB". [default: a quarter of the state]')
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 20,
    parameters: Annotated[str, typer.Option(help='Size of the model: "100M".')] = "100M",
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 2,
    context: Annotated[int, typer.Option(min=8, help="Bytes in a sequence.")] = 128,
    precision: Annotated[
        str | None,
        typer.Option(help="bf16 (with fp32 master weights) or fp32. [default: bf16 where the processor is fast at it]"),
    ] = None,
    snapshot: Annotated[Path | None, typer.Option(help="Keep the snapshot under this name.")] = None,
    drive_seconds: Annotated[float, typer.Option(min=0.05, help="Time for each measurement of the drive.")] = 1.0,
) -> None:
    """Train a GPT whose parameters and optimizer state live on NVMe, within a small memory budget.

    It learns the text of Python's own standard library. Afterwards plain torch opens a snapshot in another process and
    continues training: its losses must equal the swapped run's, bit for bit.
    """
    console = Console()
    try:
        with _terminated_like_interrupted():
            task = _make_task(steps, _count(parameters), batch, context, precision, budget, drive_seconds)
            record = _run(console, task, directory, snapshot)
    except KeyboardInterrupt:
        console.print("Interrupted. The swap files are removed.")
        raise typer.Exit(INTERRUPTED) from None
    except (SwapperError, OSError) as error:
        console.print(
            f"[red]Error:[/red] {escape(str(error) or type(error).__name__)}", soft_wrap=True, highlight=False
        )
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    _show(console, record)
    if not record.is_equal:
        console.print("[red]Plain torch did not continue as the swapped run did.[/red] Please report this.")
        raise typer.Exit(1)


def _make_task(
    steps: int,
    parameters: int,
    batch: int,
    context: int,
    precision: str | None,
    budget: str | None,
    drive_seconds: float,
) -> DemoTask:
    from swapper.bench.demo_run import DemoTask
    from swapper.bench.gpt import GptConfig

    if precision is None:
        precision = "bf16" if _is_fast_at_bf16() else "fp32"
    if precision not in ("bf16", "fp32"):
        raise ConfigError(f"--precision {precision} is not known: use bf16 or fp32")
    masters = precision == "bf16"
    config = GptConfig.for_parameters(parameters, vocabulary=256, context=context)
    # In fp32 the gradients alone are a third of the state, and they stay in host memory.
    default_bytes = DemoTask.state_bytes_of(config, masters) // (4 if masters else 2)
    budget_bytes = parse_bytes(budget, "--budget") if budget else default_bytes
    return DemoTask(config, masters, steps, batch, budget_bytes, drive_seconds)


def _is_fast_at_bf16() -> bool:
    """Return True if torch multiplies bf16 with wide instructions: without them a step takes minutes, not seconds."""
    import torch

    is_fast = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # missing in a torch without oneDNN
    return is_fast is not None and bool(is_fast())


def _run(console: Console, task: DemoTask, directory: Path | None, snapshot: Path | None) -> DemoRecord:
    from swapper.bench.demo_run import run_demo

    place = choose_directory() if directory is None else directory
    check_directory(place, task.disk_bytes)
    if snapshot is not None and not snapshot.parent.is_dir():
        raise ConfigError(f"--snapshot {snapshot}: the directory {snapshot.parent} is missing; make it first")
    console.print(
        f"A GPT of {task.config.parameters / 1e6:.0f} million parameters ({task.config.layers} layers, "
        f"width {task.config.width}), {'bf16' if task.masters else 'fp32'}, swapped under {escape(str(place))}",
        soft_wrap=True,
        highlight=False,
    )
    with tempfile.TemporaryDirectory(prefix="swapper-demo-", dir=place) as scratch, _progress(console, task) as watch:
        return run_demo(task, Path(scratch), snapshot or Path(scratch) / "snapshot.pt", watch)


def _count(text: str) -> int:
    """Parse a number of parameters: "100M", "1.3B", "50000"."""
    scale = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}.get(text[-1:].upper(), 1)
    try:
        count = int(float(text if scale == 1 else text[:-1]) * scale)
    except ValueError:
        count = 0
    if count < 1000:
        raise typer.BadParameter(f"{text!r} is not a number of parameters; write 100M, 1.3B or 50000")
    return count


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(console: Console, task: DemoTask) -> Iterator[Any]:
    """Show a bar over the steps, with the stage and the last loss."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<30}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=task.steps, loss="")

        def watch(stage: str, record: DemoRecord) -> None:
            loss = f"loss {record.losses[-1]:.3f}" if record.losses else ""
            progress.update(bar, description=STAGES[stage], completed=len(record.losses), loss=loss)

        yield watch


def _show(console: Console, record: DemoRecord) -> None:
    task, limit = record.task, record.limit
    step_s = record.steady(record.times_s)
    read, written = record.steady([*record.read_bytes]), record.steady([*record.written_bytes])
    rest_bytes = max(record.growth_bytes - record.torch_bytes - task.budget_bytes, 0)
    kind = "bf16, with fp32 master weights" if task.masters else "fp32"
    drive = record.drive
    table = Table(show_header=False, title="Trained from the drive", title_justify="left")
    rows = [
        ("Parameters", f"{task.config.parameters / 1e6:,.1f} million, {kind}"),
        ("State on the drive", f"{_mb(record.state_bytes)}: parameters and optimizer state"),
        ("Budget", f"{_mb(task.budget_bytes)}, {task.budget_bytes / task.state_bytes:.0%} of the state"),
        (
            "Peak memory",
            f"{_mb(record.growth_bytes)} over an imported torch: within the budget, {_mb(record.torch_bytes)} "
            f"torch's own, {_mb(rest_bytes)} activations and data",
        ),
        ("Step", f"{step_s:.2f} s, {step_s / limit.seconds:.2f} times the limit, which is by {limit.cause}"),
        ("Limit", ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in limit.by_cause.items())),
        ("Moved in a step", f"read {_mb(read)}, written {_mb(written)}"),
        ("Loss", f"{record.losses[0]:.3f} → {record.losses[-1]:.3f}, held out {record.validation_loss:.3f}"),
        ("Snapshot", f"{_mb(record.snapshot_bytes)} in {record.snapshot_s:.1f} s"),
        ("Next losses, swapped", "  ".join(f"{loss!r}" for loss in record.next_losses)),
        ("Next losses, plain torch", "  ".join(f"{loss!r}" for loss in record.plain_losses)),
    ]
    if drive is not None:
        rates = f"{drive.read_bytes_per_s / 1e9:.2f} GB/s read or {drive.write_bytes_per_s / 1e9:.2f} written"
        rows.insert(
            6,
            (
                "Drive",
                f"{rates}, {drive.both_bytes_per_s / 1e9:.2f} both at once"
                + ("" if drive.direct else ", through the page cache"),
            ),
        )
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    if record.is_equal:
        console.print("[green]Plain torch continued from the snapshot bit for bit.[/green]")


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f} MB"

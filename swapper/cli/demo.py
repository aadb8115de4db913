"""Implements `swapper demo`: trains a byte-level GPT that lives on the drive, and shows the cost.

It trains swapped, writes a snapshot, continues from it in plain torch, and compares. Every number in the table is
measured here, in the same run: the drive before and after, the memory throughout, the bytes by the manager. The
command's own directory is removed at the end, also on Ctrl-C.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

import swapper
from swapper.bench import plain
from swapper.bench.hardware import StepLimit, check_directory, choose_directory, measure_drive
from swapper.bench.measure import PeakMemory, pss_bytes
from swapper.bench.plain import Corpus, GptConfig, make_gpt
from swapper.cli import demo_ranks
from swapper.cli.command import make_console, make_progress, reported
from swapper.cli.demo_ranks import Watch, megabytes, print_facts, steady
from swapper.errors import CheckpointError, ConfigError
from swapper.io.replacing import make_parents
from swapper.paging.layout import OR_PLACE_MORE
from swapper.runtime.sizes import parse_bytes

MIN_STEPS, MAX_STEPS, TRAINING_S = 6, 20, 20.0  # where the user gives no number
LEARNING_RATE = 3e-4  # usual for AdamW, not tuned
AFTER_TRAINING = "writing a snapshot"
COMPARED_STEPS = 2  # the first compares the parameters, the second the optimizer state too
TIMED_PLAIN_STEPS = 3  # the fastest of them counts
FILES_OF_STATE = 3  # two alternating swap files, and the snapshot
DRIVE_FILES_BYTES = 2 * (256 << 20)  # the two files of measure_drive


def demo(
    directory: Annotated[
        Path | None, typer.Option(help="Swap under this directory. [default: here, where this is a drive]")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help='Host memory for swapper: "350MB". [default: a quarter of the state]')
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Training steps. [default: 20; without --ranks fewer, if they take more than 20 s]"),
    ] = None,
    parameters: Annotated[str, typer.Option(help='Size of the model: "100M".')] = "100M",
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 2,
    context: Annotated[int, typer.Option(min=8, help="Bytes in a sequence.")] = 128,
    precision: Annotated[
        str | None,
        typer.Option(help="bf16 (with fp32 master weights) or fp32. [default: bf16 where the processor is fast at it]"),
    ] = None,
    snapshot: Annotated[Path | None, typer.Option(help="Keep the snapshot under this name.")] = None,
    drive_seconds: Annotated[float, typer.Option(min=0.05, help="Time for each measurement of the drive.")] = 1.0,
    ranks: Annotated[
        int, typer.Option(min=1, help="Processes over which FSDP2 shards the model; killed and resumed.")
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the measurements as JSON, the rest to stderr.")
    ] = False,
) -> None:
    """Train a GPT whose parameters and optimizer state live on NVMe, within a small memory budget.

    It learns the text of Python's own standard library. Afterwards plain torch opens a snapshot in another process and
    continues training: its losses must equal the swapped run's, bit for bit. With --ranks, plain FSDP2 trains the same.
    """
    console = make_console(stderr=as_json)
    with reported(console, words={OR_PLACE_MORE: "", "host_memory=": "--budget ", "host_memory": "--budget"}):
        masters = _has_masters(precision)
        config = GptConfig.for_parameters(_count(parameters), vocabulary=256, context=context)
        budget_bytes = parse_bytes(budget, "--budget") if budget else None
        if snapshot is not None:  # written at the end
            make_parents(snapshot, ConfigError)
        if ranks > 1:
            if snapshot is not None:
                raise ConfigError("--snapshot does not go with --ranks: that demo compares with plain FSDP2 instead")
            sharded = demo_ranks.RanksTask(
                ranks=ranks, config=config, masters=masters, steps=steps or MAX_STEPS, batch=batch,
                given_budget_bytes=budget_bytes, learning_rate=LEARNING_RATE, drive_s=drive_seconds,
            )  # fmt: skip
            with _place(console, sharded, directory, f"over {ranks} ranks") as (scratch, watch):
                record: DemoRecord | demo_ranks.RanksRecord = demo_ranks.measure(sharded, scratch, watch)
        else:
            task = DemoTask(config, masters, steps, batch, budget_bytes, drive_seconds)
            record = _run(console, task, directory, snapshot)
    if as_json:
        print(json.dumps(asdict(record), indent=2))
    if isinstance(record, demo_ranks.RanksRecord):
        demo_ranks.show(console, record)
    else:
        _show(console, record)
    if not record.is_equal and isinstance(record, DemoRecord):
        console.print("[red]Plain torch did not continue as the swapped run did.[/red] Please report this.")
    if not record.is_equal:
        raise typer.Exit(1)


def _has_masters(precision: str | None) -> bool:
    if precision is None:
        # Without wide instructions for bf16 a step takes minutes, not seconds. Missing in a torch without oneDNN.
        is_fast = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
        return is_fast is not None and bool(is_fast())
    if precision not in ("bf16", "fp32"):
        raise ConfigError(f"--precision {precision} is not known: use bf16 or fp32")
    return precision == "bf16"


def _count(text: str) -> int:
    """Parse a number of parameters: "100M", "1.3B", "50000"."""
    scale = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}.get(text[-1:].upper(), 1)
    try:
        count = int(float(text if scale == 1 else text[:-1]) * scale)
    except (ValueError, OverflowError):
        count = 0
    if count < 1000:
        raise typer.BadParameter(f"{text!r} is not a number of parameters; write 100M, 1.3B or 50000")
    return count


@dataclass(frozen=True)
class DemoTask:
    """The training task.

    Attributes:
        masters: a bf16 model with fp32 master weights; else fp32 throughout.
        steps: to train; None: as many as take TRAINING_S.
    """

    config: GptConfig
    masters: bool
    steps: int | None
    batch: int
    given_budget_bytes: int | None
    drive_s: float  # for each measurement of the drive

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.masters else torch.float32

    @property
    def state_bytes(self) -> int:
        """Return the bytes of parameters, masters and AdamW's two moments."""
        return self.config.parameters * (2 + 4 + 8 if self.masters else 4 + 8)

    @property
    def budget_bytes(self) -> int:
        """Return what was given, or a quarter of the state; in fp32 half of it: gradients in host memory are a third."""
        return self.given_budget_bytes or self.state_bytes // (4 if self.masters else 2)

    @property
    def disk_bytes(self) -> int:
        """Return the bytes that the run needs on the drive."""
        return FILES_OF_STATE * self.state_bytes + DRIVE_FILES_BYTES + (64 << 20)


@dataclass(kw_only=True)
class DemoRecord(demo_ranks.Measurements):
    """The measurements of one process."""

    task: DemoTask
    validation_loss: float = 0.0
    state_bytes: int = 0
    torch_bytes: int = 0  # of it, torch's own memory at its first training step, for any model
    snapshot_bytes: int = 0
    snapshot_s: float = 0.0
    next_losses: list[float] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return bool(self.plain_losses) and self.next_losses == self.plain_losses


def _run(console: Console, task: DemoTask, directory: Path | None, snapshot: Path | None) -> DemoRecord:
    with _place(console, task, directory) as (scratch, watch):
        return _measure(task, scratch, snapshot or scratch / "snapshot.pt", watch)


@contextmanager
def _place(
    console: Console, task: DemoTask | demo_ranks.RanksTask, directory: Path | None, over: str = ""
) -> Iterator[tuple[Path, Watch]]:
    """Say what is trained and where. Yield an empty directory there, which is removed at the end, and what shows the progress."""
    place = choose_directory() if directory is None else directory
    check_directory(place, task.disk_bytes)
    console.print(
        f"A GPT of {task.config.parameters / 1e6:.0f} million parameters ({task.config.layers} layers, "
        f"width {task.config.width}), {'bf16' if task.masters else 'fp32'}{over and ', ' + over}, swapped under "
        f"{escape(str(place))}",
    )
    with (
        tempfile.TemporaryDirectory(prefix="swapper-demo-", dir=place) as scratch,
        _progress(console, task.steps or MAX_STEPS) as watch,
    ):
        yield Path(scratch), watch


@contextmanager
def _progress(console: Console, steps: int) -> Iterator[Watch]:
    """Show a bar over the steps, with the stage and the last loss."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<30}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with make_progress(console, *columns) as progress:
        bar = progress.add_task("starting", total=steps, loss="")

        def watch(stage: str, losses: list[float]) -> None:
            loss = f"loss {losses[-1]:.3f}" if losses else ""
            total = len(losses) if stage == AFTER_TRAINING else None  # it may have ended early
            progress.update(bar, description=stage, completed=len(losses), total=total, loss=loss)

        yield watch


def _measure(task: DemoTask, directory: Path, snapshot: Path, watch: Watch) -> DemoRecord:
    """Run the demo in `directory`, which exists and is empty, and leave the snapshot at `snapshot`."""
    watch("measuring the drive", [])
    record = DemoRecord(task=task, drive=measure_drive(directory, duration_s=task.drive_s))
    with PeakMemory() as memory:
        _start_torch()
        record.torch_bytes = pss_bytes() - memory.baseline_bytes
        _train(task, directory, snapshot, watch, record)
    record.growth_bytes = memory.growth_bytes
    watch("continuing in plain torch", record.losses)
    _compare(task, snapshot, record)
    record.drive = record.drive.better(measure_drive(directory, duration_s=task.drive_s))
    return record


def _start_torch() -> None:
    """Take one step of a tiny model, so that torch's imports, allocations and threads are not measured."""
    config = GptConfig(vocabulary=256, context=8, layers=1, width=64)
    tokens = torch.zeros(1, 8, dtype=torch.int64, device="cpu")
    plain.PlainTraining(make_gpt(config, torch.bfloat16), LEARNING_RATE, masters=True).step(tokens, tokens)


def _train(task: DemoTask, directory: Path, snapshot: Path, watch: Watch, record: DemoRecord) -> None:
    corpus = Corpus(task.config.vocabulary)
    watch("moving the model to the drive", [])
    with swapper.SwapManager(directory / "run", host_memory=task.budget_bytes) as manager:
        torch.manual_seed(0)
        gpt = make_gpt(task.config, task.dtype)
        model, optimizer = manager.offload(
            gpt,
            plain.make_optimizer(gpt.parameters(), LEARNING_RATE),
            params="nvme",
            optimizer_state="nvme",
            gradients="host",
            update="backward",
            master_weights=torch.float32 if task.masters else None,
        )

        def step(number: int) -> float:
            loss: torch.Tensor = model(*corpus.batch(number, task.batch, task.config.context))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        for number in range(task.steps or MAX_STEPS):
            counters = manager.counters  # the engine's bytes are counted when this is read
            read, written, began_s = counters.bytes_read, counters.bytes_written, time.perf_counter()
            record.losses.append(step(number))
            record.times_s.append(time.perf_counter() - began_s)
            counters = manager.counters
            record.read_bytes.append(counters.bytes_read - read)
            record.written_bytes.append(counters.bytes_written - written)
            watch("training", record.losses)
            if task.steps is None and number + 1 >= MIN_STEPS and sum(record.times_s) > TRAINING_S:
                break
        record.state_bytes = counters.state_bytes
        with torch.no_grad():
            held_out = corpus.batch(0, task.batch, task.config.context, validation=True)
            record.validation_loss = model(*held_out).item()
        watch(AFTER_TRAINING, record.losses)
        began_s = time.perf_counter()
        manager.snapshot(snapshot).result()
        record.snapshot_s = time.perf_counter() - began_s
        record.snapshot_bytes = snapshot.stat().st_size
        record.next_losses = [step(len(record.losses) + number) for number in range(COMPARED_STEPS)]


def _compare(task: DemoTask, snapshot: Path, record: DemoRecord) -> None:
    """Repeat the next steps from the snapshot: plain torch, in a process without swapper."""
    order = {
        "snapshot": str(snapshot.resolve()),
        "config": asdict(task.config),
        "dtype": str(task.dtype).removeprefix("torch."),
        "masters": task.masters,
        "learning_rate": LEARNING_RATE,
        "threads": torch.get_num_threads(),
        "first_batch": len(record.losses),
        "batch": task.batch,
        "steps": COMPARED_STEPS + TIMED_PLAIN_STEPS,
    }
    # -P or -I would remove the script's folder from the path; the script needs the other files in it.
    command = [sys.executable, plain.__file__, json.dumps(order)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=snapshot.parent)
    if done.returncode != 0:
        raise CheckpointError(f"torch cannot continue from {snapshot} (exit {done.returncode}):\n{done.stderr.strip()}")
    answer = json.loads(done.stdout)
    record.plain_losses = answer["losses"][:COMPARED_STEPS]
    record.plain_step_s = min(answer["times_s"][COMPARED_STEPS:])  # the fastest counts, as a limit must


def _show(console: Console, record: DemoRecord) -> None:
    task, drive = record.task, record.drive
    step_s, read, written = steady(record.times_s), steady(record.read_bytes), steady(record.written_bytes)
    limit = StepLimit.of(drive, read, written, record.plain_step_s)
    rest_bytes = max(record.growth_bytes - record.torch_bytes - task.budget_bytes, 0)
    kind = "bf16, with fp32 master weights" if task.masters else "fp32"
    rates = f"{drive.read_bytes_per_s / 1e9:.2f} GB/s read or {drive.write_bytes_per_s / 1e9:.2f} written"
    both = f"{drive.both_bytes_per_s / 1e9:.2f} both at once" + ("" if drive.direct else ", through the page cache")
    rows = [
        ("Parameters", f"{task.config.parameters / 1e6:,.1f} million, {kind}"),
        ("State on the drive", f"{megabytes(record.state_bytes)}: parameters and optimizer state"),
        ("Budget", f"{megabytes(task.budget_bytes)}, {task.budget_bytes / task.state_bytes:.0%} of the state"),
        (
            "Peak memory",
            f"{megabytes(record.growth_bytes)} over an imported torch: within the budget, {megabytes(record.torch_bytes)} "
            f"torch's own, {megabytes(rest_bytes)} activations and data",
        ),
        ("Step", f"{step_s:.2f} s, {step_s / limit.seconds:.2f} times the limit, which is by {limit.cause}"),
        ("Limit", ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in limit.by_cause.items())),
        ("Drive", f"{rates}, {both}"),
        ("Moved in a step", f"read {megabytes(read)}, written {megabytes(written)}"),
        ("Loss", f"{record.losses[0]:.3f} → {record.losses[-1]:.3f}, held out {record.validation_loss:.3f}"),
        ("Snapshot", f"{megabytes(record.snapshot_bytes)} in {record.snapshot_s:.1f} s"),
        ("Next losses, swapped", "  ".join(f"{loss!r}" for loss in record.next_losses)),
        ("Next losses, plain torch", "  ".join(f"{loss!r}" for loss in record.plain_losses)),
    ]
    print_facts(console, "Trained from the drive", rows)
    if record.is_equal:
        console.print("[green]Plain torch continued from the snapshot bit for bit.[/green]")

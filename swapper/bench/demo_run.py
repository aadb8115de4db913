"""Runs `swapper demo` without its screen: train swapped, snapshot, continue in plain torch, compare.

The model and its optimizer live in swap files in the run's own directory. Every number in the table is measured here,
in the same run: the drive before and after, the memory throughout, the bytes by the manager.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch

import swapper
from swapper.bench.corpus import Corpus
from swapper.bench.drive import DriveSpeed, measure_drive
from swapper.bench.gpt import GptConfig, make_gpt
from swapper.bench.limit import StepLimit
from swapper.bench.memory import PeakMemory, pss_bytes
from swapper.bench.plain import PlainTraining, make_optimizer
from swapper.errors import CheckpointError, StateError

LEARNING_RATE = 3e-4  # usual for AdamW, not tuned
COMPARED_STEPS = 2  # the first compares the parameters, the second the optimizer state too
TIMED_PLAIN_STEPS = 3  # the fastest of them counts
FILES_OF_STATE = 3  # two alternating swap files, and the snapshot
DRIVE_FILES_BYTES = 2 * (256 << 20)  # the two files of measure_drive
RESUME_SCRIPT = Path(__file__).with_name("plain_resume.py")


@dataclass(frozen=True)
class DemoTask:
    """The training task. `masters`: a bf16 model with fp32 master weights; else fp32 throughout."""

    config: GptConfig
    masters: bool
    steps: int
    batch: int
    budget_bytes: int
    drive_s: float = 1.0
    seed: int = 0

    @staticmethod
    def state_bytes_of(config: GptConfig, masters: bool) -> int:
        """Return the bytes of parameters, masters and AdamW's two moments."""
        return config.parameters * (2 + 4 + 8 if masters else 4 + 8)

    @property
    def state_bytes(self) -> int:
        return self.state_bytes_of(self.config, self.masters)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.masters else torch.float32

    @property
    def disk_bytes(self) -> int:
        """Return the bytes that the run needs on the drive."""
        return FILES_OF_STATE * self.state_bytes + DRIVE_FILES_BYTES + (64 << 20)


@dataclass
class DemoRecord:
    """The measurements. Lists have an entry for each step."""

    task: DemoTask
    losses: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)
    written_bytes: list[int] = field(default_factory=list)
    validation_loss: float = 0.0
    state_bytes: int = 0
    growth_bytes: int = 0
    torch_bytes: int = 0  # of it, torch's own memory at its first training step, for any model
    snapshot_bytes: int = 0
    snapshot_s: float = 0.0
    next_losses: list[float] = field(default_factory=list)
    plain_losses: list[float] = field(default_factory=list)
    plain_step_s: float = 0.0
    drive: DriveSpeed | None = None

    def steady(self, values: list[float]) -> float:
        """Return the median step, without the first two: they record the order and make the optimizer's state."""
        return median(values[2:] or values)

    @property
    def limit(self) -> StepLimit:
        if self.drive is None:
            raise StateError("the drive was not measured")
        read, written = self.steady([*self.read_bytes]), self.steady([*self.written_bytes])
        return StepLimit.of(self.drive, read, written, self.plain_step_s)

    @property
    def is_equal(self) -> bool:
        return bool(self.plain_losses) and self.next_losses == self.plain_losses


Watch = Callable[[str, DemoRecord], None]


def run_demo(task: DemoTask, directory: Path, snapshot: Path, watch: Watch) -> DemoRecord:
    """Run the demo in `directory`, which exists and is empty, and leave the snapshot at `snapshot`.

    `watch(stage, record)` is called at the start of each stage, "drive", "offload", "train", "snapshot", "compare", and
    after each step of "train".
    """
    record = DemoRecord(task)
    watch("drive", record)
    before = measure_drive(directory, duration_s=task.drive_s)
    with PeakMemory() as memory:
        _start_torch()
        record.torch_bytes = pss_bytes() - memory.baseline_bytes
        _train(task, directory, snapshot, watch, record)
    record.growth_bytes = memory.growth_bytes
    watch("compare", record)
    _compare(task, snapshot, record)
    record.drive = before.better(measure_drive(directory, duration_s=task.drive_s))
    return record


def _start_torch() -> None:
    """Take one step of a tiny model, so that torch's imports, allocations and threads are not measured."""
    config = GptConfig(vocabulary=256, context=8, layers=1, width=64)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    PlainTraining(make_gpt(config, torch.bfloat16), LEARNING_RATE, masters=True).step(tokens, tokens)


def _train(task: DemoTask, directory: Path, snapshot: Path, watch: Watch, record: DemoRecord) -> None:
    corpus = Corpus(task.config.vocabulary)
    watch("offload", record)
    run_directory = directory / "run"
    with swapper.SwapManager(run_directory, host_memory=task.budget_bytes) as manager:
        torch.manual_seed(task.seed)
        gpt = make_gpt(task.config, task.dtype)
        model, optimizer = manager.offload(
            gpt,
            make_optimizer(gpt.parameters(), LEARNING_RATE),
            params="nvme",
            optimizer_state="nvme",
            gradients="host",
            master_weights=torch.float32 if task.masters else None,
        )

        def step(number: int) -> float:
            loss: torch.Tensor = model(*corpus.batch(number, task.batch, task.config.context))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        for number in range(task.steps):
            read, written, began_s = (
                manager.counters.bytes_read,
                manager.counters.bytes_written,
                time.perf_counter(),
            )
            record.losses.append(step(number))
            record.times_s.append(time.perf_counter() - began_s)
            record.read_bytes.append(manager.counters.bytes_read - read)
            record.written_bytes.append(manager.counters.bytes_written - written)
            watch("train", record)
        record.state_bytes = manager.counters.state_bytes
        with torch.no_grad():
            held_out = corpus.batch(0, task.batch, task.config.context, validation=True)
            record.validation_loss = model(*held_out).item()
        watch("snapshot", record)
        began_s = time.perf_counter()
        manager.snapshot(snapshot).result()
        record.snapshot_s = time.perf_counter() - began_s
        record.snapshot_bytes = snapshot.stat().st_size
        record.next_losses = [step(task.steps + number) for number in range(COMPARED_STEPS)]


def _compare(task: DemoTask, snapshot: Path, record: DemoRecord) -> None:
    """Repeat the next steps from the snapshot: plain torch, in a process without swapper."""
    order = {
        "snapshot": str(snapshot.resolve()),
        "config": asdict(task.config),
        "dtype": str(task.dtype).removeprefix("torch."),
        "masters": task.masters,
        "learning_rate": LEARNING_RATE,
        "threads": torch.get_num_threads(),
        "first_batch": task.steps,
        "batch": task.batch,
        "steps": COMPARED_STEPS + TIMED_PLAIN_STEPS,
    }
    # -P or -I would remove the script's folder from the path; the script needs the other files in it.
    command = [sys.executable, str(RESUME_SCRIPT), json.dumps(order)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=snapshot.parent)
    if done.returncode != 0:
        raise CheckpointError(
            f"plain torch cannot continue from {snapshot} (exit code {done.returncode}):\n{done.stderr.strip()}"
        )
    answer = json.loads(done.stdout)
    record.plain_losses = answer["losses"][:COMPARED_STEPS]
    record.plain_step_s = min(answer["times_s"][COMPARED_STEPS:])  # the fastest counts, as a limit must

"""Checks that runs on the device survive kills, and too little device memory in their first steps, with the same losses.

python recovery.py DIRECTORY STEPS REHEARSES        # trains from the last commit to the end; a line of JSON for each step
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import swapper
from gpu import stand_in
from gpu.bench import Bench, Row
from gpu.training import device_of, roomy
from gpu.transformer import loss_of, transformer

KILLED = "killed again and again and resumed on the device, losses equal"
SHORT = "out of device memory in the first steps, device_memory lowered, losses equal"
STEPS, KILLS = 24, 4
MIB = 1 << 20


def make(bench: Bench) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = transformer(bench.size(8, 2), bench.size(1024, 32), torch.float32, "cpu")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(bench: Bench, number: int) -> torch.Tensor:
    shape = bench.size(4, 1), bench.size(256, 16), bench.size(1024, 32)
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(bench.device)


def take_step(bench: Bench, model: nn.Module, optimizer: Any, number: int) -> float:
    loss = loss_of(model, batch(bench, number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def options_of(bench: Bench) -> dict[str, Any]:
    return {"device": device_of(bench), "device_memory": bench.size(512 * MIB, 4 * MIB)}


def train(bench: Bench, directory: Path, steps: int) -> None:
    """Train to the end, from the last commit on."""
    with swapper.SwapManager(directory, roomy(bench), resume="auto") as manager:
        model, optimizer = manager.offload(*make(bench), params="nvme", optimizer_state="nvme", **options_of(bench))
        for number in range(manager.step, steps):
            print(json.dumps([number, take_step(bench, model, optimizer, number)]), flush=True)


def killed(bench: Bench) -> Iterator[Row]:
    """Kill a run at random moments; the last one ends."""
    steps = 6 if bench.is_rehearsal else STEPS
    chance, found = random.Random(0), dict[int, float]()
    with tempfile.TemporaryDirectory(dir=bench.directory) as place:
        whole = dict(run(bench, Path(place) / "whole", steps))
        for last in [*sorted(chance.randrange(1, steps) for _ in range(2 if bench.is_rehearsal else KILLS)), steps]:
            for number, loss in run(bench, Path(place) / "killed", steps, last, chance.random()):
                if found.setdefault(number, loss) != loss:
                    raise AssertionError(f"step {number}: {found[number]}, and after a kill {loss}")
    number = f"{'equal' if found == whole else f'{found}, without kills {whole}'} in {steps} steps"
    yield Row(KILLED, "equal", number, found == whole, is_equal=found == whole)


def run(
    bench: Bench, directory: Path, steps: int, kill_after: int | None = None, delay: float = 0.0
) -> Iterator[tuple[int, float]]:
    """Run this file in a process of its own, and yield steps and losses; kill it some part of a step after `kill_after`."""
    command = [sys.executable, __file__, str(directory), str(steps), str(int(bench.is_rehearsal))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout is not None
        last_s, step_s = time.monotonic(), 0.0
        for line in running.stdout:
            number, loss = json.loads(line)
            yield number, loss
            step_s, last_s = time.monotonic() - last_s, time.monotonic()
            if kill_after is not None and number + 1 == kill_after < steps:
                with suppress(subprocess.TimeoutExpired):
                    running.wait(step_s * delay)
                running.kill()  # what it has said before comes still
    if kill_after in (None, steps) and running.returncode:
        raise AssertionError(f"the run ended with {running.returncode}")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collect what swapper logs."""
    log, lines = logging.getLogger("swapper"), Lines()
    level = log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        yield lines.lines
    finally:
        log.removeHandler(lines)
        log.setLevel(level)


def short(bench: Bench) -> Iterator[Row]:
    """Leave so little memory next to swapper's that the second step's operations find none; the loop repeats the step."""
    steps = 4
    found: list[float] = []
    device = device_of(bench)
    with tempfile.TemporaryDirectory(dir=bench.directory) as place, log_lines() as lines:
        with swapper.SwapManager(Path(place) / "all", bench.size(4 << 30, 64 * MIB)) as manager:
            model, optimizer = manager.offload(*make(bench), device=device_of(bench))
            wanted = [take_step(bench, model, optimizer, number) for number in range(steps)]
        del model, optimizer
        with swapper.SwapManager(Path(place) / "short", bench.size(4 << 30, 64 * MIB)) as manager:
            model, optimizer = manager.offload(
                *make(bench), device=device, device_memory=bench.size(512 * MIB, 8 * MIB)
            )
            failing = Failing(bench, device)
            handle = model.register_forward_hook(lambda *_: failing.take())
            while len(found) < steps:
                try:
                    found.append(take_step(bench, model, optimizer, len(found)))
                except torch.OutOfMemoryError:
                    optimizer.zero_grad()
                    failing.release()
            handle.remove()
    said = [line for line in lines if "ran out of memory" in line]
    is_met = found == wanted and failing.count > 0 and len(said) > 0
    told = said[0] if said else "nothing was logged"
    yield Row(
        SHORT,
        "equal",
        f"{'equal' if found == wanted else f'{found}, {wanted}'}, {failing.count} failures ({told})",
        is_met,
        is_equal=is_met,
    )


class Failing:
    """Takes the device's free memory in the second forward, and asks for more. `count`: how often there was none."""

    def __init__(self, bench: Bench, device: Any) -> None:
        self._bench, self._device, self._forwards, self.count = bench, device, 0, 0

    def take(self) -> None:
        self._forwards += 1
        if self._forwards != 2:
            return
        self.count += 1
        if self._bench.on_cpu:
            self._device.module.failures += 1
            raise torch.OutOfMemoryError("as asked for")
        free, _ = torch.cuda.mem_get_info()
        torch.empty(2 * free + (1 << 30), dtype=torch.uint8, device=self._bench.device)

    def release(self) -> None:
        if not self._bench.on_cpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    stand_in.load()
    train(Bench(Path(sys.argv[1]).parent, bool(int(sys.argv[3]))), Path(sys.argv[1]), int(sys.argv[2]))

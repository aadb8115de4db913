"""What every measurement is given, and what it gives: rows of the one table.

A measurement is a function that takes a `Bench` and yields `Row`s, each as soon as it is known; what fails after that loses
nothing. It verifies its bytes outside of the time that it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

QUEUED = 8
ROOMY_BYTES = 22_000_000_000
LONG_S = 0.05
"""From here on the clock counts: what a host thread does beside the device's stream, as the engine, is in it too."""


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        figure: what was measured.
        bar: what it is held to, as text; "" where it is only reported.
        number: what came out, as text; "" where it could not be measured.
        met: whether the bar is; None without a bar or a number.
        reason: why there is no number.
        is_open: nothing went wrong: there is nothing to measure yet, or this machine has not what it takes.
    """

    figure: str
    bar: str = ""
    number: str = ""
    met: bool | None = None
    reason: str = ""
    is_open: bool = False

    @property
    def status(self) -> str:
        """What there is to say of it: "met", "NOT MET", "measured" (without a bar), "open", or "FAILED" (no number)."""
        if not self.number:
            return "open" if self.is_open else "FAILED"
        return "measured" if self.met is None else "met" if self.met else "NOT MET"


@dataclass(frozen=True)
class Bench:
    """Where and how large: a GPU, or in a rehearsal the CPU, with Triton's interpreter and sizes that mean nothing.

    Attributes:
        directory: on the drive that is measured; the measurement leaves nothing in it.
    """

    directory: Path
    is_rehearsal: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.is_rehearsal else "cuda")

    def size(self, real: int, rehearsed: int) -> int:
        """`real`, halved as often as a device of less than 24 GB makes necessary; or what is rehearsed with."""
        if self.is_rehearsal:
            return rehearsed
        room = torch.cuda.get_device_properties(0).total_memory
        while room < ROOMY_BYTES:
            real, room = max(real // 2, 1), room * 2
        return real

    def synchronize(self) -> None:
        if not self.is_rehearsal:
            torch.cuda.synchronize()

    def seconds(self, act: Callable[[], object], rounds: int = 10, warmup: int = 2) -> float:
        """The shortest of `rounds` times of what `act` does, on the device too."""
        return self.seconds_by_turns([act], rounds, warmup)[0]

    def queued_seconds(self, act: Callable[[], object], rounds: int = 5) -> float:
        """The same of what only queues kernels: several together, so that the device does not wait for Python to queue them."""

        def several() -> None:
            for _ in range(self.size(QUEUED, 1)):
                act()

        return self.seconds(several, rounds) / self.size(QUEUED, 1)

    def seconds_by_turns(self, acts: list[Callable[[], object]], rounds: int = 10, warmup: int = 2) -> list[float]:
        """The same for several that are compared with each other: a disturbance hits one as well as the other."""
        best = [float("inf")] * len(acts)
        for n in range(1 if self.is_rehearsal else warmup + rounds):
            for which, act in enumerate(acts):
                taken = self._once(act)
                if n >= warmup or self.is_rehearsal:
                    best[which] = min(best[which], taken)
        return best

    def _once(self, act: Callable[[], object]) -> float:
        self.synchronize()
        if self.is_rehearsal:
            begin = time.perf_counter()
            act()
            return time.perf_counter() - begin
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin = time.perf_counter()
        first.record()
        act()
        last.record()
        torch.cuda.synchronize()
        by_clock = time.perf_counter() - begin
        by_device: float = first.elapsed_time(last) / 1000
        return by_device if by_clock < LONG_S else by_clock


Measurement = Callable[[Bench], Iterator[Row]]


def ratio(figure: str, nbytes: int, seconds: float, limit: float, of: str, bar: float | None) -> Row:
    """A row of bytes a second as a part of a limit in bytes a second."""
    rate = nbytes / seconds
    found = rate / limit
    text = f"{found:.3f} ({rate / 1e9:.2f} of {limit / 1e9:.2f} GB/s)"
    return Row(figure, f"{bar} of {of}" if bar else "", text, found >= bar if bar else None)


def check_equal(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if not torch.equal(found.cpu(), wanted.cpu()):
        raise AssertionError(f"{what}: the bytes are not equal")

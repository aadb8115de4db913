"""Defines the input and output of every measurement: a bench, and rows of the one table.

A measurement is a function that takes a `Bench` and yields `Row`s, each as soon as it is known, so that a later failure
loses nothing. It verifies its bytes outside of the measured time.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

QUEUED = 8
ROOMY_BYTES = 22_000_000_000
LONG_S = 0.05
"""Seconds of a timing from which wall-clock time is used: it includes host threads, such as the engine's."""


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        figure: name of the figure.
        bar: the bar, as text; "" if it is only reported.
        number: the result, as text; "" if it could not be measured.
        met: whether the bar is met; None without a bar or a number.
        reason: the reason for a missing number.
        is_open: nothing failed: there is nothing to measure yet, this machine lacks something, or there was no time.
        is_equal: whether the values are those that they must equal; None if there are none.
    """

    figure: str
    bar: str = ""
    number: str = ""
    met: bool | None = None
    reason: str = ""
    is_open: bool = False
    is_equal: bool | None = None

    @property
    def status(self) -> str:
        """ "met", "NOT MET", "measured" (without a bar), "open", "NOT EQUAL", or "FAILED" (no number)."""
        if not self.number:
            return "open" if self.is_open else "FAILED"
        if self.is_equal is False:
            return "NOT EQUAL"
        return "measured" if self.met is None else "met" if self.met else "NOT MET"


@dataclass(frozen=True)
class Bench:
    """The device and sizes: a GPU, or in a rehearsal the CPU or tools/test_cuda's stand-in, with sizes that mean nothing.

    Attributes:
        directory: on the measured drive; the measurement leaves nothing in it.
    """

    directory: Path
    is_rehearsal: bool

    @property
    def on_cpu(self) -> bool:
        return self.is_rehearsal and not torch.cuda.is_available()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.on_cpu else "cuda")

    def size(self, real: int, rehearsed: int) -> int:
        """Return `real`, halved until it suits a device of less than 24 GB; or `rehearsed` in a rehearsal."""
        if self.is_rehearsal:
            return rehearsed
        room = torch.cuda.get_device_properties(0).total_memory
        while room < ROOMY_BYTES:
            real, room = max(real // 2, 1), room * 2
        return real

    def synchronize(self) -> None:
        if not self.on_cpu:
            torch.cuda.synchronize()

    def seconds(self, act: Callable[[], object], rounds: int = 10, warmup: int = 2) -> float:
        """Return the shortest of `rounds` times of `act`, on the device too."""
        return self.seconds_by_turns([act], rounds, warmup)[0]

    def queued_seconds(self, act: Callable[[], object], rounds: int = 5) -> float:
        """The same for code that only queues kernels: several at once, so that the device does not wait for Python."""

        def several() -> None:
            for _ in range(self.size(QUEUED, 1)):
                act()

        return self.seconds(several, rounds) / self.size(QUEUED, 1)

    def seconds_by_turns(self, acts: list[Callable[[], object]], rounds: int = 10, warmup: int = 2) -> list[float]:
        """The same for several alternating functions: a disturbance hits one as well as the other."""
        best = [float("inf")] * len(acts)
        for n in range(1 if self.is_rehearsal else warmup + rounds):
            for which, act in enumerate(acts):
                taken = self._once(act)
                if n >= warmup or self.is_rehearsal:
                    best[which] = min(best[which], taken)
        return best

    def _once(self, act: Callable[[], object]) -> float:
        self.synchronize()
        if self.on_cpu:
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


def is_of(given: str, figure: str) -> bool:
    """Return whether the row `given` is of `figure`; it may add something in brackets."""
    return given == figure or given.startswith(f"{figure} (")


def each(*attempts: tuple[Sequence[str], Callable[[], Iterable[Row]]]) -> Iterator[Row]:
    """Yield the rows of each attempt, given with the figures that it is to yield; one that fails loses its own rows only."""
    for figures, act in attempts:
        left = list(figures)
        try:
            for row in act():
                left = [figure for figure in left if not is_of(row.figure, figure)]
                yield row
        except Exception as error:
            traceback.print_exc()
            for figure in left:
                yield Row(figure, reason=f"{type(error).__name__}: {error}"[:300])


def ratio(figure: str, nbytes: int, seconds: float, limit: float, of: str, bar: float | None, told: str = "") -> Row:
    """Make a row of bytes a second relative to a limit in bytes a second. `told`: what it depends on."""
    rate = nbytes / seconds
    found = rate / limit
    text = f"{found:.3f} ({'; '.join(filter(None, (f'{rate / 1e9:.2f} of {limit / 1e9:.2f} GB/s', told)))})"
    return Row(figure, f"{bar} of {of}" if bar else "", text, found >= bar if bar else None)


def check_equal(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if not torch.equal(found.cpu(), wanted.cpu()):
        raise AssertionError(f"{what}: the bytes are not equal")

"""Statistics of a step by phase: where its time went and what it moved, to be held against what `manager.plan` predicted.

A step goes from the end of one `optimizer.step()` to the end of the next. Its phases: *forward* (from the first hook of a model's
forward to the last), *backward*, *step* (inside `optimizer.step()`), and *between*, everything else: the loop's own work, losses,
data. Counters (runtime/counters.py) are read when a phase ends, which costs a step microseconds. Transfers count in the phase
that submits them. Observers get the statistics of each step: the monitoring that a user asks for, and the warning of slow steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import add, attrgetter, sub

from swapper.runtime.counters import FAMILIES, Counters
from swapper.runtime.sizes import format_bytes

log = logging.getLogger("swapper")

PHASES = ("forward", "backward", "step", "between")

_TIMES = ("read_wait_s", "write_wait_s", "frame_wait_s", "update_s")
_COPIES = ("uploaded_bytes", "downloaded_bytes", "upload_s", "download_s")
_OF_STEP = ("pages_used", "pages_missed", "pages_awaited", *_COPIES)
"""Counters that are not divided into phases."""
_times_of, _counts_of = attrgetter(*_TIMES), attrgetter(*_OF_STEP)


@dataclass(frozen=True)
class PhaseStats:
    """One phase of a step, all the times that it was entered. Times in seconds; bytes by family ("param", "state", "grad").

    Attributes:
        wall_s: how long it took.
        read_wait_s, write_wait_s, frame_wait_s: of that, waiting: see `Counters`.
        update_s: of the rest, the optimizer's arithmetic.
        read_bytes, written_bytes: what was submitted in it.
    """

    wall_s: float = 0.0
    read_wait_s: float = 0.0
    write_wait_s: float = 0.0
    frame_wait_s: float = 0.0
    update_s: float = 0.0
    read_bytes: Mapping[str, int] = field(default_factory=dict)
    written_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def wait_s(self) -> float:
        """Time in which the drive was waited for, in any way."""
        return self.read_wait_s + self.write_wait_s + self.frame_wait_s

    @property
    def computing_s(self) -> float:
        return max(self.wall_s - self.wait_s, 0.0)

    @staticmethod
    def sum(parts: Iterable[PhaseStats]) -> PhaseStats:
        """Return what several phases make together."""
        phases = list(parts)
        times = {name: sum(getattr(phase, name) for phase in phases) for name in ("wall_s", *_TIMES)}
        read, written = (dict.fromkeys(FAMILIES, 0) for _ in range(2))
        for phase in phases:
            for family in FAMILIES:
                read[family] += phase.read_bytes.get(family, 0)
                written[family] += phase.written_bytes.get(family, 0)
        return PhaseStats(**times, read_bytes=read, written_bytes=written)

    def over(self, count: int) -> PhaseStats:
        """Return a part of it, 1/count."""
        return PhaseStats(
            **{name: getattr(self, name) / count for name in ("wall_s", *_TIMES)},
            read_bytes={family: nbytes // count for family, nbytes in self.read_bytes.items()},
            written_bytes={family: nbytes // count for family, nbytes in self.written_bytes.items()},
        )


@dataclass(frozen=True)
class StepStats:
    """One step as it came out. `print` it for a table, `brief` for a progress bar.

    Attributes:
        step: its number, from 1; 0: there was none yet, and this is what happened until now.
        phases: by name, in the order of PHASES.
        pages_used, pages_missed, pages_awaited: see `Counters`.
        drive_s: how long the drive needs for these bytes at least, by what `swapper tune` measured; None if it was not tuned.
        predicted: what `Plan.predict` said before, if it did.
        savings: of a predicted step, the seconds that a better machine would save, by what is better.
        uploaded_bytes, downloaded_bytes: copied to an accelerator, and from it.
        upload_s, download_s: that copies took which were found to be over in this step: see `Counters`.
    """

    step: int
    phases: Mapping[str, PhaseStats]
    pages_used: int = 0
    pages_missed: int = 0
    pages_awaited: int = 0
    drive_s: float | None = None
    predicted: StepStats | None = None
    savings: Mapping[str, float] = field(default_factory=dict)
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    upload_s: float = 0.0
    download_s: float = 0.0

    @staticmethod
    def mean(steps: Sequence[StepStats]) -> StepStats:
        """Return the mean of some steps; what is no time and no byte is the last one's."""
        phases = {name: PhaseStats.sum(step.phases[name] for step in steps) for name in steps[-1].phases}
        limits = [step.drive_s for step in steps if step.drive_s is not None]
        sums = {name: sum(getattr(step, name) for step in steps) for name in _COPIES}
        return replace(
            steps[-1],
            phases={name: phase.over(len(steps)) for name, phase in phases.items()},
            drive_s=sum(limits) / len(limits) if limits else None,
            **{
                name: whole / len(steps) if name.endswith("_s") else whole // len(steps) for name, whole in sums.items()
            },
        )

    @property
    def total(self) -> PhaseStats:
        """Return the sum of all phases of the step."""
        return PhaseStats.sum(self.phases.values())

    @property
    def wall_s(self) -> float:
        return sum(phase.wall_s for phase in self.phases.values())

    @property
    def read_bytes(self) -> int:
        return sum(self.total.read_bytes.values())

    @property
    def written_bytes(self) -> int:
        return sum(self.total.written_bytes.values())

    @property
    def prefetch_hit_rate(self) -> float:
        """Which part of the pages that were used had been asked for before, from 0 to 1; 1 if none were used."""
        return 1 - self.pages_missed / self.pages_used if self.pages_used else 1.0

    @property
    def in_time_rate(self) -> float:
        """Which part of the pages that were used did not have to be waited for, from 0 to 1; 1 if none were used."""
        return 1 - self.pages_awaited / self.pages_used if self.pages_used else 1.0

    @property
    def limit_s(self) -> float | None:
        """The shortest that the step can be: the drive's time or the computing, the longer one; None if the drive is not known."""
        return None if self.drive_s is None else max(self.drive_s, self.total.computing_s)

    @property
    def limit_ratio(self) -> float | None:
        """The step's time as a multiple of `limit_s`; None if the drive is not known."""
        limit_s = self.limit_s
        return None if limit_s is None else self.wall_s / max(limit_s, 1e-9)

    @property
    def bound(self) -> str:
        """What most of the step's time goes to, in words: computing, or waiting for reads or for writes."""
        total = self.total
        parts = {
            "computing": total.computing_s,
            "the drive's reads": total.read_wait_s,
            "the drive's writes": total.write_wait_s + total.frame_wait_s,
        }
        cause = max(parts, key=lambda part: parts[part])
        return f"{cause}: {parts[cause]:.2f} of {self.wall_s:.2f} s"

    @property
    def help(self) -> str | None:
        """What would help a predicted step most, in words; None if that is not known."""
        if not self.savings:
            return None
        best = max(self.savings, key=lambda what: self.savings[what])
        others = ", ".join(f"{what} {saved:.2f} s" for what, saved in self.savings.items() if what != best)
        return f"{best} would save {self.savings[best]:.2f} s of a step ({others})"

    @property
    def brief(self) -> str:
        """One line, for a progress bar."""
        moved = f"{format_bytes(self.read_bytes)} read, {format_bytes(self.written_bytes)} written"
        if not self.step:
            return f"no step yet, {moved}"
        limit = "" if self.limit_ratio is None else f" ({self.limit_ratio:.2f} of the limit)"
        return f"{self.wall_s:.2f} s{limit}, {self.total.wait_s:.2f} s waiting, {moved}"

    def as_dict(self) -> dict[str, int | float | None]:
        """Return all numbers by flat names that end in their unit (_s, _bytes, _ratio; else counts); None: not known.

        "forward_wall_s" is of the phase "forward", "wall_s" of the whole step. The names stay; versions may add some.
        """
        total = self.total
        found: dict[str, int | float | None] = {
            "step": self.step, "drive_s": self.drive_s, "limit_s": self.limit_s, "limit_ratio": self.limit_ratio,
            "pages_used": self.pages_used, "pages_missed": self.pages_missed, "pages_awaited": self.pages_awaited,
            "prefetch_hit_ratio": self.prefetch_hit_rate, "in_time_ratio": self.in_time_rate,
            **{name: getattr(self, name) for name in _COPIES},
        }  # fmt: skip
        for prefix, phase in (("", total), *((f"{name}_", phase) for name, phase in self.phases.items())):
            times = {"computing_s": phase.computing_s, **{name: getattr(phase, name) for name in ("wall_s", *_TIMES)}}
            moved = {"read_bytes": sum(phase.read_bytes.values()), "written_bytes": sum(phase.written_bytes.values())}
            found |= {f"{prefix}{name}": value for name, value in (times | moved).items()}
        for verb, nbytes in (("read", total.read_bytes), ("written", total.written_bytes)):
            found |= {f"{family}_{verb}_bytes": nbytes.get(family, 0) for family in FAMILIES}
        predicted = {} if self.predicted is None else self.predicted.phases
        found["predicted_wall_s"] = None if self.predicted is None else self.predicted.wall_s
        found |= {f"predicted_{n}_wall_s": predicted[n].wall_s if n in predicted else None for n in self.phases}
        return found

    def rows(self) -> list[tuple[str, ...]]:
        """The table, headings first: a row for each phase and one for all of them."""
        heading = ("phase", "time", "computing", "for reads", "for writes", "for frames", "read", "written")
        rows: list[tuple[str, ...]] = [heading]
        predicted = {} if self.predicted is None else self.predicted.phases
        for name, phase in self.phases.items():
            rows.append((name, *_cells(phase)))
            rows += [("  predicted", *_cells(predicted[name]))] if name in predicted else []
        rows.append(("until now" if self.step == 0 else f"step {self.step}", *_cells(self.total)))
        return rows + ([] if self.predicted is None else [("  predicted", *_cells(self.predicted.total))])

    def notes(self) -> list[str]:
        """What belongs below the table: bytes by kind, prefetch, the drive."""
        total = self.total
        lines = [] if self.step else ["no step was taken since this run was opened: this is what happened until now"]
        lines += [f"read: {by_family(total.read_bytes)}", f"written: {by_family(total.written_bytes)}"]
        lines.append(f"update: {total.update_s:.3f} s of the computing is the optimizer's arithmetic")
        if self.pages_used:
            lines.append(
                f"prefetch: {self.prefetch_hit_rate:.1%} of {self.pages_used} pages asked for ahead, "
                f"{self.in_time_rate:.1%} there in time"
            )
        if self.drive_s is None:
            lines.append("drive: its speed is not known: `swapper tune DIR` measures it")
        else:
            ratio = self.limit_ratio or 0.0
            lines.append(
                f"drive: {self.drive_s:.3f} s for these bytes at least; the step took {ratio:.3f} of the limit"
            )
        if self.uploaded_bytes or self.downloaded_bytes:
            up, down = format_bytes(self.uploaded_bytes), format_bytes(self.downloaded_bytes)
            lines.append(
                f"accelerator: {up} to it in {self.upload_s:.3f} s of copying, {down} from it in {self.download_s:.3f} s"
            )
        lines.append(f"bound by {self.bound}")
        if (advice := (self.predicted or self).help) is not None:
            lines.append(f"predicted: {advice}")
        return lines

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            )
            for row in rows
        ]
        return "\n".join([*lines, *self.notes()])


def by_family(nbytes: Mapping[str, int]) -> str:
    """Say how many bytes of what: "2.0 GB (parameters 336 MB, optimizer state 1.7 GB)"."""
    if not any(nbytes.values()):
        return "nothing"
    parts = ", ".join(f"{FAMILIES[family]} {format_bytes(count)}" for family, count in nbytes.items() if count)
    return f"{format_bytes(sum(nbytes.values()))} ({parts})"


def _cells(phase: PhaseStats) -> tuple[str, ...]:
    times = (phase.wall_s, phase.computing_s, phase.read_wait_s, phase.write_wait_s, phase.frame_wait_s)
    moved = (phase.read_bytes, phase.written_bytes)
    return (*(f"{value:.3f} s" for value in times), *(format_bytes(sum(nbytes.values())) for nbytes in moved))


class StepClock:
    """Divides the run's time into steps and phases, and what `counters` count in it. `clock` gives monotonic seconds.

    Attributes:
        last: the last step; None: there was none.
        observers: called after each step with its statistics. See `Observers`.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = counters
        self._clock = clock
        self.observers = Observers()
        self.last: StepStats | None = None
        self.start(None)

    def start(self, drive_seconds: Callable[[int, int], float] | None, predicted: StepStats | None = None) -> None:
        """Begin the run, in the phase "between".

        Args:
            drive_seconds: the least time, in seconds, in which the drive reads and writes that many bytes; None: not known.
            predicted: a step, to be shown with those that come.
        """
        self._drive_seconds, self._predicted = drive_seconds, predicted
        self._phase, self._before = "between", self._tally()
        self._begin_step()

    def _begin_step(self) -> None:
        self._number = self.counters.step + 1
        self._spent = dict.fromkeys(PHASES, [0.0] * len(self._before))
        self._counts = _counts_of(self.counters)

    def enter(self, phase: str) -> None:
        """End the present phase and begin `phase`."""
        now, before = self._tally(), self._before
        self._spent[self._phase] = list(map(add, self._spent[self._phase], map(sub, now, before)))
        if self.counters.trace is not None:
            self.counters.trace.add("phases", self._phase, before[0], now[0], step=self._number)
        self._phase, self._before = phase, now

    def enter_again(self) -> None:
        """Count what the present phase has done so far."""
        self.enter(self._phase)

    def describe(self) -> str:
        """Return the present phase, and how long it has taken, for people."""
        return f"{self._phase} for {self._clock() - self._before[0]:.1f} s"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context with that phase; "between" follows it."""
        self.enter(name)
        try:
            yield
        finally:
            self.enter("between")

    @contextmanager
    def leave_out(self) -> Iterator[None]:
        """Return a context whose time and bytes belong to no step."""
        self.enter_again()
        try:
            yield
        finally:
            self._before = self._tally()

    def end_step(self) -> None:
        """End the step: `last` has its statistics."""
        self.enter_again()
        self.last = self._stats(self.counters.step)
        self._begin_step()
        self.observers.tell(self.last)

    def stats(self) -> StepStats:
        """Return the last step; before there was one, what happened until now."""
        if self.last is not None:
            return self.last
        self.enter_again()
        return self._stats(0)

    def _tally(self) -> list[float]:
        """Return the time now, and the counters in the order of PhaseStats' fields."""
        counters = self.counters
        moved = *counters.read_bytes.values(), *counters.written_bytes.values()
        return [self._clock(), *_times_of(counters), *moved]

    def _stats(self, step: int) -> StepStats:
        phases = dict(zip(self._spent, map(_phase_stats, self._spent.values()), strict=True))
        drive_s = None
        if self._drive_seconds is not None:
            total = _phase_stats(list(map(sum, zip(*self._spent.values(), strict=True))))
            drive_s = self._drive_seconds(sum(total.read_bytes.values()), sum(total.written_bytes.values()))
        counts = dict(zip(_OF_STEP, map(sub, _counts_of(self.counters), self._counts), strict=True))
        return StepStats(step, phases, drive_s=drive_s, predicted=self._predicted, **counts)


def _phase_stats(spent: list[float]) -> PhaseStats:
    """Return the statistics of a phase from differences of `StepClock._tally`."""
    moved = list(map(int, spent[1 + len(_TIMES) :]))
    times = dict(zip(("wall_s", *_TIMES), spent, strict=False))
    read = dict(zip(FAMILIES, moved, strict=False))
    written = dict(zip(FAMILIES, moved[len(FAMILIES) :], strict=True))
    return PhaseStats(**times, read_bytes=read, written_bytes=written)


# --- observers -----------------------------------------------------------------------------------------------------------

FAR = 1.5
"""A step that takes this multiple of its limit is far from it: runs that we measured take 1.0 to 1.2 of it."""
IN_A_ROW = 3
"""Steps that must be far from the limit before the warning: one may have waited for a snapshot, or another program."""
WARM_UP = 3
"""Steps that do not count: the first use of everything, and a pool that fills."""


Observer = Callable[[StepStats], object]


class Observers:
    """Owns the functions. One that fails does not fail the step: the log says so once, and it is called again."""

    def __init__(self) -> None:
        self._functions: list[Observer] = []
        self._warned: list[Observer] = []

    def add(self, function: Observer) -> None:
        self._functions.append(function)

    def remove(self, function: Observer) -> None:
        if function in self._functions:
            self._functions.remove(function)

    def tell(self, stats: StepStats) -> None:
        """Call each observer with the statistics of a step. One that raises is logged once, and stays."""
        for function in list(self._functions):
            try:
                function(stats)
            except Exception as error:
                if function not in self._warned:
                    self._warned.append(function)
                    text = repr(error)  # not the error: a handler may keep it, and its traceback everything
                    log.warning("monitoring of step %d failed, and is tried after each step: %s", stats.step, text)


class LimitWatch:
    """Warns once, when IN_A_ROW steps have been far from their limit. An observer."""

    def __init__(self) -> None:
        self._seen = self._far = 0
        self._has_warned = False

    def __call__(self, stats: StepStats) -> None:
        self._seen += 1
        if self._has_warned or self._seen <= WARM_UP or stats.limit_ratio is None:
            return
        self._far = self._far + 1 if stats.limit_ratio > FAR else 0
        if self._far == IN_A_ROW:
            self._has_warned = True
            log.warning(
                "step %d took %.2f s, %.1f times its limit of %.2f s (the longer one of computing and the drive's time for its "
                "bytes): %s. print(manager.stats()) has the rest, and `swapper trace` shows where it waits",
                stats.step, stats.wall_s, stats.limit_ratio, stats.limit_s, cause_of(stats),
            )  # fmt: skip


def cause_of(stats: StepStats) -> str:
    """Say what a step waits for most, and what helps."""
    waits = {name: getattr(stats.total, f"{name}_wait_s") for name in ("read", "write", "frame")}
    kind = max(waits, key=lambda name: waits[name])
    phase = max(stats.phases, key=lambda name: getattr(stats.phases[name], f"{kind}_wait_s"))
    remedy = {
        "read": "pages arrive late: a larger host_memory= reads further ahead, and another program on the drive slows it",
        "write": "changed pages are not written in time: update='deferred' spreads writes over the forward",
        "frame": "the pool is full of pages in use or being written: a larger host_memory= has more frames",
    }
    return f"it waits {waits[kind]:.2f} s for {kind}s, most of it in {phase}; {remedy[kind]}"

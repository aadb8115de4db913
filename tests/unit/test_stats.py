"""A step's time and bytes are divided into phases, and nothing is lost or counted twice."""

from __future__ import annotations

from swapper.io.drives import Tuning
from swapper.runtime.counters import Counters
from swapper.runtime.stats import PHASES, StepClock, StepStats


class Time:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def one_step() -> tuple[StepClock, Counters, Time]:
    """A step of 1 s between, 2 s forward, 3 s backward (of which 1 s waiting), 4 s step."""
    counters, passing = Counters(), Time()
    clock = StepClock(counters, passing)
    clock.start(None)
    passing.now_s = 1.0
    clock.enter("forward")
    counters.read_bytes["param"] += 10
    passing.now_s = 3.0
    clock.enter("backward")
    counters.read_wait_s += 1.0
    counters.read_bytes["param"] += 5
    passing.now_s = 6.0
    with clock.phase("step"):
        counters.written_bytes["state"] += 7
        counters.update_s += 2.0
        counters.pages_used, counters.pages_missed, counters.pages_awaited = 10, 1, 4
        passing.now_s = 10.0
    counters.step = 1
    clock.end_step()
    return clock, counters, passing


def test_every_second_and_byte_is_in_one_phase():
    stats = one_step()[0].stats()
    assert [phase.wall_s for phase in stats.phases.values()] == [2.0, 3.0, 4.0, 1.0]
    assert tuple(stats.phases) == PHASES
    assert stats.wall_s == stats.total.wall_s == 10.0
    assert stats.phases["backward"].computing_s == 2.0
    assert stats.phases["forward"].read_bytes == {"param": 10, "state": 0, "grad": 0}
    assert (stats.read_bytes, stats.written_bytes) == (15, 7)
    assert stats.phases["step"].update_s == 2.0
    assert (stats.prefetch_hit_rate, stats.in_time_rate) == (0.9, 0.6)


def test_the_next_step_begins_with_nothing():
    clock, counters, passing = one_step()
    passing.now_s = 12.0
    with clock.phase("forward"):
        counters.written_bytes["grad"] += 3
        passing.now_s = 13.0
    counters.step = 2
    clock.end_step()
    stats = clock.stats()
    assert (stats.step, stats.wall_s, stats.read_bytes, stats.written_bytes) == (2, 3.0, 0, 3)
    assert stats.prefetch_hit_rate == stats.in_time_rate == 1.0


def test_before_the_first_step_is_over_there_is_what_happened_until_now():
    counters, passing = Counters(), Time()
    clock = StepClock(counters, passing)
    clock.start(None)
    passing.now_s = 2.0
    clock.enter("forward")
    passing.now_s = 5.0
    assert clock.stats().phases["forward"].wall_s == 3.0
    passing.now_s = 6.0
    stats = clock.stats()
    assert (stats.phases["forward"].wall_s, stats.step) == (4.0, 0)
    assert "no step was taken" in str(stats) and stats.brief.startswith("no step yet")
    clock.counters.step = 1
    clock.end_step()
    assert "no step" not in str(clock.stats()) + clock.stats().brief


def test_a_failed_step_is_part_of_the_next_one():
    clock, counters, passing = one_step()
    try:
        with clock.phase("step"):
            passing.now_s = 11.0
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        passing.now_s = 13.0
    counters.step = 2
    clock.end_step()
    assert (clock.stats().phases["step"].wall_s, clock.stats().phases["between"].wall_s) == (1.0, 2.0)


def test_the_limit_is_the_drive_or_the_computing():
    counters, passing = Counters(), Time()
    clock = StepClock(counters, passing)
    clock.start(Tuning(1 << 20, 32, "uring", read_bytes_per_s=100.0, write_bytes_per_s=50.0).seconds_for)
    counters.read_bytes["state"], counters.written_bytes["state"] = 300, 300
    passing.now_s = 4.0
    clock.end_step()
    assert (clock.stats().drive_s, clock.stats().limit_s) == (6.0, 6.0)
    passing.now_s = 12.0
    clock.end_step()
    assert (clock.stats().drive_s, clock.stats().limit_s) == (0.0, 8.0)


def test_the_table_has_a_row_for_each_phase_and_says_what_moved():
    stats = one_step()[0].stats()
    lines = str(stats).splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["phase", *PHASES, "step"]
    assert lines[5].split()[:4] == ["step", "1", "10.000", "s"]
    assert "parameters 15 B" in str(stats) and "optimizer state 7 B" in str(stats)
    assert "90.0% of 10 pages asked for ahead, 60.0% there in time" in str(stats)
    assert "swapper tune" in str(stats)
    assert "\n" not in stats.brief and "10.00 s" in stats.brief


def test_copies_of_an_accelerator_are_said_where_there_were_any():
    counters = Counters()
    clock = StepClock(counters, Time())
    clock.start(None)
    counters.uploaded_bytes, counters.upload_s, counters.downloaded_bytes, counters.download_s = (
        2 << 20,
        0.5,
        1 << 20,
        0.25,
    )
    clock.end_step()
    copied = clock.stats()
    assert "2.0 MiB to it in 0.500 s of copying, 1.0 MiB from it in 0.250 s" in str(copied)
    clock.end_step()
    assert "accelerator" not in str(clock.stats())
    mean = StepStats.mean([copied, clock.stats()])
    assert (mean.uploaded_bytes, mean.upload_s, mean.downloaded_bytes, mean.download_s) == (
        1 << 20,
        0.25,
        1 << 19,
        0.125,
    )


def test_waiting_is_seen_while_it_lasts_and_counted_after():
    counters = Counters()
    with counters.waiting("frame", "page 7"):
        (wait,) = counters.waits.values()
        assert (wait.kind, wait.what) == ("frame", "page 7")
    assert counters.waits == {}
    assert counters.frame_wait_s > 0 and counters.read_wait_s == 0
    assert counters.snapshot()["frame_wait_s"] == counters.frame_wait_s

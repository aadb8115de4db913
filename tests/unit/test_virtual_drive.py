"""The virtual drive: bytes take the time that the rates say, in both directions at once, behind what they wait for."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swapper.errors import InvariantError
from swapper.paging.dry_run import DryRun, Task
from swapper.paging.layout import TensorSpec, plan_group
from swapper.paging.schedule import Access
from swapper.paging.virtual_drive import DriveRates, PagingCosts, VirtualDrive
from swapper.runtime.stats import PhaseStats, StepStats
from swapper.train.layout.inventory import make_sections


def test_reads_and_writes_share_what_the_drive_does_at_once() -> None:
    drive = VirtualDrive(DriveRates(read=100, write=50, both=75))
    read, write = drive.read(100, None), drive.write(100)
    drive.wait(read)  # at half of its rate while both go on
    assert drive.now_s == pytest.approx(2.0)
    drive.wait(write)  # half is left, now at its own rate
    assert drive.now_s == pytest.approx(3.0)


def test_computing_hides_transfers() -> None:
    drive = VirtualDrive(DriveRates(read=100, write=100, both=200))
    read = drive.read(100, None)
    drive.compute(0.75)
    assert not read.done and drive.now_s == 0.75
    drive.wait(read)
    assert drive.now_s == pytest.approx(1.0)
    drive.compute(5)
    assert drive.now_s == pytest.approx(6.0)


def test_a_read_behind_a_write_does_not_hold_up_others() -> None:
    drive = VirtualDrive(DriveRates(read=100, write=10, both=110))
    write = drive.write(10)
    behind, other = drive.read(100, write), drive.read(50, None)
    drive.wait(other)
    assert drive.now_s == pytest.approx(0.5) and not behind.done
    drive.wait(behind)
    assert drive.now_s == pytest.approx(2.0)


def test_a_drive_without_rates_takes_no_time() -> None:
    drive = VirtualDrive()
    assert drive.read(1 << 30, None).done and drive.write(1 << 30).done and drive.now_s == 0.0


def test_what_can_never_begin_is_noticed() -> None:
    drive = VirtualDrive(DriveRates(1, 1, 2))
    stuck = drive.read(1, None)
    stuck.after = stuck
    with pytest.raises(InvariantError, match="never begin"):
        drive.wait(stuck)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 10**9), st.floats(0, 3)), min_size=1, max_size=20))
def test_no_transfer_is_faster_than_its_bytes_allow_and_none_waits_for_nothing(
    work: list[tuple[bool, int, float]],
) -> None:
    rates = DriveRates(read=3e8, write=2e8, both=4e8)
    drive = VirtualDrive(rates)
    transfers = []
    for reads, nbytes, seconds in work:
        transfers.append(drive.read(nbytes, None) if reads else drive.write(nbytes))
        drive.compute(seconds)
    computed_s = drive.now_s
    for transfer in transfers:
        drive.wait(transfer)
    read = sum(nbytes for reads, nbytes, _ in work if reads)
    written = sum(nbytes for reads, nbytes, _ in work if not reads)
    min_s = max(read / rates.read, written / rates.write, (read + written) / rates.both, computed_s)
    max_s = computed_s + read / rates.read + written / rates.write
    assert min_s * (1 - 1e-6) <= drive.now_s <= max_s * (1 + 1e-6)


@pytest.mark.parametrize("takes_turns", [True, False])
def test_accesses_and_pages_lengthen_the_computing_and_the_engine_s_work_only_what_it_meets(takes_turns: bool) -> None:
    costs = PagingCosts(
        0.1, page_s=0.05, mapped_byte_s=1.5e-10, transfer_s=0.3, checked_byte_s=1e-10, takes_turns=takes_turns
    )
    drive = VirtualDrive(DriveRates(10e9, 10e9, 20e9), costs)
    drive.wait(drive.read(10 * 10**9, None))  # checked while nobody computes, and submits the next read later
    assert drive.now_s == pytest.approx(2.0)
    drive.lease()
    drive.map(10**9)
    drive.write(10 * 10**9)
    drive.compute(2.0)
    assert drive.now_s == pytest.approx(2.0 + 2.0 + 0.1 + 0.2 + 1.3 * takes_turns)
    drive.compute(1.0)
    assert drive.now_s == pytest.approx(5.3 + 1.3 * takes_turns)


def test_a_cap_lets_the_bytes_of_a_slice_pass_at_once_and_no_more_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    capped = importlib.import_module("capped_drive")
    drive = capped.CappedRates(read=10e9, write=10e9, both=20e9, cap=100e6).open(PagingCosts())
    assert drive.rates.seconds_for(200 * 10**6, 0) == 2.0
    first = drive.read(10 * 10**6, None)  # 0.1 s of the cap
    drive.wait(first)
    assert drive.now_s == pytest.approx(0.001)
    drive.wait(drive.write(5 * 10**6))  # the other direction has its own
    assert drive.now_s == pytest.approx(0.0015)
    drive.wait(drive.read(100 * 10**6, None))
    assert drive.now_s == pytest.approx(1.001)  # ten slices later
    drive.compute(0.5)
    began_s = drive.now_s
    drive.wait(drive.read(10 * 10**6, None))
    assert drive.now_s == pytest.approx(began_s + 0.001)  # after a rest a new slice begins
    drive.wait(drive.read(1000 * 10**6, None))
    assert drive.now_s - began_s == pytest.approx(10.0, abs=0.11)


def test_while_the_processors_compute_a_drive_is_as_fast_as_they_let_it_be() -> None:
    drive = VirtualDrive(DriveRates(read=300, write=200, both=400, busy=100))
    read, write = drive.read(300, None), drive.write(200)
    drive.compute(4.0)  # 60 a second of the reads, 40 of the writes
    assert (read.left, write.left) == (pytest.approx(60), pytest.approx(40))
    drive.wait(read)
    assert drive.now_s == pytest.approx(4.25)  # 240 a second of 400
    alone = VirtualDrive(DriveRates(read=300, write=200, both=400, busy=1000))
    other = alone.read(300, None)
    alone.compute(1.0)
    assert other.done and alone.rates.faster(2).busy == 1000
    slower = VirtualDrive(DriveRates(read=300, write=200, both=400, busy=100))
    one = slower.read(300, None)  # as much slower as both together
    slower.compute(1.0)
    assert one.left == pytest.approx(225)


def test_each_byte_that_moves_makes_the_computing_longer() -> None:
    drive = VirtualDrive(DriveRates(read=100, write=100, both=200, slowing_byte_s=0.005))
    read = drive.read(100, None)
    drive.compute(1.0)  # half of each second is left for the computing, as long as bytes move
    assert read.done and drive.now_s == pytest.approx(1.5)
    drive.wait(drive.write(100))  # slows nobody
    drive.compute(1.0)
    assert drive.now_s == pytest.approx(3.5)


def test_the_mean_of_steps_is_of_each_phase() -> None:
    def step(wall_s: float, nbytes: int) -> StepStats:
        return StepStats(1, {"forward": PhaseStats(wall_s, read_bytes={"param": nbytes}), "step": PhaseStats(1.0)})

    mean = StepStats.mean([step(1.0, 100), step(3.0, 200)])
    assert mean.wall_s == 3.0 and mean.phases["forward"].wall_s == 2.0 and mean.read_bytes == 150


@pytest.mark.whole
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_simulated_step_updates_when_the_committed_one_is_written(is_committed: bool) -> None:
    plans = plan_group(0, "state", [TensorSpec("weight", "exp_avg", torch.float32, (1 << 16,))])
    sections = make_sections(plans, [0] * len(plans), lambda plan: False, 1 << 16)
    pages = tuple(page.index for section in sections for page in section.pages)
    update = Task("step", 0, [Access(("slice", 0, 0), pages, writes=frozenset(pages))], updated=1 << 16)
    drive = VirtualDrive(DriveRates(1e9, 1e3, 1e9))
    left: list[int] = []

    def seconds(task: Task) -> float:
        left.append(len(drive._writes))
        return 0.0

    dry = DryRun(sections, 2 * len(pages), [update], None, False, 0, {}, drive, seconds, is_committed)
    for _ in range(3):
        dry.step()
    assert len(pages) > 1 and left[0] == 0
    assert (left[1:] == [0, 0]) is is_committed


def test_parts_of_a_matrix_are_read_while_those_before_them_are_multiplied() -> None:
    """Of four parts of a second each, two are read or in use at once."""
    drive = VirtualDrive(DriveRates(read=100, write=100, both=200))
    product = Task("forward", 0, [], parts=[100] * 4)
    dry = DryRun([], 0, [product, Task("forward", 1, [])], None, True, 0, {}, drive, lambda task: 2.0, parts_ahead=2)
    dry.step()
    first = dry.clock.stats()
    assert first.wall_s == pytest.approx(6.5) and first.phases["forward"].read_wait_s == pytest.approx(2.5)
    dry.step()
    again = dry.clock.stats()  # two parts came while the other task computed
    assert again.wall_s == pytest.approx(5.0) and again.phases["forward"].read_wait_s == pytest.approx(1.0)


def test_a_simulated_step_counts_each_access_and_each_page_that_it_maps() -> None:
    plans = plan_group(0, "param", [TensorSpec("weight", "param", torch.float32, (1 << 16,))])
    sections = make_sections(plans, [0] * len(plans), lambda plan: False, 1 << 16)
    pages = tuple(page.index for section in sections for page in section.pages)
    task = Task("forward", 0, [Access(("param", 0), pages), Access(("param", 0), pages)])
    drive = VirtualDrive(DriveRates(1e15, 1e15, 2e15), PagingCosts(0.5, page_s=0.125))
    dry = DryRun(sections, len(pages), [task], None, False, 0, {}, drive, lambda task: 2.0)
    for mapped in (len(pages), 0):  # then they stay
        dry.step()
        assert dry.clock.stats().wall_s == pytest.approx(2.0 + 2 * 0.5 + mapped * 0.125)

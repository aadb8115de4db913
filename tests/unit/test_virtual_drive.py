"""The virtual drive: bytes take the time that the rates say, in both directions at once, behind what they wait for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapper.errors import InvariantError
from swapper.paging.virtual_drive import DriveRates, VirtualDrive


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
    least_s = max(read / rates.read, written / rates.write, (read + written) / rates.both, computed_s)
    most_s = computed_s + read / rates.read + written / rates.write
    assert least_s * (1 - 1e-6) <= drive.now_s <= most_s * (1 + 1e-6)


def test_a_drive_that_would_take_all_processors_leaves_half_of_them() -> None:
    """Of the rates that a drive twice as fast as an uncapped one has."""
    drive = VirtualDrive(DriveRates(20e9, 20e9, 40e9, cpu_s_a_byte=1e-10))
    for _ in range(4):
        drive.read(10 * 10**9, None)
        drive.write(10 * 10**9)
    drive.compute(1.0)
    assert drive.now_s == pytest.approx(2.0)  # four transfers of half a second each way meanwhile
    drive.compute(1.0)
    assert drive.now_s == pytest.approx(3.0)

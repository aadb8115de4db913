"""A pool hands out the frames that have memory, and says when it waits for more."""

from __future__ import annotations

import pytest

from swapper.errors import InvariantError, IoError
from swapper.paging.host_memory import Pool
from swapper.paging.section import NO_FRAME, Frame

FRAME = 4096


class Arena:
    def __init__(self, populated_bytes: int) -> None:
        self.populated_bytes = populated_bytes
        self.waited: list[int] = []

    def wait_populated(self, nbytes: int) -> None:
        self.waited.append(nbytes)
        if nbytes > 3 * FRAME:
            raise IoError("populate memory", "arena", 0, nbytes, 12)
        self.populated_bytes = nbytes


def test_frames_are_handed_out_in_the_order_of_memory() -> None:
    pool = Pool(0, 0, FRAME, 3)
    frames = [pool.take() for _ in range(3)]
    assert [frame.number for frame in frames] == [0, 1, 2]
    with pytest.raises(InvariantError, match="no frame"):
        pool.take()
    pool.give(frames[1])
    assert pool.take() == frames[1]
    pool.give(frames[0])
    with pytest.raises(InvariantError, match="twice"):
        pool.give(frames[0])
    with pytest.raises(InvariantError, match="without a frame"):
        pool.give(NO_FRAME)


def test_frames_without_memory_are_waited_for() -> None:
    arena = Arena(FRAME + 100)
    pool = Pool(0, 100, FRAME, 4, growth=arena)
    assert pool.take() == Frame(0, 100, 100)
    assert not pool.has_free()
    assert pool.is_growing
    assert pool.free_count == 3
    pool.wait_for_growth()
    assert arena.waited == [2 * FRAME + 100]
    assert pool.has_free()
    assert pool.take() == Frame(1, 100 + FRAME, 100 + FRAME)
    with pytest.raises(IoError):
        pool.wait_for_growth()
    arena.populated_bytes = 100 + 4 * FRAME
    assert sorted(pool.take().number for _ in range(2)) == [2, 3]
    assert not pool.has_free()
    assert not pool.is_growing

"""Extents: nobody gets bytes that another one has, and what is given back is used again."""

from __future__ import annotations

import itertools
import random

import pytest

from swapper.errors import InvariantError
from swapper.io.extents import Extents


@pytest.mark.whole
@pytest.mark.parametrize("seed", range(20))
def test_no_two_overlap_and_nothing_is_lost(seed: int) -> None:
    chance, extents, held = random.Random(seed), Extents(), {}
    for _ in range(300):
        if held and chance.random() < 0.5:
            offset = chance.choice(list(held))
            extents.give(offset, held.pop(offset))
        else:
            nbytes = chance.randint(1, 40000)
            held[extents.take(nbytes)] = nbytes
        ends = sorted((offset, offset + -(-nbytes // 4096) * 4096) for offset, nbytes in held.items())
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
        assert extents.used_bytes == sum(end - offset for offset, end in ends)
        assert extents.end == (ends[-1][1] if ends else 0)


def test_giving_back_twice_is_noticed() -> None:
    extents = Extents()
    first, _ = extents.take(5000), extents.take(1)
    extents.give(first, 5000)
    for offset, nbytes in ((first, 5000), (first, 1), (0, 12288), (40960, 1)):
        with pytest.raises(InvariantError):
            extents.give(offset, nbytes)

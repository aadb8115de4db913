"""The checksum is zip's, however it is cut."""

from __future__ import annotations

import random
import zlib

from hypothesis import given
from hypothesis import strategies as st

from swapper import _C

MIB = 1 << 20


@given(data=st.binary(max_size=3000), value=st.integers(0, 2**32 - 1))
def test_it_is_zlibs(data: bytes, value: int) -> None:
    assert _C.crc32(data, value) == zlib.crc32(data, value)


@given(size=st.integers(0, 2 * MIB), shift=st.integers(0, 64), seed=st.integers(0, 2**32))
def test_it_is_zlibs_at_any_size_and_address(size: int, shift: int, seed: int) -> None:
    data = memoryview(random.Random(seed).randbytes(size + shift))[shift:]
    assert _C.crc32(data) == zlib.crc32(data)


@given(a=st.binary(max_size=1000), b=st.binary(max_size=1000))
def test_parts_combine(a: bytes, b: bytes) -> None:
    assert _C.crc32_combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


def test_parts_of_many_gigabytes_combine() -> None:
    """A run of zeros, doubled until it is longer than any file."""
    crc, nbytes = zlib.crc32(bytes(MIB)), MIB
    for _ in range(3):
        crc, nbytes = _C.crc32_combine(crc, crc, nbytes), 2 * nbytes
    assert crc == zlib.crc32(bytes(8 * MIB))
    for _ in range(17):
        crc, nbytes = _C.crc32_combine(crc, crc, nbytes), 2 * nbytes
    assert nbytes == 1 << 40
    halves = _C.crc32_combine(zlib.crc32(bytes(MIB)), crc, nbytes)
    assert halves == _C.crc32_combine(crc, zlib.crc32(bytes(MIB)), MIB)


def test_memory_by_address() -> None:
    arena = _C.Arena(MIB, lock=False, huge_pages=False)
    view = arena.view(100, 5000)
    memoryview(view)[:] = random.Random(0).randbytes(5000)
    assert _C.crc32_address(view.address, 5000, 7) == zlib.crc32(view, 7)

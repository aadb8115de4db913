"""How tensors lie in a group's storage on a device, and which bytes of a page go where. Pure.

Each begins at a multiple of DEVICE_ALIGNMENT_BYTES, as every tensor of torch's own allocators does: kernels choose by alignment,
and other kernels give other bits. What lies between tensors in a file does not come along.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swapper.io.alignment import round_up

DEVICE_ALIGNMENT_BYTES = 512


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [begin, begin + nbytes) of a section; on the device they begin at `target` of the group's storage."""

    begin: int
    nbytes: int
    target: int


def place_in_storage(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where each of tensors of these sizes begins, and the size of all, at least one alignment; in bytes."""
    offsets, cursor = [], 0
    for nbytes in sizes:
        offsets.append(cursor)
        cursor = round_up(cursor + nbytes, DEVICE_ALIGNMENT_BYTES)
    return offsets, max(cursor, DEVICE_ALIGNMENT_BYTES)


def spans_of_page(spans: Sequence[Span], offset: int, nbytes: int) -> tuple[Span, ...]:
    """Return what of `spans` is in bytes [offset, offset + nbytes) of the section, with begins counted from `offset`."""
    found = []
    for span in spans:
        begin, end = max(span.begin, offset), min(span.begin + span.nbytes, offset + nbytes)
        if begin < end:
            found.append(Span(begin - offset, end - begin, span.target + begin - span.begin))
    return tuple(found)

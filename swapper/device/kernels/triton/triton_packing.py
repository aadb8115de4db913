"""Pieces of tensors and their places in a page, from a table of addresses: one program copies one piece, in words of 8 bytes.

The bytes that make no word, and tensors that do not begin on one, go singly.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

WORD = 8


def table(tensors: Sequence[torch.Tensor], offsets: Sequence[int], piece_bytes: int) -> torch.Tensor:
    """Return int64 of shape (pieces, 4): address, offset in the page, words, single bytes after them."""
    rows = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        nbytes = tensor.numel() * tensor.element_size()
        is_aligned = tensor.data_ptr() % WORD == 0 and offset % WORD == 0
        for at in range(0, nbytes, piece_bytes):
            count = min(piece_bytes, nbytes - at)
            words = count // WORD if is_aligned else 0
            rows.append((tensor.data_ptr() + at, offset + at, words, count - words * WORD))
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4).to(tensors[0].device)


def move(pieces: torch.Tensor, page: torch.Tensor, into_page: bool, piece_bytes: int) -> None:
    if pieces.shape[0] == 0:
        return
    with torch.cuda.device_of(page):
        _move[(pieces.shape[0],)](pieces, page, into_page=into_page, PIECE_BYTES=piece_bytes, WORD=WORD)


@triton.jit
def _move(pieces, page, into_page: tl.constexpr, PIECE_BYTES: tl.constexpr, WORD: tl.constexpr):
    row = pieces + tl.program_id(0).to(tl.int64) * 4
    address, offset = tl.load(row), tl.load(row + 1)
    words, singles = tl.load(row + 2), tl.load(row + 3)
    _copy(address, page + offset, words, tl.int64, into_page, 1, PIECE_BYTES // WORD)
    done = words * WORD
    if singles != 0:
        _copy(address + done, page + offset + done, singles, tl.int8, into_page, WORD, PIECE_BYTES // WORD)


@triton.jit
def _copy(address, place, count, unit: tl.constexpr, into_page: tl.constexpr, STEPS: tl.constexpr, EACH: tl.constexpr):
    tensor = address.to(tl.pointer_type(unit))
    place = place.to(tl.pointer_type(unit), bitcast=True)
    for step in tl.static_range(STEPS):
        at = step * EACH + tl.arange(0, EACH)
        if into_page:
            tl.store(place + at, tl.load(tensor + at, mask=at < count), mask=at < count)
        else:
            tl.store(tensor + at, tl.load(place + at, mask=at < count), mask=at < count)

"""Chunks that tile a tensor are told from those that do not, and give it back, whole and in boxes of any size."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from swapper.formats.stored import Chunk, ChunkedTensor, ConcatenatedFile, Extent, StoredTensor

FILE = Path("/nowhere")


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Chunk:
    numel = torch.Size(sizes).numel()
    return Chunk(offsets, StoredTensor("w", FILE, 0, 4 * numel, torch.float32, sizes))


def tensor(shape: tuple[int, ...], *chunks: Chunk) -> ChunkedTensor:
    return ChunkedTensor("w", FILE, torch.float32, shape, tuple(sorted(chunks, key=lambda c: c.offsets)))


@st.composite
def grids(draw: st.DrawFn) -> ChunkedTensor:
    """A tensor of two to four dimensions, each cut at some places."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=2, max_size=4)))
    cuts = [
        [0, *sorted(draw(st.sets(st.integers(1, size - 1), max_size=2)) if size > 1 else ()), size] for size in shape
    ]
    ranges = [list(itertools.pairwise(cut)) for cut in cuts]
    boxes = list(itertools.product(*ranges))
    return tensor(shape, *(chunk(tuple(b for b, _ in box), tuple(e - b for b, e in box)) for box in boxes))


@settings(max_examples=examples(150))
@given(grids(), st.integers(1, 400))
def test_chunks_give_the_tensor_back(chunked: ChunkedTensor, max_bytes: int) -> None:
    chunked.check()
    whole = torch.arange(torch.Size(chunked.shape).numel(), dtype=torch.float32).view(chunked.shape)
    parts = [whole[tuple(map(slice, c.offsets, c.ends))].contiguous() for c in chunked.chunks]
    assert torch.equal(chunked.assembled(parts, torch.float32), whole)
    by_offset = {id(c.stored): part.view(-1) for c, part in zip(chunked.chunks, parts, strict=True)}
    found = []
    for box in chunked.boxes(max_bytes):
        memory = torch.full(box.shape, -1.0)
        assert memory.nbytes <= max(max_bytes, 4)
        for piece in box.pieces:
            numel = torch.Size(piece.shape).numel()
            memory[piece.at] = by_offset[id(piece.stored)][piece.first : piece.first + numel].view(piece.shape)
        found.append(memory.view(-1))
    assert torch.equal(torch.cat(found), whole.view(-1))
    if chunked.in_rows():
        assert torch.equal(torch.cat(parts).view(-1), whole.view(-1))


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([((0, 0), (4, 2)), ((0, 2), (4, 3))], "inside"),
        ([((0, 0), (4, 2))], "covered"),
        ([((0, 0), (4, 2)), ((0, 0), (4, 2))], "overlap"),
        ([((0, 0), (3, 4)), ((2, 0), (1, 4))], "overlap"),
        ([((0, 0), (2, 3)), ((0, 2), (2, 2)), ((2, 0), (2, 3))], "overlap"),
    ],
)
def test_chunks_that_do_not_tile_the_tensor_are_refused(
    chunks: list[tuple[tuple[int, int], tuple[int, int]]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tensor((4, 4), *(chunk(*c) for c in chunks)).check()


def test_a_joined_file_finds_every_range() -> None:
    joined = ConcatenatedFile()
    content = bytearray()
    origin = bytes(range(251)) * 200
    for extents in (
        [Extent(FILE, 5, 7), Extent(FILE, 3000, 5000), Extent(FILE, 9, 0), Extent(FILE, 0, 1)],
        [Extent(FILE, 77, 10)],
    ):
        offset = joined.add(extents)
        content += bytes(offset - len(content)) + b"".join(origin[e.offset : e.offset + e.nbytes] for e in extents)
    assert joined.nbytes == len(content)
    for begin in range(0, len(content), 113):
        for nbytes in (1, 8, 4096, 9000):
            memory = bytearray(content[begin : begin + nbytes])
            for at, extent in joined.extents(begin, min(nbytes, len(content) - begin)):
                memory[at : at + extent.nbytes] = bytes(extent.nbytes)
                assert (
                    bytes(content[begin + at : begin + at + extent.nbytes])
                    == origin[extent.offset : extent.offset + extent.nbytes]
                )
            assert not any(memory)  # nothing but gaps is left out

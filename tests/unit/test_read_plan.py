"""Runs of a file: each tensor is in one of them, where its kernels may read it, and no two runs could be one."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from swapper.formats.stored import LOOSE_ITEM_BYTES, MAX_GAP_BYTES, FileRange, StoredTensor, plan_runs
from swapper.io.tensor_bytes import SECTOR_BYTES, TENSOR_ALIGNMENT_BYTES

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]


def alignment_of(tensor: StoredTensor) -> int:
    itemsize = tensor.dtype.itemsize
    return itemsize if itemsize <= LOOSE_ITEM_BYTES else TENSOR_ALIGNMENT_BYTES


def stored(path: Path, offset: int, numel: int, dtype: torch.dtype) -> StoredTensor:
    return StoredTensor("", path, offset, numel * dtype.itemsize, dtype, (numel,))


@st.composite
def files(draw: st.DrawFn) -> list[StoredTensor]:
    """Tensors one after the other in some files, at any offsets, some far from each other or in part in the same place."""
    found = []
    steps = st.sampled_from([1, 2, 8, 64, 4096])
    gaps = st.one_of(st.integers(0, 200), st.just(MAX_GAP_BYTES), st.just(MAX_GAP_BYTES + 1), st.integers(-50, 0))
    for number in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, 10_000))
        for _ in range(draw(st.integers(0, 8))):
            step = draw(steps)
            at = -(-at // step) * step
            found.append(stored(Path(str(number)), at, draw(st.integers(0, 60)), draw(st.sampled_from(DTYPES))))
            at = max(at + found[-1].nbytes + draw(gaps), 0)
    return draw(st.permutations(found))


def members(run: FileRange, tensors: list[StoredTensor]) -> list[StoredTensor]:
    return [tensors[number] for number, _ in run.places]


def could_be_one(run: FileRange, after: FileRange, tensors: list[StoredTensor]) -> bool:
    """Return whether the first tensor of `after` could be in `run`, at any begin."""
    own, first = members(run, tensors), members(after, tensors)[0]
    end = max(tensor.offset + tensor.nbytes for tensor in own)
    if first.path != run.path or first.offset - end > MAX_GAP_BYTES:
        return False
    begins = range(max(own[0].offset - TENSOR_ALIGNMENT_BYTES + 1, 0), own[0].offset + 1)
    return any(all((t.offset - begin) % alignment_of(t) == 0 for t in (*own, first)) for begin in begins)


@given(files())
def test_each_tensor_lies_aligned_in_one_run_and_runs_are_as_long_as_can_be(tensors: list[StoredTensor]) -> None:
    runs = plan_runs(tensors)
    assert sorted(n for run in runs for n, _ in run.places) == [n for n, t in enumerate(tensors) if t.nbytes]
    for run in runs:
        assert run.nbytes % SECTOR_BYTES == 0 <= run.file_offset
        for number, offset in run.places:
            assert run.path == tensors[number].path and run.file_offset + offset == tensors[number].offset
            assert offset % alignment_of(tensors[number]) == 0
            assert 0 <= offset <= run.nbytes - tensors[number].nbytes
    assert not any(could_be_one(run, after, tensors) for run, after in itertools.pairwise(runs))


def test_a_run_of_very_many_tensors_is_planned() -> None:
    """In time that grows with their number: with its square it would be an hour."""
    count = 50_000
    tensors = [stored(Path("file"), 64 * number, 16, torch.float32) for number in range(count)]
    (run,) = plan_runs(tensors)
    assert (run.file_offset, run.nbytes, len(run.places)) == (0, -(-64 * count // SECTOR_BYTES) * SECTOR_BYTES, count)

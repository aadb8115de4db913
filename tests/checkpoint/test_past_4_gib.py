"""A record of more than 4 GiB, and one that begins after it: sizes and offsets that only zip64 can say. With SWAPPER_TEST_ALL=1."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import psutil
import pytest
import torch

from swapper import checkpoint

LARGE_BYTES = (4 << 30) + 4096 + 12
GIB = 1 << 30


@pytest.mark.skipif(not os.environ.get("SWAPPER_TEST_ALL"), reason="half a minute; asked for by SWAPPER_TEST_ALL=1")
def test_a_tensor_past_4_gib_and_what_comes_after_it(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 12 * GIB or psutil.virtual_memory().available < 8 * GIB:
        pytest.skip("needs 12 GiB of drive and 8 GiB of memory")
    marks = {0: 1, 4095: 2, (4 << 30) - 1: 3, 4 << 30: 4, LARGE_BYTES - 1: 5}
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(LARGE_BYTES)
        for place, value in marks.items():
            file.seek(place)
            file.write(bytes([value]))
    large = torch.from_file(str(sparse), shared=False, size=LARGE_BYTES, dtype=torch.uint8)
    path = tmp_path / "state.pt"
    checkpoint.save({"large": large, "small": torch.arange(1000)}, path)
    sparse.unlink()

    with zipfile.ZipFile(path) as archive:
        largest, last = (max(archive.infolist(), key=key) for key in (lambda i: i.file_size, lambda i: i.header_offset))
        assert largest.file_size == LARGE_BYTES
        assert last.header_offset > 4 << 30
        assert archive.testzip() is None
    for state in (torch.load(path, mmap=True), checkpoint.load(path, mmap=True), checkpoint.load(path)):
        assert state["large"].numel() == LARGE_BYTES
        assert {place: int(state["large"][place]) for place in marks} == marks
        assert int(torch.count_nonzero(state["large"])) == len(marks)
        assert torch.equal(state["small"], torch.arange(1000))
        del state
    path.unlink()

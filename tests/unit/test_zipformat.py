"""The zip bytes are those of torch's own writer: the same names, sizes and offsets give the same bytes."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from torch.utils.serialization import config

from swapper.formats import torch_writer
from swapper.formats.torch_writer import ZIP64_LIMIT, Entry

ALIGNMENTS = [64, 128, 512, 4096, 8192, 32768]


def entries_of(path: Path) -> list[Entry]:
    with zipfile.ZipFile(path) as archive:
        return [Entry(i.filename, i.header_offset, i.file_size, i.CRC) for i in archive.infolist()]


def assert_same_bytes_as_torch(path: Path, alignment: int) -> list[Entry]:
    """Remakes every byte of the file but the contents, from names, sizes and CRCs alone."""
    entries = entries_of(path)
    cursor = 0
    with path.open("rb") as file:
        for entry in entries:
            assert entry.header_offset == cursor
            header = torch_writer.local_header(cursor, entry.name, entry.nbytes, alignment)
            assert file.read(len(header)) == header
            offset = torch_writer.payload_offset(cursor, entry.name, entry.nbytes, alignment)
            assert offset == cursor + len(header)
            file.seek(offset + entry.nbytes)
            descriptor = torch_writer.descriptor(cursor, entry.nbytes, entry.crc32)
            assert len(descriptor) == torch_writer.descriptor_nbytes(cursor, entry.nbytes)
            assert file.read(len(descriptor)) == descriptor
            cursor = file.tell()
        assert file.read() == torch_writer.directory(entries, cursor, 1)
    return entries


@settings(max_examples=examples(60))
@given(
    sizes=st.lists(st.integers(0, 9000), max_size=12),
    alignment=st.sampled_from(ALIGNMENTS),
    stem=st.text("abcxyz-_.0é", min_size=1, max_size=40).filter(lambda s: s.strip(".")),
)
def test_bytes_equal_those_of_torch_save(tmp_path_factory, sizes, alignment, stem) -> None:
    path = tmp_path_factory.mktemp("zip") / f"{stem}.pt"
    with config.patch({"save.storage_alignment": alignment}):
        torch.save([torch.arange(size, dtype=torch.int32).to(torch.uint8) for size in sizes], path)
    entries = assert_same_bytes_as_torch(path, alignment)
    assert [e.nbytes for e in entries if "/data/" in e.name] == sizes


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize(
    "sizes",
    [
        [ZIP64_LIMIT - 1, 1, 1],
        [ZIP64_LIMIT, 0, 5],
        [ZIP64_LIMIT + 1, 4096, 0],
        [0xFFFFF000, 4096, 4096],
        [0x80000000, 0x80000000, 4096],
        [4096, 0x100000000, 0x100001000, 3],
    ],
)
def test_bytes_equal_those_of_torch_save_around_4_gib(tmp_path, sizes, alignment) -> None:
    path = tmp_path / "big.pt"
    with config.patch({"save.storage_alignment": alignment}), torch.serialization.skip_data():
        torch.save([torch.UntypedStorage(size) for size in sizes], path)
    if path.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("this filesystem keeps no holes")
    entries = assert_same_bytes_as_torch(path, alignment)
    assert [e.nbytes for e in entries if "/data/" in e.name] == sizes


@pytest.mark.parametrize("cursor_minus_limit", [-64, -1, 0, 1, 40])
def test_headers_that_begin_next_to_4_gib_equal_those_of_torch(tmp_path, cursor_minus_limit) -> None:
    # The first record's size puts the header of the second exactly where the 32-bit fields stop to suffice.
    path, name = tmp_path / "edge.pt", "edge/data/0"
    size = ZIP64_LIMIT + cursor_minus_limit - torch_writer.payload_offset(0, name, 1, 64) - 16
    assert size < ZIP64_LIMIT
    writer = torch._C.PyTorchFileWriter(str(path), True, 64)
    writer.write_record_metadata("data/0", size)
    writer.write_record("data/1", b"123", 3)
    writer.write_end_of_file()
    entries = assert_same_bytes_as_torch(path, 64)
    assert entries[1].header_offset == ZIP64_LIMIT + cursor_minus_limit


@pytest.mark.parametrize("count", [1, 65534, 65535, 65536, 70000])
def test_directories_of_many_entries_are_read_back_whole(tmp_path, count) -> None:
    crc32 = zlib.crc32(b"abc")
    content = torch_writer.local_header(0, "r/0", 3, 64) + b"abc" + torch_writer.descriptor(0, 3, crc32)
    entries = [Entry(f"r/{index}", 0, 3, crc32) for index in range(count)]
    path = tmp_path / "many.zip"
    path.write_bytes(content + torch_writer.directory(entries, len(content), 4096))
    assert path.stat().st_size % 4096 == 0
    raw = path.read_bytes()
    end_record = raw[raw.rindex(b"PK\x05\x06") :]
    assert struct.unpack_from("<2H", end_record, 8) == (min(count, 0xFFFF),) * 2  # APPNOTE 4.4.1.4
    assert entries_of(path) == entries


@given(
    offset=st.integers(0, 1 << 50),
    count=st.integers(0, 40),
    alignment=st.sampled_from([1, 512, 4096, 16384]),
)
def test_a_directory_ends_where_the_alignment_divides_the_file(offset, count, alignment) -> None:
    entries = [Entry(f"r/data/{index}", index * 8192, 4096, index) for index in range(count)]
    padded = torch_writer.directory(entries, offset, alignment)
    bare = torch_writer.directory(entries, offset, 1)
    assert (offset + len(padded)) % alignment == 0
    assert len(padded) - len(bare) < alignment
    assert padded[: len(bare) - 2] == bare[:-2]  # all but the comment and its length
    assert padded[len(bare) :] == bytes(len(padded) - len(bare))
    assert int.from_bytes(padded[len(bare) - 2 : len(bare)], "little") == len(padded) - len(bare)

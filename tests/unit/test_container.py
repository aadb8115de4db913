"""The bytes of a container are where the plan says, its tail says what torch expects, and zip tools read it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
import zlib

import pytest
import torch
from container_content import Content, assert_equal, build_tail, bytes_of, example, random_payload
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from swapper.errors import CheckpointError
from swapper.formats.container import (
    ALIGNMENT,
    MANIFEST_NAME,
    ChecksumChunk,
    ContainerLayout,
    PreparedTail,
    Record,
)

sizes = st.lists(st.integers(1, 64).map(lambda pages: pages * ALIGNMENT), max_size=10)
long_sizes = st.lists(
    st.one_of(st.integers(1, 4), st.integers(1 << 20, (1 << 20) + 3), st.integers((1 << 20) - 3, 1 << 24)).map(
        lambda pages: pages * ALIGNMENT
    ),
    max_size=8,
)


# Layout ----------------------------------------------------------------------------------------------


@given(sizes=st.one_of(sizes, long_sizes))
def test_headers_and_payloads_fill_the_file_up_to_the_tail_without_gap_or_overlap(sizes) -> None:
    layout = ContainerLayout.plan(sizes)
    spans = [(offset, len(chunk)) for offset, chunk in layout.headers()]
    spans += [(record.offset, record.nbytes) for record in layout.records]
    end = 0
    for offset, nbytes in sorted(spans):
        assert offset == end
        assert offset % ALIGNMENT == 0
        assert nbytes % ALIGNMENT == 0
        end = offset + nbytes
    assert layout.tail_offset == end
    assert [record.key for record in layout.records] == [str(index) for index in range(len(sizes))]
    assert [record.nbytes for record in layout.records] == sizes


@given(sizes=sizes.filter(bool))
def test_payload_first_bytes_equal_those_of_torchs_own_writer(tmp_path_factory, sizes) -> None:
    """torch's writer, told to write the same records first, puts the same bytes before the tail."""
    directory = tmp_path_factory.mktemp("writer")
    content = Content([random_payload(size, torch.uint8, seed) for seed, size in enumerate(sizes)])
    ours = content.write(directory / "ours", list(content.payloads), with_crc32s=True)
    theirs = directory / "archive.pt"
    writer = torch._C.PyTorchFileWriter(str(theirs), True, ALIGNMENT)
    for key, payload in enumerate(content.payloads):
        writer.write_record(f"data/{key}", bytes_of(payload), payload.nbytes)
    writer.write_end_of_file()
    prefix = content.layout.tail_offset + 16  # with the descriptor that begins the tail
    assert ours.read_bytes()[:prefix] == theirs.read_bytes()[:prefix]


@settings(max_examples=examples(25))
@given(sizes=long_sizes.filter(bool))
def test_header_chunks_around_4_gib_equal_those_of_torchs_own_writer(tmp_path_factory, sizes) -> None:
    path = tmp_path_factory.mktemp("sparse") / "archive.pt"
    writer = torch._C.PyTorchFileWriter(str(path), True, ALIGNMENT)
    for key, nbytes in enumerate(sizes):
        writer.write_record_metadata(f"data/{key}", nbytes)
    writer.write_end_of_file()
    chunks = list(ContainerLayout.plan(sizes).headers())
    assert len(chunks) == len(sizes)
    with path.open("rb") as file:
        for offset, chunk in chunks:
            file.seek(offset)
            assert file.read(len(chunk)) == chunk
    path.unlink()


def test_the_layout_of_a_small_container_in_full() -> None:
    layout = ContainerLayout.plan([4096, 8192])
    assert layout.records == (Record("0", 4096, 0, 4096), Record("1", 8192, 8192 + 16, 12288))
    assert layout.tail_offset == 20480
    (begin, first), (gap, second) = layout.headers()
    assert (begin, gap) == (0, 8192)
    assert first.startswith(b"PK\x03\x04")
    assert first.endswith(b"ZZZZ")
    assert second[:16] == b"PK\x07\x08" + bytes(4) + (4096).to_bytes(4, "little") * 2
    assert second[16:20] == b"PK\x03\x04"
    assert b"archive/data/1FB" in second


@pytest.mark.whole
@pytest.mark.parametrize("size", [0, -4096, 1, 4095, 4097])
def test_sizes_that_cannot_be_written_directly_are_refused(size) -> None:
    with pytest.raises(CheckpointError, match="record 1 of"):
        ContainerLayout.plan([4096, size])


# The tail --------------------------------------------------------------------------------------------


def test_a_container_without_payload_is_all_tail(tmp_path) -> None:
    content = Content([])
    assert content.layout.tail_offset == 0
    assert list(content.layout.headers()) == []
    state = {"a": torch.arange(3), "b": "text"}
    path = content.write(tmp_path / "x.pt", state)
    assert path.read_bytes()[:4] == b"PK\x03\x04"
    assert_equal(torch.load(path, mmap=True), state)


def test_without_its_tail_nothing_loads_the_file(tmp_path) -> None:
    content, state = example()
    path = content.write(tmp_path / "x.pt", state)
    os.truncate(path, content.layout.tail_offset)
    assert not zipfile.is_zipfile(path)
    with pytest.raises(RuntimeError, match="zip archive"):
        torch.load(path)


def test_a_shorter_tail_replaces_a_longer_one(tmp_path) -> None:
    content, state = example()
    path = content.write(tmp_path / "x.pt", {**state, "more": list(range(100_000))})
    tail = build_tail(content.layout, state, content.locate, content.crc32s)
    with path.open("r+b") as file:
        file.seek(content.layout.tail_offset)
        file.write(tail)
        file.truncate()
    assert_equal(torch.load(path), state)
    assert zipfile.ZipFile(path).testzip() is None


def test_the_same_state_gives_the_same_tail_and_another_gives_another_id() -> None:
    content, state = example()
    tail = build_tail(content.layout, state, content.locate, content.crc32s)
    assert tail == build_tail(content.layout, state, content.locate, content.crc32s)
    other = {**content.crc32s, "0": content.crc32s["0"] ^ 1}
    other_tail = build_tail(content.layout, state, content.locate, other)
    assert serialization_id(tail)[:20] == serialization_id(other_tail)[:20]
    assert serialization_id(tail)[20:] != serialization_id(other_tail)[20:]


def serialization_id(tail: bytes) -> bytes:
    match = tail.split(b".data/serialization_idFB")[1]
    digits = match[2 + int.from_bytes(match[:2], "little") :][:40]
    assert digits.isdigit()
    return digits


def test_small_records_say_what_torch_expects(tmp_path) -> None:
    content, _ = example()
    archive = zipfile.ZipFile(content.write(tmp_path / "x.pt", list(content.payloads)))
    small = {n.removeprefix("archive/"): archive.read(n) for n in archive.namelist() if "/data/" not in n}
    serialization = small.pop(".data/serialization_id")
    assert len(serialization) == 40 and serialization.isdigit()
    assert small.pop("data.pkl").startswith(b"\x80\x02")
    assert small.pop(MANIFEST_NAME).startswith(b'{"format":1')
    assert small == {
        ".format_version": b"1",
        ".storage_alignment": b"4096",
        "byteorder": sys.byteorder.encode(),
        "version": b"3\n",
    }


def test_a_payload_has_the_checksum_of_its_chunks() -> None:
    content, state = example()
    chunks = [
        ChecksumChunk(record.offset + begin, 4096, zlib.crc32(bytes_of(payload)[begin : begin + 4096]))
        for record, payload in zip(content.layout.records, content.payloads, strict=True)
        for begin in range(0, record.nbytes, 4096)
    ]
    assert len(chunks) > len(content.payloads)
    tail = PreparedTail(content.layout, state, content.locate).build(chunks[::-1])
    whole = build_tail(content.layout, state, content.locate, content.crc32s)
    assert serialization_id(tail) == serialization_id(whole)


@pytest.mark.whole
@pytest.mark.parametrize(
    "chunks",
    [[], [(4096, 4096)], [(4096, 4096), (12288, 2048)], [(4096, 4096), (4096, 4096), (12288, 4096)], [(4096, 12288)]],
)
def test_checksums_that_do_not_fit_the_layout_are_refused(chunks) -> None:
    tail = PreparedTail(ContainerLayout.plan([4096, 4096]), {}, lambda tensor: None)
    with pytest.raises(CheckpointError, match="checksums"):
        tail.build([ChecksumChunk(offset, nbytes, 0) for offset, nbytes in chunks])


# Zip tools -------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("with_crc32s", [False, True])
def test_zip_tools_accept_the_file_and_notice_a_changed_payload_byte(tmp_path, with_crc32s) -> None:
    content, state = example()
    path = content.write(tmp_path / "x.pt", state, with_crc32s)
    assert zipfile.ZipFile(path).testzip() is None
    with path.open("r+b") as file:
        file.seek(content.layout.records[1].offset)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert zipfile.ZipFile(path).testzip() == "archive/data/1"


@pytest.mark.whole
@pytest.mark.skipif(not shutil.which("unzip"), reason="unzip is not installed")
@pytest.mark.parametrize("with_crc32s", [False, True])
def test_unzip_accepts_the_file_and_extracts_the_payload(tmp_path, with_crc32s) -> None:
    content, state = example()
    path = content.write(tmp_path / "x.pt", state, with_crc32s)
    result = subprocess.run(["unzip", "-t", path], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "No errors detected" in result.stdout
    assert result.stderr == ""
    extracted = subprocess.run(["unzip", "-p", path, "archive/data/2"], capture_output=True, check=True)
    assert extracted.stdout == bytes_of(content.payloads[2])

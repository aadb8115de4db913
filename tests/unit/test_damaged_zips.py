"""A checkpoint whose zip contradicts itself is refused, with what is wrong, before anything is believed."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.serialization import config

import swapper
from swapper.checkpoint import load
from swapper.formats import zip_reader

END, END64, LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"


class Zip:
    """A file of torch.save: its bytes, and where its parts lie. Offsets of fields are the format's (APPNOTE.TXT, 4.3)."""

    def __init__(self) -> None:
        file = io.BytesIO()
        torch.save({"a": torch.arange(1000.0), "b": torch.ones(3)}, file)
        self.data = bytearray(file.getvalue())
        self.end, self.end64, self.locator = (self.data.rfind(mark) for mark in (END, END64, LOCATOR))
        assert 0 < self.end64 < self.locator < self.end
        count, self.begin = struct.unpack_from("<Q", self.data, self.end64 + 32)[0], self.get("<Q", self.end64 + 48)
        self.entries: list[int] = []
        at = self.begin
        for _ in range(count):
            self.entries.append(at)
            at += 46 + sum(struct.unpack_from("<3H", self.data, at + 28))
        assert at <= self.end64

    def get(self, form: str, at: int) -> int:
        return int(struct.unpack_from(form, self.data, at)[0])

    def put(self, form: str, at: int, value: int) -> None:
        struct.pack_into(form, self.data, at, value)

    def write(self, at: int, data: bytes) -> None:
        self.data[at : at + len(data)] = data

    def header(self, number: int) -> int:
        """Return where a record's own header lies."""
        return self.get("<L", self.entries[number] + 42)

    def count(self, number: int) -> None:
        self.put("<Q", self.end64 + 24, number)
        self.put("<Q", self.end64 + 32, number)


Damage = Callable[[Zip], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no end": (lambda z: z.write(z.end, b"XXXX"), "it has no end record: it is cut off, or no zip"),
    "several disks": (lambda z: z.put("<L", z.locator + 16, 2), "a part of a zip of several parts"),
    "another disk": (lambda z: z.put("<L", z.end64 + 16, 1), "a part of a zip of several parts"),
    "counts that differ": (lambda z: z.put("<Q", z.end64 + 24, 1), "a part of a zip of several parts"),
    "a zip64 end behind it": (lambda z: z.put("<Q", z.locator + 8, z.end), "is said to be at .*, where it cannot be"),
    "no zip64 end": (lambda z: z.write(z.end64, b"XXXX"), "there is no zip64 end record at"),
    "a directory beyond the end": (lambda z: z.put("<Q", z.end64 + 48, 1 << 40), "which do not fit before"),
    "too many entries": (lambda z: z.count(1 << 20), "is said to have 1048576 entries"),
    "too few entries": (lambda z: z.count(len(z.entries) - 1), "of which .* entries take"),
    "no entry": (lambda z: z.write(z.entries[0], b"XXXX"), "its directory is damaged at byte 0"),
    "a name beyond the directory": (lambda z: z.put("<H", z.entries[-1] + 28, 60000), "its directory is cut off"),
    "an entry beyond the directory": (
        lambda z: (z.put("<Q", z.end64 + 40, z.entries[-1] - z.begin + 20), z.count(len(z.entries))),
        "its directory is cut off|is said to have",
    ),
    "encrypted": (lambda z: z.put("<H", z.entries[0] + 8, 1), "is encrypted, in another part, or compressed in a way"),
    "bzip2": (lambda z: z.put("<H", z.entries[0] + 10, 12), "is encrypted, in another part, or compressed in a way"),
    "a directory with bytes": (lambda z: z.put("<L", z.entries[0] + 38, 0x10), "is said to be a directory"),
    "two sizes": (lambda z: z.put("<L", z.entries[0] + 20, 1), "is stored, yet has .* bytes in 1"),
    "a record beyond the end": (lambda z: z.put("<L", z.entries[0] + 42, 1 << 30), "which the file does not have"),
    "no zip64 sizes": (lambda z: z.put("<L", z.entries[0] + 24, 0xFFFFFFFF), "lacks its zip64 sizes"),
    "no header": (lambda z: z.write(z.header(1), b"XXXX"), "there is no header of .*, its stated offset"),
    "two records in one place": (lambda z: z.put("<L", z.entries[1] + 42, z.header(0)), "begins at 0, inside"),
    "a record into the directory": (
        lambda z: z.put("<H", z.header(-1) + 28, 9999),
        "reaches to .* before the directory",
    ),
    "a name of no text": (lambda z: z.write(z.entries[0] + 46, b"\xff"), "of a record is no text"),
    "a name that leads out": (lambda z: z.write(z.entries[0] + 46, b"/"), "leads out of the archive"),
}


@pytest.mark.whole
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_zip_that_contradicts_itself_is_refused(damage: str, tmp_path: Path) -> None:
    path, of = tmp_path / "damaged.pt", Zip()
    change, says = DAMAGES[damage]
    change(of)
    path.write_bytes(of.data)
    with pytest.raises(swapper.CheckpointError, match=says) as refused:
        load(path)
    assert str(path) in str(refused.value) and "Take another copy of it" in str(refused.value)


def test_a_name_that_is_listed_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"one")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("archive/data.pkl", b"two")
    with pytest.raises(swapper.CheckpointError, match=r"it lists 'archive/data.pkl' twice"):
        load(path)


def test_zip64_sizes_that_are_too_few_are_none(tmp_path: Path) -> None:
    path, of = tmp_path / "few.pt", Zip()
    at = of.entries[0]
    of.put("<L", at + 24, 0xFFFFFFFF)
    extra = struct.pack("<2H", 9, 0) + struct.pack("<2H", 1, 0)  # another field, and one without the size
    name_end = at + 46 + of.get("<H", at + 28)
    of.put("<H", at + 30, of.get("<H", at + 30) + len(extra))
    of.data[name_end:name_end] = extra
    for field in (of.end64 + len(extra) + 40, of.locator + len(extra) + 8):
        of.put("<Q", field, of.get("<Q", field) + len(extra))
    path.write_bytes(of.data)
    with pytest.raises(swapper.CheckpointError, match="lacks its zip64 sizes"):
        load(path)


def test_a_directory_of_more_bytes_than_any_has_is_not_read(tmp_path: Path) -> None:
    """The file has them: it is sparse."""
    path, nbytes = tmp_path / "large.pt", zip_reader._MAX_DIRECTORY_BYTES + 1
    with path.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.truncate(4 + nbytes)
        file.seek(0, os.SEEK_END)
        file.write(struct.pack("<4s4H2LH", END, 0, 0, 1, 1, nbytes, 4, 0))
    with pytest.raises(swapper.CheckpointError, match=f"its directory claims {nbytes} bytes"):
        load(path)


def compressed(path: Path) -> zipfile.ZipInfo:
    """Write a checkpoint with a packed payload; return what its zip says of the payload."""
    plain = io.BytesIO()
    torch.save({"a": torch.arange(10000)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w") as archive:
        for name in source.namelist():
            packs = zipfile.ZIP_DEFLATED if name.endswith("/data/0") else zipfile.ZIP_STORED
            archive.writestr(name, source.read(name), packs)
        return archive.getinfo(next(name for name in source.namelist() if name.endswith("/data/0")))


@pytest.mark.parametrize("what", ["whole", "other bytes", "another size"])
def test_a_packed_payload_is_compared_with_its_checksum(what: str, tmp_path: Path) -> None:
    path = tmp_path / "packed.pt"
    info = compressed(path)
    data = bytearray(path.read_bytes())
    begin = info.header_offset + 30 + len(info.filename)
    if what == "other bytes":
        data[begin] = 0xFF  # no kind of block
    if what == "another size":
        entry = data.rfind(info.filename.encode()) - 46
        struct.pack_into("<L", data, entry + 24, info.file_size + 1)
    path.write_bytes(data)
    if what == "whole":
        assert torch.equal(load(path, verify=True)["a"], torch.arange(10000))
        return
    with pytest.raises(swapper.CheckpointError, match=r"does not unpack to|data.pkl says"):
        load(path, verify=True)


@pytest.mark.parametrize("stated", [b"64", b"00", b"x4"])
def test_payloads_are_found_whatever_alignment_a_file_states(stated: bytes, tmp_path: Path) -> None:
    """Where torch is asked to calculate their offsets; 0 is no alignment: the records' own headers are read."""
    path = tmp_path / "aligned.pt"
    torch.save({"a": torch.arange(1000)}, path)
    with zipfile.ZipFile(path) as archive:
        (info,) = (one for one in archive.infolist() if one.filename.endswith("/.storage_alignment"))
    data = bytearray(path.read_bytes())
    begin = info.header_offset + 30 + sum(struct.unpack_from("<2H", data, info.header_offset + 26))
    assert data[begin : begin + 2] == b"64"
    data[begin : begin + 2] = stated
    path.write_bytes(data)
    with config.patch({"load.calculate_storage_offsets": True}):
        if stated == b"x4":
            with pytest.raises(swapper.CheckpointError, match=r"storage_alignment has b'x4', which is not a number"):
                load(path)
        else:
            assert torch.equal(load(path)["a"], torch.arange(1000))

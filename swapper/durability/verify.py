"""Verifies every byte of a snapshot, or of a run's last commit, against the checksums of its writes.

A snapshot is checked by its seal and manifest (container.py), a run by its commit record. A torch checkpoint without a
manifest is checked by the CRCs of its zip, which cover its records and not the bytes between them; of those, the names
are compared. Files are streamed through the engine in bounded memory, for any size. Nothing in them is run,
except a whole commit record. A file is called whole only if the reader of `load`, `inspect` and `export` has read it,
so they accept it.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swapper import _C
from swapper.durability.commit import CommitRecord, files_of, read_commit, sections_of, tensors_of
from swapper.durability.directory import COMMIT_NAME, committed_runs
from swapper.errors import CheckpointError, IoError
from swapper.formats.container import (
    MANIFEST_NAME,
    MAX_END_BYTES,
    ChecksumChunk,
    ContainerLayout,
    Manifest,
    Seal,
    TensorPlace,
    find_seal,
)
from swapper.formats.dcp_format import MAX_METADATA_BYTES, METADATA_NAME, metadata_is_whole, read_directory
from swapper.formats.safetensors import read as read_safetensors
from swapper.formats.sources import PICKLE_MAGIC, ZIP_MAGIC, opened, read_at, read_filled, read_whole
from swapper.formats.torch_file import read_torch_file
from swapper.formats.torch_writer import LOCAL_HEADER
from swapper.formats.zip_reader import ZipRecord, read_index, unpacked_crc32
from swapper.io import beneath
from swapper.io.copying import CopyRange, stream
from swapper.io.engines import open_engine
from swapper.paging.section import EXTERNAL, Page, Section, pieces_of
from swapper.paging.store.page_files import is_frozen

MAX_TAIL_BYTES = 1 << 30  # of a sane tail; it is read whole

Progress = Callable[[int, int], None]
"""Called with the bytes checked and the total bytes."""


@dataclass(frozen=True)
class Fault:
    """Something that differs from its write.

    Attributes:
        offset, nbytes: the run of bytes that has a wrong checksum, or cannot be read.
        what: the fault, in words.
        record: the zip record or section that contains it, "" if there is none.
        tensors: names of the tensors that lie there, wholly or in part.
    """

    path: str
    offset: int
    nbytes: int
    what: str
    record: str = ""
    tensors: tuple[str, ...] = ()


@dataclass
class Report:
    """The result of a verification.

    Attributes:
        kind: "snapshot", "run" or "torch checkpoint" (checked by the CRCs of its zip).
        checked_bytes: bytes that were compared with a checksum.
    """

    path: str
    kind: str
    checked_bytes: int = 0
    nbytes: int = 0
    faults: list[Fault] = field(default_factory=list)


@dataclass(frozen=True)
class _CheckedRange:
    """A run of bytes to be checked, and its description."""

    chunk: ChecksumChunk
    record: str
    tensors: Sequence[TensorPlace]

    def fault(self, path: Path, what: str) -> Fault:
        chunk = self.chunk
        names = [t.name for t in self.tensors if t.offset < chunk.end and chunk.offset < t.offset + t.nbytes]
        return Fault(str(path), chunk.offset, chunk.nbytes, what, self.record, tuple(names))


def verify(path: str | os.PathLike[str], progress: Progress = lambda done, total: None) -> list[Report]:
    """Verify a snapshot (a file, or the directory of a sharded model's), a run's directory (or the directory that the
    manager was given), or a torch checkpoint.

    Raises:
        CheckpointError: it cannot be checked: it has no checksums, swapper cannot read it, or a run is in use.
        IoError: it cannot be opened.
    """
    place = Path(path)
    if (place / METADATA_NAME).exists():
        return [_verify_metadata(place), *(_verify_file(file, progress) for file in sorted(place.glob("rank-*.pt")))]
    if place.is_dir():
        runs = committed_runs(place)
        if not runs:
            raise CheckpointError(f"{place} holds no committed run: name a snapshot, or the directory of a run")
        return [_verify_run(run, progress) for run in runs]
    if not place.exists():
        raise CheckpointError(f"{place} does not exist: name a snapshot, or the directory of a run")
    return [_verify_file(place, progress)]


# --- a snapshot


def _verify_file(path: Path, progress: Progress) -> Report:
    with opened(path) as descriptor:
        nbytes = os.fstat(descriptor).st_size
        last = read_at(descriptor, path, max(0, nbytes - MAX_END_BYTES), MAX_END_BYTES)
        seal = find_seal(last, nbytes)
        if seal is None or seal.end - seal.begin > MAX_TAIL_BYTES:
            report = _verify_unsealed(descriptor, path, last, progress)
        else:
            tail = read_filled(descriptor, path, seal.begin, seal.end - seal.begin)
            report = _verify_sealed(descriptor, path, seal, tail, progress)
    if not report.faults:
        _check_readable(path)
    return report


def _verify_sealed(descriptor: int, path: Path, seal: Seal, tail: bytes, progress: Progress) -> Report:
    nbytes = os.fstat(descriptor).st_size
    report = Report(str(path), "snapshot", nbytes - seal.begin, nbytes)
    report.faults += _check_tail(path, tail, seal)
    manifest = _find_manifest(tail, seal)
    if manifest is not None:
        report.faults += _check({path: _parts_of(manifest)}, report, progress)
    else:  # the directory, if whole, still has checksums of the records before the tail
        report.faults += _check_records(descriptor, path, report, progress, seal.begin)
    return report


def _check_readable(path: Path) -> None:
    """Raise CheckpointError if `load` would refuse the file, though all of it is as it was written."""
    file = read_torch_file(path)
    if f"{file.root}/version" not in file.zip.records:
        raise CheckpointError(f"{path} has no record {file.root}/version, without which torch does not load it")
    for storage in file.skeleton.storages:
        file.record(storage)


def _parts_of(manifest: Manifest) -> list[_CheckedRange]:
    records = sorted(((places[0].offset, key) for key, places in manifest.tensors.items() if places))
    begins = [begin for begin, _ in records]
    parts = []
    for chunk in manifest.chunks:
        number = bisect_right(begins, chunk.offset) - 1
        places = manifest.tensors[records[number][1]] if number >= 0 else ()
        if places and chunk.offset < places[-1].offset + places[-1].nbytes:
            parts.append(_CheckedRange(chunk, f"data/{records[number][1]}", places))
        else:
            parts.append(_CheckedRange(chunk, "", ()))
    return parts


def _check_tail(path: Path, tail: bytes, seal: Seal) -> list[Fault]:
    if zlib.crc32(tail) == seal.crc32:
        return []
    broken = []
    with contextlib.suppress(Exception), zipfile.ZipFile(io.BytesIO(tail)) as archive:  # damaged, it may raise anything
        broken = [info.filename for info in archive.infolist() if not _reads(archive, info)]
    where = f"record {broken[0]}" if broken else "headers or directory of the zip"
    return [Fault(str(path), seal.begin, len(tail), f"the tail is damaged: {where}", broken[0] if broken else "")]


def _reads(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    if re.fullmatch(r"[^/]*/data/[0-9]+", info.filename):
        return True  # not in the tail
    if info.compress_type != zipfile.ZIP_STORED:
        return False
    try:
        archive.read(info)
    except Exception:
        return False
    return True


def _find_manifest(tail: bytes, seal: Seal) -> Manifest | None:
    """Return the manifest, if its own record is whole."""
    name = f"/{MANIFEST_NAME}".encode()
    at = tail.find(name)
    header = at - tail.rfind(b"PK\x03\x04", 0, at)
    begin = at - header
    if at < 0 or begin < 0 or begin + LOCAL_HEADER.size > len(tail) or header == at + 1:
        return None
    fields = LOCAL_HEADER.unpack_from(tail, begin)
    data = begin + LOCAL_HEADER.size + fields[9] + fields[10]
    end = tail.find(b"PK\x07\x08", data)
    if end < 0 or zlib.crc32(tail[data:end]) != int.from_bytes(tail[end + 4 : end + 8], "little"):
        return None
    try:
        return Manifest.decode(tail[data:end], seal.begin)
    except CheckpointError:
        return None


# --- a directory of several ranks


def _verify_metadata(directory: Path) -> Report:
    path = directory / METADATA_NAME
    data = read_whole(path, MAX_METADATA_BYTES)
    whole = metadata_is_whole(data)
    if whole is None:
        raise CheckpointError(
            f"{path} has no checksum, so {directory} is not a snapshot of swapper's, or its end is damaged: it cannot be checked"
        )
    report = Report(str(path), "snapshot", len(data), len(data))
    try:
        what = "" if whole else "it does not have the CRC-32 of its write"
        read_directory(directory)
    except (CheckpointError, IoError) as error:
        what = what or f"the ranks' files are not as it says: {error}"
    if what:
        report.faults.append(Fault(str(path), 0, len(data), what))
    return report


# --- a checkpoint without a seal


def _verify_unsealed(descriptor: int, path: Path, last: bytes, progress: Progress) -> Report:
    nbytes = os.fstat(descriptor).st_size
    report = Report(str(path), "torch checkpoint", 0, nbytes)
    begin = read_at(descriptor, path, 0, 9)
    if nbytes and begin[:4] != ZIP_MAGIC and b"PK\x05\x06" not in last:
        return _verify_other(path, begin, report)
    try:
        index = read_index(descriptor, path)
    except CheckpointError as error:
        report.faults.append(_at_end(report, f"its end is missing or damaged, or this is no checkpoint: {error}"))
        return report
    if any(name.endswith(f"/{MANIFEST_NAME}") for name in index.records):
        report.kind = "snapshot"
        report.faults.append(_at_end(report, "the seal at the end of the file is damaged"))
    if all(record.crc32 == 0 for record in index.records.values() if record.nbytes):
        raise CheckpointError(f"{path} has no checksums (config.save.compute_crc32 was off): it cannot be checked")
    report.faults += _check_records(descriptor, path, report, progress, nbytes)
    return report


def _at_end(report: Report, what: str) -> Fault:
    return Fault(report.path, max(0, report.nbytes - 4096), min(report.nbytes, 4096), what)


def _verify_other(path: Path, begin: bytes, report: Report) -> Report:
    """Check a file that is no zip: for a known kind, only truncation can be detected."""
    kind = "no checkpoint that swapper knows"
    if begin[8:] == b"{":
        try:
            read_safetensors(path)
        except CheckpointError as error:
            report.kind = "safetensors file"
            report.faults.append(Fault(str(path), 0, report.nbytes, str(error)))
            return report
        kind = "a safetensors file, whose header fits its size"
    elif begin[:2] == PICKLE_MAGIC:
        kind = "a torch checkpoint of before torch 1.6"
    raise CheckpointError(f"{path} is {kind}: there are no checksums in it, so it cannot be checked")


def _check_records(descriptor: int, path: Path, report: Report, progress: Progress, before: int) -> list[Fault]:
    """Check the records of a zip that begin before offset `before` by the CRCs of its directory."""
    try:
        index = read_index(descriptor, path)
    except CheckpointError as error:
        return [Fault(str(path), 0, report.nbytes, f"the directory of the zip cannot be read: {error}")]
    records = [record for record in index.records.values() if record.header_offset < before]
    faults = [
        Fault(str(path), record.header_offset, 0, "its header has another name than the directory", record.name)
        for record in records
        if not _has_its_name(descriptor, path, record)
    ]
    for record in records:
        if record.compressed and unpacked_crc32(descriptor, path, record) != record.crc32:
            faults.append(Fault(str(path), record.offset, record.nbytes, "it has another CRC-32", record.name))
    stored = [record for record in records if not record.compressed]
    parts = [
        _CheckedRange(ChecksumChunk(record.offset, record.nbytes, record.crc32), record.name, ()) for record in stored
    ]
    return faults + _check({path: parts}, report, progress)


def _has_its_name(descriptor: int, path: Path, record: ZipRecord) -> bool:
    name = record.name.encode()
    header = read_at(descriptor, path, record.header_offset, LOCAL_HEADER.size + len(name))
    return header[26:28] == len(name).to_bytes(2, "little") and header[LOCAL_HEADER.size :] == name


# --- a run


def _verify_run(directory: Path, progress: Progress) -> Report:
    with at_rest(directory, "verify"):
        report = Report(str(directory), "run")
        commit = directory / COMMIT_NAME
        nbytes = report.nbytes = report.checked_bytes = commit.stat().st_size
        try:
            record = read_commit(directory)
        except CheckpointError as error:
            report.faults.append(Fault(str(commit), 0, nbytes, str(error)))
            return report
        if record is None:
            raise CheckpointError(f"{directory} holds no committed run")
        report.faults += _check(_parts_of_run(directory, record), report, progress) + _changed_external(record)
        return report


@contextlib.contextmanager
def at_rest(directory: Path, verb: str) -> Iterator[None]:
    """Prevent a run from beginning in `directory`, and refuse to `verb` it if one is active there.

    Raises:
        CheckpointError: a process has the run open.
    """
    try:
        descriptor = beneath.open_file(directory / "lock", os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:  # of a copy
        yield
        return
    except OSError as error:
        raise CheckpointError(f"{directory / 'lock'} is no file of swapper's ({error.strerror}): remove it") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"{directory} is in use by a run: {verb} it later, or a snapshot of it now") from None
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have it too
        os.close(descriptor)


def find_damage(directory: Path, record: CommitRecord) -> list[Fault]:
    """Compare a commit's content in files that may be a snapshot's too with its checksums; return the faults."""
    parts = _parts_of_run(directory, record)
    shared = {path: found for path, found in parts.items() if is_frozen(path) or not path.exists()}
    return _check(shared) or find_cut_off(directory, record)


def find_cut_off(directory: Path, record: CommitRecord) -> list[Fault]:
    """Return which of a commit's files are missing, or have been cut off while they were a snapshot's too: no run opens them."""
    nbytes = ContainerLayout.plan([section.nbytes for section in record.sections]).tail_offset
    paths = sections_of(directory, record)[1]
    faults = []
    for path in (path for number in files_of(record) for path in paths[number]):
        size = path.stat().st_size if path.exists() else 0
        if size < nbytes and (is_frozen(path) or not path.exists()):
            faults.append(Fault(str(path), size, nbytes - size, f"it has {size} of {nbytes} bytes"))
    return faults


def _changed_external(record: CommitRecord) -> list[Fault]:
    """Return the user's files that the run needs and whose size or time differs from the commit."""
    faults = []
    for name, (nbytes, changed_ns) in record.external.items():
        try:
            status = Path(name).stat()
            if (status.st_size, status.st_mtime_ns) == (nbytes, changed_ns):
                continue
            what = "it was changed since the commit"
        except OSError as error:
            what = f"it cannot be checked: {error}"
        faults.append(Fault(name, 0, nbytes, f"frozen parameters are read from it, and {what}"))
    return faults


def _parts_of_run(directory: Path, record: CommitRecord) -> dict[Path, list[_CheckedRange]]:
    sections, paths = sections_of(directory, record)
    layout = ContainerLayout.plan([section.nbytes for section in record.sections])
    headers = [
        _CheckedRange(ChecksumChunk(offset, len(data), zlib.crc32(data)), "", ()) for offset, data in layout.headers()
    ]
    parts = {paths[number][0]: list(headers) for number in files_of(record)}
    for section in sections:
        tensors = tensors_of(section)
        for page in section.pages:
            if page.location != EXTERNAL:  # external content has no checksums: see _changed_external
                chunk = ChecksumChunk(page.file_offset, page.nbytes, -1 if page.crc32 is None else page.crc32)
                where = paths[page.location or 0][page.drive]
                parts.setdefault(where, []).append(_CheckedRange(chunk, section.plan.name, tensors))
    return parts


def find_losses(path: Path, number: int, sections: Sequence[Section]) -> list[Fault]:
    """Compare what a run needs of its changed file `number` with its checksums; return the faults.

    Content that only the previous commit names was read in the step since. A read past the end of a file would have
    failed that step; so of that, only wrong bytes that exist count.

    Args:
        path: of the file.
        number: of the file, as pages name it.
        sections: of the run.
    """
    needed, past = [], []
    for section in sections:
        tensors = tensors_of(section)

        def part(
            piece: Page, crc32: int, section: Section = section, tensors: Sequence[TensorPlace] = tensors
        ) -> _CheckedRange:
            return _CheckedRange(ChecksumChunk(piece.file_offset, piece.nbytes, crc32), section.plan.name, tensors)

        for piece in [piece for piece in pieces_of(section) if piece.drive == 0]:
            if piece.location == number and piece.crc32 is not None:
                needed.append(part(piece, piece.crc32))
            elif piece.committed == number and piece.committed_crc32 is not None:
                past.append(part(piece, piece.committed_crc32))
    wrong = _check({path: past}) if past else []
    return (_check({path: needed}) if needed else []) + [fault for fault in wrong if fault.what.startswith("CRC-32")]


# --- streaming


def _check(
    files: Mapping[Path, Sequence[_CheckedRange]],
    report: Report | None = None,
    progress: Progress = lambda done, total: None,
) -> list[Fault]:
    """Compare every part of every file with its checksum; count the bytes in `report`."""
    faults = []
    report = report if report is not None else Report("", "")
    total = report.checked_bytes + sum(part.chunk.nbytes for parts in files.values() for part in parts)
    report.nbytes = max(report.nbytes, total)
    engine = open_engine([path.parent for path in list(files)[:1]])
    try:
        for path, parts in files.items():
            try:
                file = _C.File(str(path), read_only=True)
            except IoError as error:
                faults.append(Fault(str(path), 0, 0, f"the file cannot be opened: {error}"))
                continue
            with contextlib.closing(file):
                ordered = sorted((part for part in parts if part.chunk.nbytes), key=lambda part: part.chunk.offset)
                runs = [CopyRange(file, part.chunk.offset, part.chunk.nbytes, None, part.record) for part in ordered]
                for part, (_, outcome) in zip(ordered, stream(engine, runs), strict=True):
                    if isinstance(outcome, IoError):
                        faults.append(part.fault(path, f"cannot be read: {outcome}"))
                    elif outcome != part.chunk.crc32:
                        faults.append(part.fault(path, f"CRC-32 {outcome:08x} instead of {part.chunk.crc32:08x}"))
                    report.checked_bytes += part.chunk.nbytes
                    progress(report.checked_bytes, total)
    finally:
        engine.close()
    return faults

"""Defines the commit record: the small file that makes a step durable, and from which a killed run resumes.

For every piece of every section it names the swap file with its content as of the step, and that content's CRC-32; it
also holds everything else that belongs to the step. It is a torch checkpoint without payload, sealed so that a change
of any byte is detected (container.py). It is published by writing a temporary file, syncing and renaming it: a reader
finds it whole, or the previous one.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from swapper.durability.directory import COMMIT_NAME, FALLBACK_NAME
from swapper.durability.ranks import CommitId
from swapper.errors import CheckpointError, IoError, remedy
from swapper.formats.container import MAX_END_BYTES, ContainerLayout, PreparedTail, find_seal
from swapper.formats.pickle_writer import plain_global_names
from swapper.formats.torch_file import load_bytes
from swapper.io import beneath
from swapper.io.tensor_bytes import SECTOR_BYTES
from swapper.paging.section import EXTERNAL
from swapper.runtime import records

FORMAT = 2  # of the record; other numbers are refused
MAX_BYTES = 4 << 30
"""Bytes of a record, which includes the registered objects' state and `extra`."""


def _numbers(dtype: torch.dtype) -> records.Shape:
    def check(value: object) -> None:
        if not isinstance(value, torch.Tensor) or value.dtype != dtype or value.ndim != 1 or not value.is_contiguous():
            raise ValueError(f"it is not a list of {dtype}")

    return check


def _swap_name(value: Any) -> None:
    records.name(value)
    if not value.endswith(".swap"):
        raise ValueError(f"it is {value!r}, not the name of a swap file")


_texts = records.mapping(records.text, records.anything)
_SHAPE = records.fields(
    {
        "format": records.exactly(FORMAT),
        "step": records.whole(),
        "rank": records.whole(),
        "world_size": records.whole(1),
        "boot_id": records.text,
        "optimizer": records.text,
        "placement": records.mapping(records.text, records.text),
        "plans": records.listing(records.text),
        "files": records.mapping(records.whole(most=(1 << 31) - 1), _swap_name),
        "sections": records.fields(
            {
                "nbytes": records.listing(records.whole()),
                "piece_bytes": records.listing(records.whole(1)),
                "counts": records.listing(records.whole(1, (1 << 31) - 1)),
                "files": _numbers(torch.int32),
                "crc32s": _numbers(torch.int64),
            }
        ),
        "param_groups": records.listing(_texts),
        "state_entries": records.fields(
            {
                "kinds": records.listing(
                    records.listing(records.row(records.text, records.anything, records.anything))
                ),
                "of": records.mapping(records.text, records.whole()),
            }
        ),
        "registered": _texts,
        "extra": records.mapping(records.anything, records.anything),
        "rng": records.nullable(_texts),
        "external": records.mapping(records.path, records.row(records.whole(), records.whole(-(1 << 63)))),
    },
    {
        "members": records.nullable(records.listing(records.listing(records.text))),
        "edits": records.whole(),
        "job": records.text,
        "shards": records.mapping(records.text, records.row(records.whole(), records.whole())),
    },
)
_USERS = ("registered", "extra")
"""Fields with values of the user's, of any form."""
_NO_PAYLOAD = ContainerLayout.plan([])


@dataclass(frozen=True)
class SectionRecord:
    """The location of one section's content: pieces of `piece_bytes` (the last may be shorter).

    Each has the number of its file (EXTERNAL: one of the user's) and its CRC-32 (-1: unknown, for external content).
    Together they have `nbytes`.
    """

    nbytes: int
    piece_bytes: int
    files: list[int]
    crc32s: list[int]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each piece."""
        return [min(self.piece_bytes, self.nbytes - n * self.piece_bytes) for n in range(len(self.files))]


@dataclass(frozen=True)
class CommitRecord:
    """A committed step.

    Attributes:
        step: optimizer steps taken.
        boot_id: the kernel's at the commit; it differs after a power loss or a crash of the system.
        optimizer: class of the user's optimizer.
        placement: of "param" and "state".
        plans: the layout, as `describe_plans` returns it; compared on resume.
        files: names of the swap files by number.
        sections: location of each section's content, in the order of `plans`.
        param_groups: the optimizer's settings, in torch's packed form.
        state_entries: of the optimizer's state of each parameter, as `StateEntries.pack` returns it.
        registered: state dicts by name.
        rng: states of the random number generators, if requested.
        external: paths of external files, with size in bytes and modification time in nanoseconds.
        edits: how often parameters were changed from outside since the step.
        job: of the run that all its ranks share; "" for one rank alone.
        members: names of the parameters of each of the optimizer's groups, in order; None if they are the script's own.
        shards: of a sharded model, by parameter, the first row that this rank has, and the rows of the whole.
    """

    step: int
    rank: int
    world_size: int
    boot_id: str
    optimizer: str
    placement: dict[str, str]
    plans: list[str]
    files: dict[int, str]
    sections: list[SectionRecord]
    param_groups: list[dict[str, object]]
    state_entries: dict[str, Any]
    registered: dict[str, object]
    extra: dict[str, object]
    rng: dict[str, object] | None
    external: dict[str, tuple[int, int]] = field(default_factory=dict)
    members: list[list[str]] | None = None
    edits: int = 0
    job: str = ""
    shards: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def id(self) -> CommitId:
        """Identifies the commit among all ranks."""
        return self.step, self.edits


def files_of(record: CommitRecord) -> frozenset[int]:
    """Return the numbers of the swap files that the commit needs."""
    return frozenset(number for section in record.sections for number in section.files if number != EXTERNAL)


def encode_commit(record: CommitRecord) -> bytes:
    """Return the bytes of the record's file.

    Raises:
        CheckpointError: torch.load(weights_only=True) could not read a registered object's state.
    """
    content: dict[str, object] = {"format": FORMAT, **{k: v for k, v in vars(record).items() if k != "sections"}}
    content["sections"] = {
        "nbytes": [section.nbytes for section in record.sections],
        "piece_bytes": [section.piece_bytes for section in record.sections],
        "counts": [len(section.files) for section in record.sections],
        "files": torch.tensor(
            [file for section in record.sections for file in section.files], dtype=torch.int32, device="cpu"
        ),
        "crc32s": torch.tensor(
            [crc for section in record.sections for crc in section.crc32s], dtype=torch.int64, device="cpu"
        ),
    }
    return PreparedTail(_NO_PAYLOAD, content, lambda tensor: None).build([])


def check_state(state: object) -> None:
    """Raise CheckpointError unless torch.load(weights_only=True) can read `state` back."""
    PreparedTail(_NO_PAYLOAD, state, lambda tensor: None)


def publish_commit(directory: Path, data: bytes, durable: bool, name: str = COMMIT_NAME) -> None:
    """Replace the directory's commit record with `data`.

    Args:
        durable: sync file and directory, so that the record survives a power loss.
        name: of the record's file.
    """
    try:
        beneath.replace_file(directory / name, data, durable)
    except OSError as error:
        detail = f"the last step is not committed yet: {remedy(error.errno)}, and continue: it is tried again"
        if name != COMMIT_NAME:
            detail = f"the snapshot is not taken: {remedy(error.errno)}, and take it again"
        raise IoError("commit", str(directory / name), 0, len(data), error.errno or 0, detail) from error


def read_commit(directory: Path, name: str = COMMIT_NAME) -> CommitRecord | None:
    """Return the directory's committed step, or None if it has none.

    Raises:
        CheckpointError: the record is damaged, or of another version.
    """
    path = directory / name
    remedy = "start from a snapshot with resume='discard'"
    try:
        data = beneath.read_small(path, MAX_BYTES)
        seal = find_seal(data[-MAX_END_BYTES:], len(data))
        if seal is None or seal.begin != 0 or zlib.crc32(data[: seal.end]) != seal.crc32:
            raise CheckpointError(f"{path} is damaged: its bytes do not have the CRC-32 of their write: {remedy}")
        content = load_bytes(data, path, nested=_USERS, names=plain_global_names())
        if not isinstance(content, dict) or "format" not in content:
            raise ValueError("it is no commit record")
        if type(content["format"]) is int and content["format"] != FORMAT:
            raise CheckpointError(f"{path} is of format {content['format']}, this swapper reads {FORMAT}: {remedy}")
        _SHAPE(content)
        del content["format"]
        record = CommitRecord(**{**content, "sections": _split(content["sections"])})
        _check_sections(record)
        return record
    except FileNotFoundError:
        return None
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # a damaged file can make zipfile or torch raise anything
        raise CheckpointError(f"{path} cannot be read ({error}): {remedy}") from error


def named_files(directory: Path) -> set[str]:
    """Return the names of the swap files that the directory's records name; none without a record.

    Raises:
        CheckpointError: as `read_commit`.
    """
    records = [read_commit(directory, name) for name in (COMMIT_NAME, FALLBACK_NAME)]
    return {file for record in records if record is not None for file in record.files.values()}


def _split(packed: dict[str, Any]) -> list[SectionRecord]:
    files, crc32s = packed["files"].tolist(), packed["crc32s"].tolist()
    sections = []
    begin = 0
    for nbytes, piece_bytes, count in zip(packed["nbytes"], packed["piece_bytes"], packed["counts"], strict=True):
        end = begin + count
        sections.append(SectionRecord(nbytes, piece_bytes, files[begin:end], crc32s[begin:end]))
        begin = end
    return sections


def _check_sections(record: CommitRecord) -> None:
    """Raise ValueError if a section does not consist of pieces, or lies in files that the record lacks."""
    if not {"param", "state"} <= record.placement.keys():
        raise ValueError("it lacks the placement of parameters and state")
    if len(set(record.files.values())) < len(record.files):
        raise ValueError("two of its files have the same name")
    for number, section in enumerate(record.sections):
        if section.piece_bytes % SECTOR_BYTES:
            raise ValueError(f"section {number} has pieces of {section.piece_bytes} bytes")
        if len(section.files) != max(1, -(-section.nbytes // section.piece_bytes)):
            raise ValueError(f"section {number} of {section.nbytes} bytes has {len(section.files)} pieces")
        unknown = set(section.files) - record.files.keys() - {EXTERNAL}
        if unknown:
            raise ValueError(f"section {number} lies in file {min(unknown)}, which has no name")
        if min(section.crc32s) < -1 or max(section.crc32s) >= 1 << 32:
            raise ValueError(f"section {number} has invalid checksums")

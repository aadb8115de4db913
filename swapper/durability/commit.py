"""Defines the commit record, the small file that makes a step durable, and the layout that it describes.

For every piece of every section the record names the swap file with its content as of the step, and that content's CRC-32; it
also holds everything else that belongs to the step. It is a torch checkpoint without payload, sealed so that a change
of any byte is detected (container.py). It is published by writing a temporary file, syncing and renaming it: a reader
finds it whole, or the previous one.

The layout is a line for each section, `group 0 param float32: 8192 bytes`, and for each of its tensors, `head.weight
param: float32 [50, 64] at 0`. So a record needs no model to say what it has, and where.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from swapper.durability.directory import COMMIT_NAME, FALLBACK_NAME, SPARE_NAME
from swapper.durability.ranks import CommitId
from swapper.errors import CheckpointError, IoError, remedy
from swapper.formats.container import MAX_END_BYTES, ContainerLayout, PreparedTail, TensorPlace, find_seal
from swapper.formats.torch_file import load_bytes
from swapper.formats.torch_writer import plain_global_names
from swapper.io import beneath
from swapper.io.drives import read_drives
from swapper.io.tensor_bytes import SECTOR_BYTES
from swapper.paging.layout import MIXED, SectionPlan, Slot, TensorSpec
from swapper.paging.section import EXTERNAL, Section
from swapper.runtime import records

FORMAT = 2  # of the record; other numbers are refused
MAX_BYTES = 4 << 30
"""Bytes of a record, which includes the registered objects' state and `extra`."""


def _numbers(dtype: torch.dtype) -> records.Shape:
    def check(value: object) -> None:
        if not isinstance(value, torch.Tensor) or value.dtype != dtype or value.ndim != 1 or not value.is_contiguous():
            raise ValueError(f"it is not a list of {dtype}")

    return check


def _swap_name(value: object) -> None:
    if not records.name(value).endswith(".swap"):
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
        "modules": _texts,
    },
)
_USERS = ("registered", "extra", "modules")
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
        modules: buffers and extra state of the model's modules, as far as a script would not make them so, by name.
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
    modules: dict[str, object] = field(default_factory=dict)

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


def digest_of_script(record: CommitRecord) -> bytes:
    """Return a digest of what a record has of the script: settings, registered objects, `extra`.

    Another digest may be of equal content: pickles differ where objects share parts.
    """
    content = encode_commit(replace(record, plans=[], files={}, sections=[], state_entries={}, edits=0))
    return hashlib.blake2b(content, digest_size=16).digest()


def digest_of_settings(record: CommitRecord) -> bytes:
    """Return a digest of the optimizer's settings alone, which are the same on all ranks. See `digest_of_script`."""
    return digest_of_script(replace(record, registered={}, extra={}, rng=None, modules={}))


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
        spare = directory / SPARE_NAME if name == COMMIT_NAME else None
        beneath.replace_file(directory / name, data, durable, spare=spare)
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
        if not _is_whole(data):  # a run that is in progress may have written over it meanwhile
            data = beneath.read_small(path, MAX_BYTES)
        if not _is_whole(data):
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


def _is_whole(data: bytes) -> bool:
    seal = find_seal(data[-MAX_END_BYTES:], len(data))
    return seal is not None and seal.begin == 0 and zlib.crc32(data[: seal.end]) == seal.crc32


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


_SECTION = re.compile(r"group ([0-9]+) (\w+) (\w+): ([0-9]+) bytes")
_SLOT = re.compile(r"(.+) (\S+): (\w+) \[([0-9, ]*)\] at ([0-9]+)")


def describe_plans(plans: Sequence[SectionPlan]) -> list[str]:
    """Return one line for each tensor and section, such that equal lines mean an equal layout."""
    lines = []
    for plan in plans:
        lines.append(f"{plan.name}: {plan.nbytes} bytes")
        lines += [
            f"{slot.spec.owner} {slot.spec.kind}: {str(slot.spec.dtype).removeprefix('torch.')} "
            f"{list(slot.spec.shape)} at {slot.offset}"
            for slot in plan.slots
        ]
    return lines


def plans_of(lines: Sequence[str]) -> list[SectionPlan]:
    """Return the plans that `describe_plans` has described.

    Raises:
        ValueError, LookupError, AttributeError: the lines are not such a description.
    """
    found: list[tuple[tuple[str, ...], list[Slot]]] = []
    for line in lines:
        if slot := _SLOT.fullmatch(line):
            owner, kind, dtype, sizes, offset = slot.groups()
            shape = tuple(int(size) for size in sizes.split(", ") if size)
            found[-1][1].append(Slot(TensorSpec(owner, kind, getattr(torch, dtype), shape), int(offset)))
        elif section := _SECTION.fullmatch(line):
            found.append((section.groups(), []))
        else:
            raise ValueError(f"{line!r} describes no section and no tensor")
    return [
        SectionPlan(int(group), family, None if dtype == MIXED else getattr(torch, dtype), tuple(slots), int(nbytes))
        for (group, family, dtype, nbytes), slots in found
    ]


def tensors_of(section: Section) -> list[TensorPlace]:
    """Return the names of a section's tensors, for a person, and where they lie in the container."""
    slots = section.plan.slots
    return [TensorPlace(name_of(slot.spec), section.file_offset + slot.offset, slot.spec.nbytes) for slot in slots]


def name_of(spec: TensorSpec) -> str:
    """Return a tensor's name, for a person."""
    return spec.owner if spec.kind == "param" else f"{spec.owner} {spec.kind}"


def sections_of(directory: Path, record: CommitRecord) -> tuple[list[Section], dict[int, list[Path]]]:
    """Return a commit's sections, all paged, which say where their content is; and the parts of each swap file, by drive.

    Raises:
        CheckpointError: the record contradicts itself.
        DirectoryError: the record of the run's drives cannot be read.
    """
    drives = read_drives(directory)
    try:
        layout = ContainerLayout.plan([section.nbytes for section in record.sections])
        sections = []
        for place, located, plan in zip(layout.records, record.sections, plans_of(record.plans), strict=True):
            section = Section(plan, place.offset, located.piece_bytes)
            for page, file, crc32 in zip(section.pages, located.files, located.crc32s, strict=True):
                page.location, page.crc32 = file, crc32 if crc32 >= 0 else None
            sections.append(section)
        pages = [page for section in sections for page in section.pages]
        for page, drive in zip(pages, drives.assign_to_drives([page.nbytes for page in pages]), strict=True):
            page.drive = drive
    except (LookupError, AttributeError, TypeError, ValueError, CheckpointError) as error:
        raise CheckpointError(f"{directory}: its commit contradicts itself ({error!r}): take another copy") from error
    return sections, {number: drives.paths(name) for number, name in record.files.items()}


def check_trained(record: CommitRecord, parameters: Collection[str], trained: Collection[str]) -> None:
    """Raise CheckpointError if the record has optimizer state for parameters of this model that are not trained here.

    Args:
        parameters: names of all.
        trained: names of those that are in the optimizer, and require gradients or have state in the record.
    """
    lacking = [name for name in record.state_entries["of"] if name not in trained]
    if lacking and all(name in parameters for name in lacking):
        shown = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
        raise CheckpointError(
            f"at step {record.step} the directory's run trains parameters that are in no group of the optimizer here: "
            f"{shown}. If they were added later (add_param_group), add them before manager.offload when you "
            "resume: `manager.trained` has the names of the parameters that the run trains"
        )


def check_group_count(record: CommitRecord, count: int) -> None:
    """Raise CheckpointError unless the optimizer has as many groups as the record."""
    if count != len(record.param_groups):
        raise CheckpointError(
            f"at step {record.step} the optimizer of the directory's run has {len(record.param_groups)} param_groups, and this one "
            f"has {count}: add or remove groups before manager.offload, as the run did later"
        )


def _codecs_in(lines: Sequence[str]) -> dict[tuple[str, str], str]:
    """Return how a description of plans stores each tensor, by parameter and key. See coded_kind, train/layout."""
    found = {}
    for line in lines:
        tensor = re.match(r"(\S+) ([^\s:]+)(?::(\w+):\w+)?: ", line)
        if tensor is not None:
            found[tensor[1], tensor[2]] = tensor[3] or "exact"
    return found


def _check_same_codecs(theirs: Mapping[tuple[str, str], str], ours: Mapping[tuple[str, str], str]) -> None:
    for (name, key), before in theirs.items():
        now = ours.get((name, key), before)
        if before != now:
            raise CheckpointError(
                f"the directory's run stores {key!r} of {name} by the codec {before!r}, and state_codec= asks for {now!r}: a run "
                "keeps its codecs. Say the state_codec= that it began with, or pass resume='discard' to delete the run"
            )


def _differences(theirs: Sequence[str], ours: Sequence[str]) -> list[str]:
    """Return a line for each tensor that differs between the run and the model, parameters first."""
    run, model = (dict(re.sub(r" at \d+$", "", line).split(": ", 1) for line in lines) for lines in (theirs, ours))
    others = [name for name in run if name in model and run[name] != model[name]]
    found = [f"- {name}: {run[name]} in the run, {model[name]} in the model" for name in others]
    found += [f"- only in the run: {name}: {value}" for name, value in run.items() if name not in model]
    found += [f"- only in the model: {name}: {value}" for name, value in model.items() if name not in run]
    sections = [line for line in found if _SECTION.search(line)]
    return sorted((line for line in found if line not in sections), key=lambda line: " param: " not in line) or sections


def check_same(record: CommitRecord, plans: Sequence[SectionPlan], optimizer: str) -> None:
    """Raise CheckpointError unless the record is of this model and optimizer; the message lists the differences.

    Args:
        record: of the last commit.
        plans: the sections of this run.
        optimizer: its class's name.
    """
    ours, theirs = describe_plans(plans), record.plans
    _check_same_codecs(_codecs_in(theirs), _codecs_in(ours))
    differences = _differences(theirs, ours)
    if optimizer != record.optimizer:
        differences.insert(0, f"- optimizer {optimizer} instead of {record.optimizer}")
    if not differences and ours != theirs:
        differences.append("- the same tensors in another order")
    if not differences and [plan.nbytes for plan in plans] != [section.nbytes for section in record.sections]:
        differences.append("- sections of other sizes")
    if differences:
        shown = "\n".join(differences[:20]) + (f"\n- and {len(differences) - 20} more" if len(differences) > 20 else "")
        raise CheckpointError(
            f"the directory's run is of another model or optimizer:\n{shown}\n"
            "Build the same model and optimizer, or pass resume='discard' to delete the run"
        )

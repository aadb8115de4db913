"""Reads a run's own directory as a checkpoint: its last commit, whose tensors lie in pieces of several files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from swapper.checkpoint.writers import ExportTensor
from swapper.durability.commit import CommitRecord, read_commit
from swapper.durability.described_layout import name_of, sections_of
from swapper.durability.directory import COMMIT_NAME
from swapper.durability.verify import at_rest
from swapper.errors import CheckpointError
from swapper.formats.sources import FileStamp
from swapper.formats.stored import StoredTensor
from swapper.paging.layout import Slot, TensorSpec
from swapper.paging.section import EXTERNAL, Section

StoredParts = tuple[StoredTensor, ...]


def find_run(path: Path) -> Path | None:
    """Return the directory of the committed run that `path` is, or that it has below; None if it has no run.

    Raises:
        CheckpointError: there are several, or the run has no commit.
    """
    if not path.is_dir():
        return None
    runs = (
        [path] if (path / COMMIT_NAME).exists() else sorted(p.parent for p in path.glob(f"rank-*-of-*/{COMMIT_NAME}"))
    )
    if len(runs) > 1:
        raise CheckpointError(f"{path} holds the runs of {len(runs)} ranks: name one of them, such as {runs[0]}")
    if not runs and any(next(path.glob(f"{below}turn-*.swap"), None) for below in ("", "rank-*-of-*/")):
        raise CheckpointError(f"{path} holds a run without a commit, which nothing can read: name one of its snapshots")
    return runs[0] if runs else None


def read_run(directory: Path) -> tuple[CommitRecord, list[tuple[TensorSpec, StoredParts | None]]]:
    """Return the run's last commit, and its tensors with their runs of bytes; None for those in files of the user.

    Raises:
        CheckpointError: a process has the run open; or the record cannot be read.
    """
    with at_rest(directory, "read"):
        record = read_commit(directory)
        if record is None:
            raise CheckpointError(f"{directory} holds no committed run")
        sections, files = sections_of(directory, record)
        slots = ((section, slot) for section in sections for slot in section.plan.slots)
        return record, [(slot.spec, _parts(section, slot, files)) for section, slot in slots]


def _parts(section: Section, slot: Slot, files: Mapping[int, Sequence[Path]]) -> StoredParts | None:
    """Return the runs of bytes that have a tensor's elements, in order; None: they are external."""
    spec, found = slot.spec, []
    for page in section.pages_of(slot.offset, slot.end):
        if page.location is None or page.location == EXTERNAL:
            return None
        first, last = max(slot.offset, page.offset), min(slot.end, page.offset + page.nbytes)
        place = (files[page.location][page.drive], page.file_offset + first - page.offset, last - first)
        found.append(StoredTensor(name_of(spec), *place, spec.dtype, ((last - first) // spec.dtype.itemsize,)))
    return tuple(found)


def parameters_of(directory: Path) -> tuple[list[ExportTensor], list[str], dict[Path, FileStamp]]:
    """Return the run's parameters, the names of its other tensors, and the stamps of the files.

    Raises:
        CheckpointError: as `read_run`; or parameters are read from files of the user.
    """
    _, tensors = read_run(directory)
    chosen = []
    for tensor, parts in tensors:
        if tensor.kind == "param":
            if parts is None:
                raise CheckpointError(
                    f"{directory}: parameter {tensor.owner} is read from a file of yours (external=), so the run has no copy of "
                    "it: take a snapshot, and export that"
                )
            chosen.append(ExportTensor(tensor.owner, tensor.dtype, tensor.shape, parts))
    stamps = {part.path: FileStamp.of(part.path) for tensor in chosen for part in tensor.parts}
    return chosen, [name_of(tensor) for tensor, _ in tensors if tensor.kind != "param"], stamps

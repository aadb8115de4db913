"""Describes a run's layout in lines, as commit records have it; compares it with a model's, and finds content by it.

A line for each section, `group 0 param float32: 8192 bytes`, and for each of its tensors, `head.weight param: float32 [50, 64]
at 0`. So a record needs no model to say what it has, and where.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from swapper.durability.commit import CommitRecord
from swapper.errors import CheckpointError
from swapper.formats.container import ContainerLayout, TensorPlace
from swapper.io.drives import read_drives
from swapper.paging.layout import MIXED, SectionPlan, Slot, TensorSpec
from swapper.paging.section import Section

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
        trained: names of those that are in the optimizer and require gradients.
    """
    lacking = [name for name in record.state_entries["of"] if name not in trained]
    if lacking and all(name in parameters for name in lacking):
        shown = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
        raise CheckpointError(
            f"at step {record.step} the directory's run trains parameters that are frozen here, or in no group of the optimizer: "
            f"{shown}. If they were added later (add_param_group, requires_grad_), add them before manager.offload when you "
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

"""Everything by which swapper reads bytes that nobody vouches for, as functions of a directory with such a file.

Each is given the files of one of the originals, damaged. It may succeed, or raise an error of swapper's; all else is a failure.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import swapper
from fuzz import originals
from swapper.checkpoint import load
from swapper.checkpoint.exporting import export
from swapper.checkpoint.inspecting import inspect
from swapper.cli.runs import look_at
from swapper.durability.commit import read_commit
from swapper.durability.directory import RETENTION_NAME
from swapper.durability.snapshot import Retention
from swapper.durability.verify import verify
from swapper.errors import BudgetError, ConfigError, SwapperError
from swapper.integrations.transformers import check_directory
from swapper.io.drives import read_record
from swapper.io.files import OpenFiles, Stripes

Read = Callable[[Path], Any]
AGREES = "-agrees"
OUTPUT = "out"
"""Below the directory: what a reader may write."""


def file_in(directory: Path) -> Path:
    return next(path for path in sorted(directory.iterdir()) if path.is_file())


def tensors_of(tree: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, torch.Tensor):
        yield name, (tree.dtype, tuple(tree.shape), tree.tolist())
    elif isinstance(tree, dict | list | tuple) and depth < 8:
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors_of(value, f"{name}.{key}", depth + 1)


def _export(path: Path, to: str, what: str = "model") -> None:
    output = path if path.is_dir() else path.parent
    export(path, output / OUTPUT / f"exported-{to}-{what}", to, what=what)


def _each(*reads: Read) -> Read:
    """All of them, whatever the ones before raised of ours."""

    def read(path: Path) -> None:
        errors = []
        for one in reads:
            try:
                one(path)
            except SwapperError as error:
                errors.append(error)
        if errors:
            raise errors[-1]

    return read


def agree(path: Path) -> None:
    """What `verify` calls whole, is read; `torch.load` then reads it too, and gets the same."""
    if any(report.faults for report in verify(path)):
        return
    with contextlib.suppress(torch.serialization.pickle.UnpicklingError):
        ours = load(path, verify=True)
        theirs = torch.load(path)
        if dict(tensors_of(ours)) != dict(tensors_of(theirs)):
            raise AssertionError("load gives something else than torch.load")


def _through(read: Read) -> Read:
    return lambda directory: read(file_in(directory))


TORCH = [
    load,
    lambda path: load(path, mmap=True),
    lambda path: load(path, verify=True),
    lambda path: load(path, map_location="meta"),
    inspect,
    lambda path: _export(path, "safetensors"),
    lambda path: _export(path, "torch", "all"),
]


def _dcp_load(directory: Path) -> None:
    _load_by_planner(directory, {"a": torch.zeros(6, 5), "b": torch.zeros(7, dtype=torch.long)})


def _flat_dcp_load(directory: Path) -> None:
    """The tensors: torch's own planner runs what the others' pickles name."""
    _load_by_planner(directory, {"model.a": torch.zeros(6, 5), "head": torch.zeros(7, dtype=torch.long)})


def _load_by_planner(directory: Path, wanted: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from swapper.checkpoint.dcp_reader import StorageReader

    reader = StorageReader(directory)
    reader.read_metadata()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            dcp.load(wanted, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        for failure, frames in error.failures.values():
            if "torch" not in Path(frames[-1].filename).parts:  # torch's planner refuses too, in its own way
                raise failure from error


def _quantised(path: Path) -> None:
    model = originals.model()
    swapper.load(model, path, host_memory="4MiB")
    try:
        with torch.no_grad():
            model(torch.ones(1, 64))
    finally:
        swapper.loaded(model).unload()


def _stripes(directory: Path) -> None:
    files = OpenFiles()
    opened = Stripes([directory / "one", directory / "two"]).open("x", files, writing=False)
    _ = opened.nbytes
    list(opened.segments(5000, 20_000))
    for file in opened.files:
        files.release(file)


def _retention(directory: Path) -> None:
    Retention(directory)


def _run(directory: Path) -> None:
    names = {path.name for path in directory.iterdir()}
    if RETENTION_NAME in names:
        _retention(directory)
    _each(read_commit, verify, inspect, look_at, lambda path: _export(path, "torch"))(directory)


def _resume(directory: Path) -> None:
    """A run goes on from there: in a copy, since it may write."""
    run = directory / OUTPUT / "rank-0-of-1"
    shutil.copytree(directory, run, ignore=shutil.ignore_patterns(OUTPUT))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(160, 160), torch.nn.Linear(160, 160))
    with swapper.SwapManager(directory / OUTPUT, host_memory="8MiB", resume="auto") as manager:
        manager.offload(model, torch.optim.AdamW(model.parameters()), params="nvme", optimizer_state="nvme")


READERS: dict[str, tuple[str, Read]] = {
    "torch": ("torch-file", _through(_each(*TORCH))),
    "torch-agrees": ("torch-file", _through(agree)),
    "swapper": ("swapper-file", _through(_each(*TORCH))),
    "old-torch": ("old-torch-file", _through(_each(load, inspect, verify))),
    "safetensors": ("safetensors-file", _through(_each(inspect, lambda path: _export(path, "torch"), verify))),
    "huggingface": ("huggingface", _each(inspect, lambda path: _export(path, "torch"))),
    "dcp": ("dcp", _each(inspect, lambda path: _export(path, "torch"))),
    "dcp-load": ("dcp", _dcp_load),
    "flat-dcp": (
        "flat-dcp",
        _each(inspect, lambda path: _export(path, "torch"), lambda path: _export(path, "dcp", "all")),
    ),
    "flat-dcp-load": ("flat-dcp", _flat_dcp_load),
    "adapter": ("adapter", _each(inspect, lambda path: _export(path, "torch"), check_directory)),
    "zero": ("zero", lambda path: _export(path, "torch")),
    "quantised": ("quantised", _through(_quantised)),
    "snapshot": ("snapshot", _through(_each(verify, load, inspect))),
    "encoded-snapshot": ("encoded-snapshot", _through(_each(verify, *TORCH))),
    "snapshot-agrees": ("snapshot", _through(agree)),
    "run": ("run-directory", _run),
    "resume": ("run-directory", _resume),
    "stripes": ("stripes", _stripes),
    "drives": ("drives", read_record),
}
"""By name: the original whose files are damaged, and what reads them. For those that end in AGREES it is the bytes that are
damaged, and not what the format says with checksums made right: `verify` is for accidents."""

ALLOWED = (SwapperError, BudgetError, ConfigError)
warnings.simplefilter("ignore")

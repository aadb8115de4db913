"""A forged commit record, with the seal of a sound one: refused by whatever reads it, at once and in little memory.

Its pickle has one more entry, of opcodes by which a few bytes ask for endless work, or for memory. A test that hangs is ended by
pytest's timeout.
"""

from __future__ import annotations

import io
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.twins import adamw
from fuzz.mutating import sealed
from fuzz.originals import run_directory

import swapper
from swapper.checkpoint.exporting import export
from swapper.checkpoint.inspecting import inspect
from swapper.cli.runs import look_at, remove_leftovers
from swapper.durability.commit import encode_commit, read_commit
from swapper.durability.directory import COMMIT_NAME
from swapper.durability.verify import verify
from swapper.errors import CheckpointError, SwapperError
from swapper.runtime.free_memory import peak_resident_bytes

MAX_GROWTH_BYTES = 128 << 20
KEPT = [b"r" + (100_000 + n).to_bytes(4, "little") for n in range(4)]
"""Opcodes that keep the last value, under numbers that a real record does not use."""
GOT = [b"j" + keep[1:] for keep in KEPT]


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def doubled(levels: int) -> bytes:
    return b"K\x01" + (KEPT[0] + GOT[0] + b"\x86") * levels


def repeated(inner: bytes, count: int, keep: int) -> bytes:
    """A list of one value, many times."""
    return b"](" + inner + KEPT[keep] + GOT[keep] * (count - 1) + b"e"


def tensor(kind: str, size: bytes, stride: bytes) -> bytes:
    storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text("0") + text("cpu") + b"K\x01tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + size + stride + b"\x89}tR"


def called(name: str, *arguments: bytes) -> bytes:
    return b"c" + name.replace(" ", "\n").encode() + b"\n(" + b"".join(arguments) + b"tR"


def hexed(times: int) -> bytes:
    inner = called("_codecs encode", text("a" * 100), text("latin1"))
    for _ in range(times):
        inner = called("_codecs encode", inner, text("hex"))
    return inner


EXPANDED = tensor("IntStorage", number(1 << 30) + b"\x85", b"K\x00\x85")
SECTIONS = b"}(" + b"".join(
    text(key) + value
    for key, value in {
        "nbytes": b"](" + number(1 << 40) + b"e",
        "piece_bytes": b"](" + number(4096) + b"e",
        "counts": b"](" + number(1 << 30) + b"e",
        "files": EXPANDED,
        "crc32s": tensor("LongStorage", number(1 << 30) + b"\x85", b"K\x00\x85"),
    }.items()
)
ROWS = repeated(repeated(b"(" + text("a") + b"NNl", 10_000, 0), 10_000, 1)
FORGED: dict[str, bytes] = {
    "lists of 2^30 numbers of one": text("sections") + SECTIONS + b"u",
    "rows by the million": text("state_entries") + b"}(" + text("kinds") + ROWS + text("of") + b"}u",
    "settings by the million": text("param_groups") + repeated(repeated(b"}", 10_000, 0), 10_000, 1),
    "a doubled key": doubled(60) + b"N",
    "a doubled item of a set": text("extra") + b"c__builtin__\nset\n(](" + doubled(60) + b"etR",
    "memory of a storage by its size": text("extra") + called("torch.storage UntypedStorage", number(1 << 33)),
    "memory of a tensor by its size": text("extra") + called("torch FloatTensor", number(1 << 31)),
    "memory of bytes by their number": text("extra") + called("__builtin__ bytearray", number(1 << 32)),
    "bytes of bytes of bytes": text("extra") + hexed(25),
    "bytes again and again": text("extra") + b"](" + text("a" * 20_000) + KEPT[0]
    + b"".join(called("__builtin__ bytearray", GOT[0], text("latin1")) for _ in range(50_000)) + b"e",
    "a sparse tensor of 2^30 numbers of one": text("extra")
    + called("torch._utils _rebuild_sparse_tensor", b"ctorch.serialization\n_get_layout\n(" + text("torch.sparse_coo") + b"tR",
             b"(" + tensor("LongStorage", b"K\x01" + number(1 << 30) + b"\x86", b"K\x00K\x00\x86")
             + tensor("IntStorage", number(1 << 30) + b"\x85", b"K\x00\x85") + b"(" + number(1 << 20) + b"lt"),
    "a class of nobody's": text("extra") + b"cposix\nsystem\n",
    **{
        f"a doubled {field}": text(field) + doubled(60)
        for field in ("format", "step", "optimizer", "placement", "plans", "files", "sections", "param_groups", "state_entries",
                      "rng", "external", "members", "job", "shards", "unknown")
    },
}  # fmt: skip
HARMLESS = {f"a doubled value of the user's in {key}": text(key) + b"}" + text("a") + doubled(60) + b"s"
            for key in ("registered", "extra")}  # fmt: skip
"""Kept, and walked by nothing."""


def resume(directory: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(160, 160), torch.nn.Linear(160, 160))
    with swapper.SwapManager(directory.parent, host_memory="8MiB", resume="auto") as manager:
        manager.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")


def refuse(check: Callable[[Path], Any]) -> Callable[[Path], None]:
    """What has a report for a refusal."""

    def read(directory: Path) -> None:
        if check(directory):
            raise CheckpointError("it is reported")

    return read


READ: dict[str, Callable[[Path], Any]] = {
    "verify": refuse(lambda directory: verify(directory)[0].faults),
    "inspect": inspect,
    "export": lambda directory: export(directory, directory.parent.with_name("out.pt"), "torch"),
    "runs": refuse(lambda directory: look_at(directory).problem),
    "clean": remove_leftovers,
    "resume": resume,
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forged") / "rank-0-of-1"
    path.mkdir()
    run_directory(path)
    return path


def forge(original: Path, directory: Path, opcodes: bytes) -> Path:
    """Copy a run, and put an entry into its commit record."""
    run = directory / original.name
    shutil.copytree(original, run)
    made = io.BytesIO()
    with zipfile.ZipFile(original / COMMIT_NAME) as old, zipfile.ZipFile(made, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, data[:-1] + opcodes + b"s." if info.filename.endswith("data.pkl") else data)
    (run / COMMIT_NAME).write_bytes(sealed(made.getvalue()))
    return run


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_commit_is_refused_at_once_in_little_memory(name: str, original: Path, tmp_path: Path) -> None:
    run = forge(original, tmp_path, FORGED[name])
    before = peak_resident_bytes(reset=True)
    for read in READ.values():
        with pytest.raises(SwapperError):
            read(run)
    grown = (peak_resident_bytes() or 0) - (before or 0)
    assert grown < MAX_GROWTH_BYTES, f"{grown >> 20} MiB"


@pytest.mark.parametrize("name", HARMLESS)
def test_a_value_of_the_users_may_have_any_nesting(name: str, original: Path, tmp_path: Path) -> None:
    """A run that could write it resumes."""
    run = forge(original, tmp_path, HARMLESS[name])
    for read in READ.values():
        if read is not READ["export"]:
            try:
                read(run)
            except CheckpointError as error:
                assert "it is reported" not in str(error)
    record = read_commit(run)
    assert record is not None
    assert len(encode_commit(record)) < 1 << 20


def test_the_forger_makes_what_is_read(original: Path, tmp_path: Path) -> None:
    run = forge(original, tmp_path, text("edits") + b"K\x07")
    record = read_commit(run)
    assert record is not None and record.edits == 7
    inspect(run)

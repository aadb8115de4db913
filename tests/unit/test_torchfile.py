"""Locations of the tensors in torch checkpoints; no file makes us believe what is not so."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import examples

from swapper.errors import CheckpointError
from swapper.formats.sources import open_source
from swapper.formats.stored import StoredTensor
from swapper.formats.torch_file import read

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn]


def content(stored: StoredTensor) -> torch.Tensor:
    """What the place that was found holds, as a tensor."""
    data = bytearray(stored.path.read_bytes()[stored.offset : stored.offset + stored.nbytes])
    if not data:
        return torch.empty(stored.shape, dtype=stored.dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(stored.dtype)
    return flat.view(stored.shape) if stored.stride is None else flat.as_strided(stored.shape, stored.stride)


def bytes_of(tensor: torch.Tensor) -> bytes:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b.detach())


def flatten(obj: Any, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(obj, torch.Tensor):
        return {name: obj}
    children = obj.items() if isinstance(obj, dict) else enumerate(obj) if isinstance(obj, (list, tuple)) else ()
    return {k: t for key, child in children for k, t in flatten(child, f"{name}.{key}" if name else str(key)).items()}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    tensor = torch.randint(0, 2, shape or [1]).to(torch.float32).to(dtype)
    if draw(st.booleans()) and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)
    return tensor[1:] if draw(st.booleans()) and tensor.shape[0] > 1 else tensor


trees = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.recursive(tensors() | st.integers() | st.text("xyz"), lambda inner: st.lists(inner, max_size=3), max_leaves=6),
    max_size=5,
)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees)
def test_every_tensor_is_found_where_it_lies(tree: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(tree, path)
    found = open_source(path).tensors
    expected = flatten(tree)
    assert found.keys() == expected.keys()
    assert all(same_bytes(content(found[name]), tensor) for name, tensor in expected.items())


def test_shared_storages_parameters_and_a_whole_state_are_found(tmp_path: Path) -> None:
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    base = torch.arange(10.0)
    state = OrderedDict(
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        views=(base[2:4], base),
        weight=torch.nn.Parameter(base),
    )
    torch.save(state, tmp_path / "x.pt")
    found = read(tmp_path / "x.pt").tensors
    assert same_bytes(content(found["model.weight"]), model.weight.detach())
    assert same_bytes(content(found["optimizer.state.0.exp_avg"]), optimizer.state[model.weight]["exp_avg"])
    assert found["views.0"].offset == found["views.1"].offset + 8 == found["weight"].offset + 8
    assert same_bytes(content(found["optimizer.state.1.step"]), torch.tensor(1.0))


def test_nothing_that_a_pickle_names_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "was here"

    class Hostile:
        def __reduce__(self) -> Any:
            return (Path.touch, (mark,))

    torch.save({"t": torch.ones(2), "h": Hostile()}, tmp_path / "x.pt")
    assert read(tmp_path / "x.pt").tensors.keys() == {"t"}
    assert not mark.exists()


def damaged(tmp_path: Path, change: Any) -> Path:
    """A checkpoint of which `change(bytearray)` made something else."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(1000.0), "b": torch.ones(3)}, path)
    data = bytearray(path.read_bytes())
    changed = change(data)
    path.write_bytes(data if changed is None else changed)
    return path


def entry_of(data: bytearray, name: bytes) -> int:
    """Where the directory has the entry of `name`."""
    at = -1
    while True:
        at = data.index(b"PK\x01\x02", at + 1)
        if data[at + 46 :].startswith(name):
            return at


def set_offset(data: bytearray, name: bytes, offset: int) -> None:
    struct.pack_into("<I", data, entry_of(data, name) + 42, offset)


def set_sizes(data: bytearray, name: bytes, nbytes: int) -> None:
    struct.pack_into("<2I", data, entry_of(data, name) + 20, nbytes, nbytes)


def set_end64(data: bytearray, at: int, value: int) -> None:
    struct.pack_into("<Q", data, data.rindex(b"PK\x06\x06") + at, value)


def overlap(data: bytearray) -> None:
    a, b = entry_of(data, b"x/data/0"), entry_of(data, b"x/data/1")
    data[b + 42 : b + 46] = data[a + 42 : a + 46]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d[: len(d) // 2], "no end record"),
        (lambda d: d[:-1], "no end record"),
        (lambda d: b"", "neither"),
        (lambda d: set_offset(d, b"x/data/0", 0xFFFFFFF0), "which the file does not have"),
        (lambda d: set_offset(d, b"x/data/0", 5), "no header"),
        (lambda d: set_sizes(d, b"x/data/0", 0x7FFFFFFF), "which the file does not have"),
        (lambda d: set_sizes(d, b"x/data/0", 0xFFFFFFFF), "lacks its zip64"),
        (lambda d: set_sizes(d, b"x/data/0", 8), "has 8 bytes"),
        (lambda d: set_end64(d, 48, 1 << 63), "directory is said to be"),
        (lambda d: set_end64(d, 40, (1 << 63) + 5), "directory is said to be"),
        (lambda d: set_end64(d, 32, 1 << 63), "several parts|entries"),
        (overlap, "inside"),
        (lambda d: d.replace(b"x/data/1", b"../../ab"), "leads out"),
        (lambda d: d.replace(b"x/data/1", b"/ata/d/1"), "leads out"),
        (lambda d: d.replace(b"x/data/1", b"x/data/0"), "twice"),
        (lambda d: d.replace(b"x/data.pkl", b"x/dat0.pkl"), "no x/data.pkl"),
        (lambda d: d.replace(b"x/data/1", b"x/data/7"), "no record"),
        (lambda d: d.replace(b"FloatStorage", b"BloatStorage"), "no storage"),
        (lambda d: d.replace(b"little", b"bigger"), "endian"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_and_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_source(damaged(tmp_path, change))


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_bytes_are_changed_it_ends_in_an_answer_or_an_error_of_ours(
    data: st.DataObject, tmp_path: Path
) -> None:
    path = tmp_path / "x.pt"
    file = io.BytesIO()
    torch.save({"a": torch.arange(6.0), "b": [torch.ones(3), 1.5, "text"]}, file)
    changed = bytearray(file.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    try:
        tensors = open_source(path).tensors
    except CheckpointError:
        return
    assert all(t.offset >= 0 and t.offset + t.nbytes <= len(changed) for t in tensors.values())


def rezipped(path: Path, pickled: bytes, **records: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickled)
        archive.writestr("x/version", b"3\n")
        for name, value in records.items():
            archive.writestr(f"x/{name}", value)
    return path


def test_a_hostile_pickle_ends_in_an_error_and_takes_no_memory(tmp_path: Path) -> None:
    many: Any = ()
    for _ in range(60):
        many = (many, many)
    for pickled in (
        b"\x80\x02}r\xff\xff\xff\xff.",  # a memo of four thousand million entries
        b"\x80\x02X\xff\xff\xff\x7fabc.",  # text beyond the end
        b"\x80\x02ccollections\nCounter\nN}X\x06\x00\x00\x00updateNs\x86b.",  # to change a class
        b"\x80\x02\x82\x01.",  # an object by number
        pickle.dumps(many, 2),
    ):
        path = rezipped(tmp_path / "x.pt", pickled)
        if pickled[2:3] == b"}":
            assert not open_source(path).tensors
        else:
            with pytest.raises(CheckpointError):
                open_source(path)


def test_a_zip_of_another_kind_and_a_compressed_one_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("readme", "no checkpoint")
    with pytest.raises(CheckpointError, match="in no folder"):
        open_source(tmp_path / "x.zip")
    torch.save({"a": torch.zeros(1000)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for info in old.infolist():
            kind = zipfile.ZIP_DEFLATED if "/data/" in info.filename else zipfile.ZIP_STORED
            new.writestr(info.filename, old.read(info), kind)
    with pytest.raises(CheckpointError, match="compressed"):
        open_source(tmp_path / "y.pt")


@pytest.mark.whole
@pytest.mark.parametrize("stated", [b"", b"x", b"64 KiB", b"\xff"])
def test_an_alignment_that_torch_does_not_read_is_refused(tmp_path: Path, stated: bytes) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "x.pt", "w") as changed:
        for name in whole.namelist():
            changed.writestr(name, stated if name.endswith("/.storage_alignment") else whole.read(name))
    with pytest.raises(ValueError, match=r"invalid literal|encoding|decode"):
        torch.load(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"storage_alignment has .* not a number"):
        read(tmp_path / "x.pt")

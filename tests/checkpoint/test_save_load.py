"""save and load do what torch.save and torch.load do: each reads what the other writes, and everything comes out the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import examples
from torch.utils.serialization import config

import swapper
from checkpoint.equality import assert_same
from swapper.checkpoint import load, save
from swapper.formats.sources import open_source

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any dtype and strides, small and large, some of them views into others' storages."""
    shape = draw(st.lists(st.integers(0, 70), max_size=3))
    tensor = torch.randint(0, 2, shape or [1]).to(torch.float32).to(draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()) and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)
    return tensor[1:] if draw(st.booleans()) and tensor.shape[0] > 1 else tensor


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    some = draw(st.lists(tensors(), max_size=4))
    leaf = (
        (st.sampled_from(some) if some else st.none())
        | tensors()
        | st.integers()
        | st.text("xyz", max_size=3)
        | st.none()
    )
    return draw(st.dictionaries(st.text("abc", max_size=3), leaf | st.lists(leaf, max_size=3), max_size=6))


def state() -> dict[str, Any]:
    """A training state: large and small tensors, shared storages, parameters, views, scalars."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.Linear(900, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 700)).sum().backward()
    optimizer.step()
    base = torch.arange(400_000.0)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": [base[100:200], base, base.view(400, 1000).t(), base[::7]],
        "parameter": torch.nn.Parameter(base[:5]),
        "empty": [torch.empty(0), torch.empty(3, 0, 2), torch.empty(0, dtype=torch.int16)],
        "ordered": OrderedDict(a=1, b=(2, "c", None, True, 1.5)),
        "step": 7,
    }


@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees())
def test_each_reads_what_the_other_writes(tree: dict[str, Any], tmp_path: Path) -> None:
    save(tree, tmp_path / "ours.pt")
    torch.save(tree, tmp_path / "theirs.pt")
    assert_same(torch.load(tmp_path / "ours.pt"), tree)
    assert_same(load(tmp_path / "ours.pt", verify=True), tree)
    assert_same(load(tmp_path / "theirs.pt", verify=True), tree)


def test_a_training_state_comes_back_every_way(place: Path) -> None:
    whole = state()
    save(whole, place / "x.pt")
    assert_same(torch.load(place / "x.pt"), whole)
    assert_same(torch.load(place / "x.pt", mmap=True), whole)
    with config.patch({"load.calculate_storage_offsets": True}):
        assert_same(torch.load(place / "x.pt", mmap=True), whole)
        assert_same(load(place / "x.pt"), whole)
    assert_same(load(place / "x.pt", mmap=True), whole)
    assert_same(load(place / "x.pt", verify=True), whole)
    torch.save(whole, place / "y.pt")
    assert_same(load(place / "y.pt", verify=True), whole)
    with config.patch({"load.calculate_storage_offsets": True}):
        assert_same(load(place / "y.pt", verify=True), whole)


def test_the_file_is_a_sound_zip_with_torchs_own_pickle(place: Path) -> None:
    whole = state()
    save(whole, place / "x.pt")
    torch.save(whole, place / "y.pt")
    with zipfile.ZipFile(place / "x.pt") as ours, zipfile.ZipFile(place / "y.pt") as theirs:
        assert ours.testzip() is None
        assert ours.read("archive/data.pkl") == theirs.read("y/data.pkl")
        names = [name.partition("/")[2] for name in ours.namelist()]
        assert names == [name.partition("/")[2] for name in theirs.namelist()]
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-tqq", place / "x.pt"], check=True)


def test_large_payloads_are_aligned_for_direct_transfers_and_small_ones_do_not_blow_up_the_file(tmp_path: Path) -> None:
    save({"a": torch.zeros(100_000), "b": torch.zeros(50_001)}, tmp_path / "large.pt")
    assert all(tensor.offset % 4096 == 0 for tensor in open_source(tmp_path / "large.pt").tensors.values())
    save([torch.zeros(3) for _ in range(1000)], tmp_path / "small.pt")
    assert (tmp_path / "small.pt").stat().st_size < 400_000
    assert_same(torch.load(tmp_path / "small.pt"), [torch.zeros(3) for _ in range(1000)])
    with config.patch({"save.storage_alignment": 16384}):
        save([torch.zeros(100_000), torch.ones(100_000)], tmp_path / "wide.pt")
    assert all(tensor.offset % 16384 == 0 for tensor in open_source(tmp_path / "wide.pt").tensors.values())
    assert_same(torch.load(tmp_path / "wide.pt"), [torch.zeros(100_000), torch.ones(100_000)])


def test_settings_of_torch_are_honoured(tmp_path: Path) -> None:
    with config.patch({"save.compute_crc32": False}):
        save({"a": torch.ones(5000)}, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt")["a"], torch.ones(5000))
    with pytest.raises(swapper.CheckpointError, match="compute_crc32 was off"):
        load(tmp_path / "x.pt", verify=True)
    with config.patch({"load.mmap": True}):
        mapped = load(tmp_path / "x.pt")["a"]
    assert "x.pt" in Path("/proc/self/maps").read_text()
    assert torch.equal(mapped, torch.ones(5000))
    with config.patch({"save.storage_alignment": 48}), pytest.raises(swapper.ConfigError, match="power of two"):
        save({}, tmp_path / "y.pt")
    big = torch.arange(100, dtype=torch.int32)
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:  # as a big-endian machine would have it
        torch.save(big, tmp_path / "z.pt")
        with zipfile.ZipFile(tmp_path / "z.pt") as original:
            for name in original.namelist():
                data = original.read(name)
                data = b"big" if name.endswith("byteorder") else data
                archive.writestr(name, big.numpy().byteswap().tobytes() if name.endswith("data/0") else data)
    assert torch.equal(load(tmp_path / "x.pt"), big)


def test_what_is_no_plain_tensor_is_saved_as_torch_saves_it(tmp_path: Path) -> None:
    whole = {
        "sparse": torch.eye(4).to_sparse(),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "quantized": torch.quantize_per_tensor(torch.randn(10), 0.1, 3, torch.qint8),
        "channels": torch.quantize_per_channel(
            torch.randn(3, 5), torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3), 0, torch.qint8
        ),
        "generator": torch.Generator().get_state(),
    }
    save(whole, tmp_path / "x.pt")
    assert_same(torch.load(tmp_path / "x.pt"), whole)
    assert_same(load(tmp_path / "x.pt"), whole)
    model = torch.nn.Linear(3, 4)
    save(model, tmp_path / "model.pt")
    assert torch.equal(load(tmp_path / "model.pt", weights_only=False).weight, model.weight)
    storage = torch.arange(10.0).untyped_storage()
    save(storage, tmp_path / "storage.pt")
    assert load(tmp_path / "storage.pt").tolist() == torch.load(tmp_path / "storage.pt").tolist() == storage.tolist()
    both = torch.zeros(4)
    with pytest.raises(swapper.CheckpointError, match="same memory as"):
        save([both, both.view(torch.int32)], tmp_path / "y.pt")


def test_old_files_and_odd_ones_are_loaded(tmp_path: Path) -> None:
    whole = state()
    torch.save(whole, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert_same(load(tmp_path / "old.pt"), whole)
    torch.save(whole, tmp_path / "x.pt")
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as old,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for (
            name
        ) in old.namelist():  # repacked by hand, in an order that is not torch's, and without its records of order
            if ".format" not in name and "byteorder" not in name:
                new.writestr(name, old.read(name), zipfile.ZIP_DEFLATED if name.endswith("/1") else zipfile.ZIP_STORED)
    assert_same(load(tmp_path / "packed.pt"), whole)
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "turned.pt", "w") as new:
        for name in reversed(old.namelist()):
            if ".format" not in name:
                new.writestr(name, old.read(name))
    assert_same(load(tmp_path / "turned.pt"), whole)


def test_map_location_is_torchs(tmp_path: Path) -> None:
    whole = state()
    save(whole, tmp_path / "x.pt")
    seen: list[tuple[int, str]] = []

    def note(storage: torch.UntypedStorage, location: str) -> Any:
        seen.append((sum(storage.tolist()) if storage.nbytes() < 10_000 else 0, location))
        return storage

    assert_same(load(tmp_path / "x.pt", note), torch.load(tmp_path / "x.pt", lambda storage, _: storage))
    ours, seen = seen, []
    torch.load(tmp_path / "x.pt", note)
    assert ours == seen
    for where in ("cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, location: None):
        assert_same(load(tmp_path / "x.pt", where), whole)
    assert load(tmp_path / "x.pt", "meta")["model"]["0.weight"].device.type == "meta"
    if not torch.cuda.is_available():
        with pytest.raises(swapper.CheckpointError, match=r"cuda|CUDA"):
            load(tmp_path / "x.pt", "cuda:0")


def test_weights_only_refuses_what_torch_refuses_and_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "was here"

    class Hostile:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(mark),))

    save({"a": torch.ones(3), "b": Hostile()}, tmp_path / "x.pt")
    with pytest.raises(swapper.CheckpointError, match="weights_only"):
        load(tmp_path / "x.pt")
    assert not mark.exists()
    load(tmp_path / "x.pt", weights_only=False)
    assert mark.exists()


def test_a_loaded_tensor_is_ones_own(tmp_path: Path) -> None:
    save({"a": torch.zeros(1 << 20)}, tmp_path / "x.pt")
    before = (tmp_path / "x.pt").read_bytes()
    loaded = load(tmp_path / "x.pt")["a"]
    loaded.fill_(3)
    assert torch.equal(loaded, torch.full((1 << 20,), 3.0))
    assert (tmp_path / "x.pt").read_bytes() == before


def test_what_goes_to_a_device_goes_in_pieces_and_is_checked(tmp_path: Path) -> None:
    """The same code as for a GPU, which the machine that runs this may not have: only the memory is another."""
    from swapper.checkpoint.torch_load import _Loader
    from swapper.formats.torch_file import read_torch_file
    from swapper.io.engines import open_for

    save({"a": torch.arange(3_000_000.0), "b": torch.ones(3)}, tmp_path / "x.pt")
    file = read_torch_file(tmp_path / "x.pt")
    records = {storage.key: file.record(storage) for storage in file.skeleton.storages}
    with _Loader(file, records, open_for(tmp_path / "x.pt", read_only=True), None, True) as loader:
        on_device = [loader._read_to_device(storage, torch.device("cpu")) for storage in file.skeleton.storages]
    whole = torch.empty(0).set_(on_device[0])
    assert torch.equal(whole, torch.arange(3_000_000.0))
    assert torch.empty(0).set_(on_device[1]).tolist() == [1, 1, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_cuda_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    whole = {"a": torch.arange(3_000_000.0, device="cuda"), "b": torch.ones(5)}
    save(whole, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt")["a"], whole["a"])
    assert torch.equal(load(tmp_path / "x.pt", verify=True)["a"], whole["a"])
    assert load(tmp_path / "x.pt", "cpu")["a"].device.type == "cpu"


def test_what_comes_from_a_device_goes_through_a_ring_of_fixed_size(tmp_path: Path) -> None:
    from swapper.checkpoint.stream import BLOCK_BYTES, Checksum, StreamWriter

    data = torch.randint(0, 255, (5 * BLOCK_BYTES + 77,), dtype=torch.uint8)
    checksum = Checksum()
    (tmp_path / "x").touch()
    with StreamWriter(tmp_path / "x", len(data), blocks=3) as writer:
        writer.append(b"begin")
        writer.append_device(data, checksum)
    assert checksum.value == zlib.crc32(data.numpy().tobytes())
    assert (tmp_path / "x").read_bytes() == b"begin" + data.numpy().tobytes()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755], ids=oct)
def test_a_replaced_file_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "saved.pt"
    path.write_bytes(b"before")
    path.chmod(mode)
    swapper.checkpoint.save({"x": torch.ones(3)}, path, overwrite=True)
    assert path.stat().st_mode & 0o7777 == mode
    assert torch.equal(torch.load(path)["x"], torch.ones(3))

"""A container is read by torch in every way it reads, and by zip tools; its bytes are where the plan says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.serialization import config

from swapper.checkpoint.container import ALIGNMENT, ContainerLayout, Record, StorageRef, build_tail
from swapper.errors import CheckpointError

GIB = 1 << 30
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.uint32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def random_payload(nbytes: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    limit = 2 if dtype is torch.bool else 256
    return torch.randint(0, limit, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Content:
    """Payload storages in memory, one for each record, and what a container needs to know of them."""

    def __init__(self, payloads: list[torch.Tensor], root: str = "archive") -> None:
        self.payloads = payloads
        self.layout = ContainerLayout.plan([payload.nbytes for payload in payloads], root)
        self.crc32s = {str(index): zlib.crc32(bytes_of(payload)) for index, payload in enumerate(payloads)}
        self._keys = {p.untyped_storage().data_ptr(): str(index) for index, p in enumerate(payloads)}

    def locate(self, tensor: torch.Tensor) -> StorageRef | None:
        key = self._keys.get(tensor.untyped_storage().data_ptr())
        return None if key is None else StorageRef(key, tensor.storage_offset())

    def write(self, path: Path, state: object, with_crc32s: bool = False) -> Path:
        """As the manager will: headers and payloads, and the tail last."""
        with path.open("wb") as file:
            for offset, chunk in self.layout.headers(self.crc32s if with_crc32s else None):
                file.seek(offset)
                file.write(chunk)
            for record, payload in zip(self.layout.records, self.payloads, strict=True):
                file.seek(record.offset)
                file.write(bytes_of(payload))
            file.seek(self.layout.tail_offset)
            file.write(build_tail(self.layout, state, self.locate, self.crc32s))
        return path


def assert_equal(loaded: object, state: object) -> None:
    """Same types, same nest, tensors equal bit for bit with the same dtype, shape and stride."""
    assert type(loaded) is type(state)
    if isinstance(state, torch.Tensor):
        assert (loaded.dtype, loaded.shape, loaded.stride()) == (state.dtype, state.shape, state.stride())
        assert not loaded.requires_grad
        assert bytes_of(loaded) == bytes_of(state)
    elif isinstance(state, dict):
        assert list(loaded) == list(state)
        assert getattr(loaded, "_metadata", None) == getattr(state, "_metadata", None)
        for key, value in state.items():
            assert_equal(loaded[key], value)
    elif isinstance(state, (list, tuple)):
        assert len(loaded) == len(state)
        for item, value in zip(loaded, state, strict=True):
            assert_equal(item, value)
    else:
        assert loaded == state


sizes = st.lists(st.integers(1, 64).map(lambda pages: pages * ALIGNMENT), max_size=10)
long_sizes = st.lists(
    st.one_of(st.integers(1, 4), st.integers(1 << 20, (1 << 20) + 3), st.integers((1 << 20) - 3, 1 << 24)).map(
        lambda pages: pages * ALIGNMENT
    ),
    max_size=8,
)
roots = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,60}[a-z])?", fullmatch=True)


# Layout ----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(sizes=st.one_of(sizes, long_sizes), root=roots)
def test_headers_and_payloads_fill_the_file_up_to_the_tail_without_gap_or_overlap(sizes, root) -> None:
    layout = ContainerLayout.plan(sizes, root)
    spans = [(offset, len(chunk)) for offset, chunk in layout.headers()]
    spans += [(record.offset, record.nbytes) for record in layout.records]
    end = 0
    for offset, nbytes in sorted(spans):
        assert offset == end
        assert offset % ALIGNMENT == 0
        assert nbytes % ALIGNMENT == 0
        end = offset + nbytes
    assert layout.tail_offset == end
    assert [record.key for record in layout.records] == [str(index) for index in range(len(sizes))]
    assert list(layout.sizes) == sizes
    assert ContainerLayout.plan(layout.sizes, root) == layout


@settings(deadline=None)
@given(sizes=sizes.filter(bool), root=roots)
def test_payload_first_bytes_equal_those_of_torchs_own_writer(tmp_path_factory, sizes, root) -> None:
    """torch's writer, told to write the same records first, puts the same bytes before the tail."""
    directory = tmp_path_factory.mktemp("writer")
    content = Content([random_payload(size, torch.uint8, seed) for seed, size in enumerate(sizes)], root)
    ours = content.write(directory / "ours", list(content.payloads), with_crc32s=True)
    theirs = directory / (root + ".pt")
    writer = torch._C.PyTorchFileWriter(str(theirs), True, ALIGNMENT)
    for key, payload in enumerate(content.payloads):
        writer.write_record(f"data/{key}", bytes_of(payload), payload.nbytes)
    writer.write_end_of_file()
    prefix = content.layout.tail_offset + 16  # with the descriptor that begins the tail
    assert ours.read_bytes()[:prefix] == theirs.read_bytes()[:prefix]


@settings(deadline=None, max_examples=25)
@given(sizes=long_sizes.filter(bool))
def test_header_chunks_around_4_gib_equal_those_of_torchs_own_writer(tmp_path_factory, sizes) -> None:
    path = tmp_path_factory.mktemp("sparse") / "big.pt"
    writer = torch._C.PyTorchFileWriter(str(path), True, ALIGNMENT)
    for key, nbytes in enumerate(sizes):
        writer.write_record_metadata(f"data/{key}", nbytes)
    writer.write_end_of_file()
    chunks = list(ContainerLayout.plan(sizes, "big").headers())
    assert len(chunks) == len(sizes)
    with path.open("rb") as file:
        for offset, chunk in chunks:
            file.seek(offset)
            assert file.read(len(chunk)) == chunk
    path.unlink()


def test_the_layout_of_a_small_container_in_full() -> None:
    layout = ContainerLayout.plan([4096, 8192])
    assert layout.records == (Record("0", 4096, 0, 4096), Record("1", 8192, 8192 + 16, 12288))
    assert layout.tail_offset == 20480
    (begin, first), (gap, second) = layout.headers()
    assert (begin, gap) == (0, 8192)
    assert first.startswith(b"PK\x03\x04")
    assert first.endswith(b"ZZZZ")
    assert second[:16] == b"PK\x07\x08" + bytes(4) + (4096).to_bytes(4, "little") * 2
    assert second[16:20] == b"PK\x03\x04"
    assert b"archive/data/1FB" in second


@pytest.mark.parametrize("size", [0, -4096, 1, 4095, 4097])
def test_sizes_that_cannot_be_written_directly_are_refused(size) -> None:
    with pytest.raises(CheckpointError, match="record 1 of"):
        ContainerLayout.plan([4096, size])


@pytest.mark.parametrize("root", ["", "a/b", "é", "a b", "x" * 201, "..", ".x", "-x", "a\n"])
def test_roots_that_readers_could_misread_are_refused(root) -> None:
    with pytest.raises(CheckpointError, match="root"):
        ContainerLayout.plan([4096], root)


# What torch reads ------------------------------------------------------------------------------------


def example(root: str = "archive") -> tuple[Content, OrderedDict]:
    """Many dtypes; views at 64-byte steps, strided and 0-dim; resident tensors between, shared and empty."""
    content = Content([random_payload(ALIGNMENT * (1 + i % 3), dtype, i) for i, dtype in enumerate(DTYPES)], root)
    state: OrderedDict = OrderedDict()
    resident = random_payload(800, torch.float32, 99)
    for index, payload in enumerate(content.payloads):
        step = 64 // payload.element_size()
        state[f"{index}.weight"] = payload[:step].view(2, -1)
        state[f"{index}.transposed"] = payload[step : 2 * step].view(2, -1).t()
        state[f"{index}.step"] = payload[3 * step]
        state[f"{index}.all"] = payload
        state[f"{index}.resident"] = resident[index : index + 3]
        state[f"{index}.empty"] = torch.empty(0, 3)
    state["numbers"] = {"lr": 1e-3, "betas": (0.9, 0.95), "step": 12, "big": 1 << 80, "none": None, 7: [True]}
    state["rng"] = torch.get_rng_state()
    state["dtype"] = torch.bfloat16
    state._metadata = OrderedDict({"": {"version": 1}})
    return content, state


LOADS = {
    "plain": {"weights_only": True},
    "mmap": {"weights_only": True, "mmap": True},
    "unrestricted": {"weights_only": False},
    "map_location": {"map_location": "cpu"},
    "map_location function": {"map_location": lambda storage, location: storage},
}


@pytest.mark.parametrize("calculate_offsets", [False, True])
@pytest.mark.parametrize("options", LOADS.values(), ids=LOADS)
def test_torch_load_gives_the_state_back(tmp_path, monkeypatch, options, calculate_offsets) -> None:
    content, state = example()
    path = content.write(tmp_path / "x.pt", state)
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    with config.patch({"load.calculate_storage_offsets": calculate_offsets}):
        assert_equal(torch.load(path, **options), state)


def test_torch_load_from_an_open_file_gives_the_state_back(tmp_path) -> None:
    content, state = example()
    with content.write(tmp_path / "x.pt", state).open("rb") as file:
        assert_equal(torch.load(file), state)


def test_torch_load_onto_the_meta_device_gives_shapes(tmp_path) -> None:
    content, state = example()
    loaded = torch.load(content.write(tmp_path / "x.pt", state), map_location="meta")
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert loaded[key].is_meta
            assert (loaded[key].dtype, loaded[key].shape) == (value.dtype, value.shape)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_use_of_the_records_in_any_order_loads_bit_for_bit(tmp_path_factory, data) -> None:
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), max_size=6))
    pages = data.draw(st.lists(st.integers(1, 3), min_size=len(dtypes), max_size=len(dtypes)))
    content = Content([random_payload(n * ALIGNMENT, d, i) for i, (n, d) in enumerate(zip(pages, dtypes, strict=True))])
    wholes = [*content.payloads, random_payload(4 * 37, torch.float32, 7), random_payload(3, torch.uint8, 8)]
    uses = data.draw(st.lists(st.integers(0, len(wholes) - 1), max_size=14))
    state = [wholes[use][data.draw(st.integers(0, wholes[use].numel())) :] for use in uses]
    path = content.write(tmp_path_factory.mktemp("any") / "x.pt", state)
    for options in LOADS.values():
        assert_equal(torch.load(path, **options), state)
    assert zipfile.ZipFile(path).testzip() is None
    assert path.stat().st_size % ALIGNMENT == 0


@pytest.mark.parametrize("mmap", [False, True])
def test_views_of_one_record_share_storage_after_loading(tmp_path, mmap) -> None:
    content = Content([random_payload(ALIGNMENT, torch.float32)])
    whole = content.payloads[0]
    resident = torch.arange(6.0)
    state = {"w": whole[:16].view(4, 4), "b": whole[16:20], "step": whole[32], "all": whole}
    state |= {"r": resident, "s": resident[2:4]}
    loaded = torch.load(content.write(tmp_path / "x.pt", state), mmap=mmap)
    assert_equal(loaded, state)
    assert len({loaded[name].untyped_storage().data_ptr() for name in ("w", "b", "step")}) == 1
    assert loaded["b"].data_ptr() - loaded["w"].data_ptr() == 64
    assert loaded["s"].data_ptr() - loaded["r"].data_ptr() == 8
    assert loaded["r"].untyped_storage().nbytes() == 24
    loaded["w"][0, 1] = 7.0
    loaded["s"][0] = 8.0
    assert (loaded["all"][1], loaded["r"][2]) == (7.0, 8.0)


def test_payloads_are_at_the_planned_offsets_of_the_file(tmp_path) -> None:
    content, state = example()
    raw = content.write(tmp_path / "x.pt", state).read_bytes()
    for record, payload in zip(content.layout.records, content.payloads, strict=True):
        assert raw[record.offset : record.end] == bytes_of(payload)


@pytest.mark.parametrize("in_file_order", [False, True])
def test_fake_tensors_know_the_offset_of_every_storage(tmp_path, in_file_order) -> None:
    content = Content([random_payload(ALIGNMENT, torch.float32, seed) for seed in range(12)])
    order = list(range(12)) if in_file_order else [3, 0, 11, 1, 2, 10, 4, 5, 9, 7, 6]
    state = {index: content.payloads[index][16:] for index in order}
    state["resident"] = torch.arange(5)
    path = content.write(tmp_path / "x.pt", state)
    has_format_version = "archive/.format_version" in zipfile.ZipFile(path).namelist()
    assert has_format_version is in_file_order
    with FakeTensorMode():
        loaded = torch.load(path)
    for index in order:
        offset = loaded[index].untyped_storage()._checkpoint_offset
        assert offset == content.layout.records[index].offset
    offset = loaded["resident"].untyped_storage()._checkpoint_offset
    assert offset % ALIGNMENT == 0
    assert path.read_bytes()[offset : offset + 40] == bytes_of(state["resident"])


def test_computed_offsets_pass_torchs_own_assertion_where_the_order_allows(tmp_path, monkeypatch) -> None:
    """TORCH_SERIALIZATION_DEBUG compares computed with real offsets; a moved record shows that it looks."""
    content = Content([random_payload(ALIGNMENT, torch.float32, seed) for seed in range(3)])
    state = [*content.payloads, torch.arange(3)]
    path = content.write(tmp_path / "x.pt", state)
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    for options in LOADS.values():
        assert_equal(torch.load(path, **options), state)
    raw = path.read_bytes()
    assert raw.count(b".storage_alignmentFB") == 1
    value = raw.index(b"4096PK\x07\x08")
    path.write_bytes(raw[:value] + b"2048" + raw[value + 4 :])
    with pytest.raises(RuntimeError, match="Incorrect offset"):
        torch.load(path)


def test_an_optimizer_resumed_from_a_container_goes_on_bit_for_bit(tmp_path) -> None:
    """Steps, moments and parameters as views of a few records, step counters 0-dim."""

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(random_payload(4 * 8, torch.uint8, step).float().view(4, 8)).square().mean().backward()
            optimizer.step()

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = make()
    train(model, optimizer, range(5))
    records = {kind: torch.zeros(4 * ALIGNMENT // 4) for kind in ("param", "exp_avg", "exp_avg_sq", "step")}
    content = Content(list(records.values()))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    place = dict.fromkeys(records, 0)

    def put(kind: str, tensor: torch.Tensor) -> torch.Tensor:
        view = records[kind][place[kind] :].as_strided(tensor.shape, tensor.stride())
        place[kind] += -(-tensor.numel() // 16) * 16
        return view.copy_(tensor)

    for name, _ in model.named_parameters():
        state["model"][name] = put("param", state["model"][name])
    for entry in state["optimizer"]["state"].values():
        entry.update({kind: put(kind, tensor) for kind, tensor in entry.items()})
    content.crc32s = {str(i): zlib.crc32(bytes_of(payload)) for i, payload in enumerate(content.payloads)}
    loaded = torch.load(content.write(tmp_path / "x.pt", state), mmap=True)
    assert zipfile.ZipFile(tmp_path / "x.pt").testzip() is None

    resumed, resumed_optimizer = make()
    resumed.load_state_dict(loaded["model"])
    resumed_optimizer.load_state_dict(loaded["optimizer"])
    train(model, optimizer, range(5, 10))
    train(resumed, resumed_optimizer, range(5, 10))
    assert_equal(resumed.state_dict(), model.state_dict())
    assert_equal(resumed_optimizer.state_dict(), optimizer.state_dict())


# The tail --------------------------------------------------------------------------------------------


def test_a_container_without_payload_is_all_tail(tmp_path) -> None:
    content = Content([])
    assert content.layout.tail_offset == 0
    assert list(content.layout.headers()) == []
    state = {"a": torch.arange(3), "b": "text"}
    path = content.write(tmp_path / "x.pt", state)
    assert path.read_bytes()[:4] == b"PK\x03\x04"
    assert_equal(torch.load(path, mmap=True), state)


def test_without_its_tail_nothing_loads_the_file(tmp_path) -> None:
    content, state = example()
    path = content.write(tmp_path / "x.pt", state)
    os.truncate(path, content.layout.tail_offset)
    assert not zipfile.is_zipfile(path)
    with pytest.raises(RuntimeError, match="zip archive"):
        torch.load(path)


def test_a_shorter_tail_replaces_a_longer_one(tmp_path) -> None:
    content, state = example()
    path = content.write(tmp_path / "x.pt", {**state, "more": list(range(100_000))})
    tail = build_tail(content.layout, state, content.locate, content.crc32s)
    with path.open("r+b") as file:
        file.seek(content.layout.tail_offset)
        file.write(tail)
        file.truncate()
    assert_equal(torch.load(path), state)
    assert zipfile.ZipFile(path).testzip() is None


def test_the_same_state_gives_the_same_tail_and_another_gives_another_id() -> None:
    content, state = example()
    tail = build_tail(content.layout, state, content.locate, content.crc32s)
    assert tail == build_tail(content.layout, state, content.locate, content.crc32s)
    other = {**content.crc32s, "0": content.crc32s["0"] ^ 1}
    other_tail = build_tail(content.layout, state, content.locate, other)
    assert serialization_id(tail)[:20] == serialization_id(other_tail)[:20]
    assert serialization_id(tail)[20:] != serialization_id(other_tail)[20:]


def serialization_id(tail: bytes) -> bytes:
    match = tail.split(b".data/serialization_idFB")[1]
    digits = match[2 + int.from_bytes(match[:2], "little") :][:40]
    assert digits.isdigit()
    return digits


def test_small_records_say_what_torch_expects(tmp_path) -> None:
    content, _ = example("my-root")
    archive = zipfile.ZipFile(content.write(tmp_path / "x.pt", list(content.payloads)))
    small = {n.removeprefix("my-root/"): archive.read(n) for n in archive.namelist() if "/data/" not in n}
    serialization = small.pop(".data/serialization_id")
    assert len(serialization) == 40 and serialization.isdigit()
    assert small.pop("data.pkl").startswith(b"\x80\x02")
    assert small == {
        ".format_version": b"1",
        ".storage_alignment": b"4096",
        "byteorder": sys.byteorder.encode(),
        "version": b"3\n",
    }


@pytest.mark.parametrize("crc32s", [{}, {"0": 1}, {"0": 1, "1": 2, "2": 3}, {"0": 1, "01": 2}])
def test_checksums_that_do_not_fit_the_layout_are_refused(crc32s) -> None:
    with pytest.raises(CheckpointError, match="CRC-32"):
        build_tail(ContainerLayout.plan([4096, 4096]), {}, lambda tensor: None, crc32s)


# Zip tools -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_crc32s", [False, True])
def test_zip_tools_accept_the_file_and_notice_a_changed_payload_byte(tmp_path, with_crc32s) -> None:
    content, state = example()
    path = content.write(tmp_path / "x.pt", state, with_crc32s)
    assert zipfile.ZipFile(path).testzip() is None
    with path.open("r+b") as file:
        file.seek(content.layout.records[1].offset)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert zipfile.ZipFile(path).testzip() == "archive/data/1"


@pytest.mark.skipif(not shutil.which("unzip"), reason="unzip is not installed")
@pytest.mark.parametrize("with_crc32s", [False, True])
def test_unzip_accepts_the_file_and_extracts_the_payload(tmp_path, with_crc32s) -> None:
    content, state = example()
    path = content.write(tmp_path / "x.pt", state, with_crc32s)
    result = subprocess.run(["unzip", "-t", path], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "No errors detected" in result.stdout
    assert result.stderr == ""
    extracted = subprocess.run(["unzip", "-p", path, "archive/data/2"], capture_output=True, check=True)
    assert extracted.stdout == bytes_of(content.payloads[2])


# Above 4 GiB -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        [41 * GIB // 10 // ALIGNMENT * ALIGNMENT, ALIGNMENT],
        [4 * GIB - ALIGNMENT, ALIGNMENT, ALIGNMENT],
        [4 * GIB, 2 * ALIGNMENT, ALIGNMENT],
        [ALIGNMENT, 3 * GIB, 3 * GIB, 5 * GIB, ALIGNMENT],
    ],
    ids=["4.1 GiB", "just below", "4 GiB", "many"],
)
def test_sparse_files_above_4_gib_load(tmp_path, monkeypatch, sizes) -> None:
    layout = ContainerLayout.plan(sizes)
    last = layout.records[-1]
    payload = random_payload(last.nbytes, torch.float32)
    crc32s = {record.key: 0 for record in layout.records} | {last.key: zlib.crc32(bytes_of(payload))}
    stand_ins = {r.key: torch.empty(r.nbytes, dtype=torch.uint8, device="meta") for r in layout.records[:-1]}
    state = {**stand_ins, "last": payload[5:9], "resident": torch.arange(4)}
    refs = {id(tensor): StorageRef(key, 0) for key, tensor in stand_ins.items()}
    refs[id(state["last"])] = StorageRef(last.key, 5)
    tail = build_tail(layout, state, lambda tensor: refs.get(id(tensor)), crc32s)
    path = tmp_path / "big.pt"
    with path.open("wb") as file:
        for offset, chunk in layout.headers():
            file.seek(offset)
            file.write(chunk)
        file.seek(last.offset)
        file.write(bytes_of(payload))
        assert file.tell() == layout.tail_offset
        file.write(tail)
    if path.stat().st_blocks * 512 > GIB:
        pytest.skip("this filesystem keeps no holes")

    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    for calculate_offsets in (False, True):
        with config.patch({"load.calculate_storage_offsets": calculate_offsets}):
            loaded = torch.load(path, mmap=True)
        assert_equal(loaded["last"], payload[5:9])
        assert_equal(loaded["resident"], torch.arange(4))
        for key, stand_in in stand_ins.items():
            assert (loaded[key].numel(), loaded[key][-1].item()) == (stand_in.numel(), 0)
    archive = zipfile.ZipFile(path)
    for record in layout.records:
        info = archive.getinfo(f"archive/data/{record.key}")
        assert (info.header_offset, info.file_size) == (record.header_offset, record.nbytes)
    assert archive.read(f"archive/data/{last.key}") == bytes_of(payload)
    assert archive.read("archive/data.pkl").startswith(b"\x80\x02")

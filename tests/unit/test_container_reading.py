"""Torch's reading of a container: the state, in every way it reads, and files of which only the sizes are large."""

from __future__ import annotations

import zipfile
import zlib

import pytest
import torch
from container_content import DTYPES, Content, assert_equal, build_tail, bytes_of, example, random_payload
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.serialization import config

from swapper.formats.container import ALIGNMENT, ContainerLayout
from swapper.formats.torch_writer import StorageRef

GIB = 1 << 30


# What torch reads ------------------------------------------------------------------------------------


LOADS = {
    "plain": {"weights_only": True},
    "mmap": {"weights_only": True, "mmap": True},
    "unrestricted": {"weights_only": False},
    "map_location": {"map_location": "cpu"},
    "map_location function": {"map_location": lambda storage, location: storage},
}


@pytest.mark.whole
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


@settings(max_examples=examples(40))
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


@pytest.mark.whole
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


@pytest.mark.whole
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


# Above 4 GiB -----------------------------------------------------------------------------------------


@pytest.mark.whole
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

"""data.pkl equals torch.save's byte for byte, needs no tensor data, and holds nothing torch.load refuses."""

from __future__ import annotations

import enum
import io
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict, namedtuple
from fractions import Fraction

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from swapper.errors import CheckpointError
from swapper.formats.torch_writer import StorageRef, pickle_state

RECORD_BYTES = 4096


def every_dense_dtype() -> list[torch.dtype]:
    """All dtypes of this torch of which torch.save writes dense tensors, the quantized ones left out."""
    found = []
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        if str(dtype).startswith(("torch.qint", "torch.quint")):
            continue
        try:
            tensor = torch.zeros(64, dtype=torch.uint8).view(dtype)
            torch.save(tensor, io.BytesIO())
            found.append(dtype)
        except (RuntimeError, KeyError):
            continue
    return sorted(found, key=str)


DTYPES = every_dense_dtype()
# Those of which repr, by which hypothesis shows a failure, works.
PRINTABLE = [dtype for dtype in DTYPES if "bits" not in str(dtype) and "float4" not in str(dtype)]


def torch_data_pkl(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


class Store:
    """Payload storages of RECORD_BYTES, one for each of `dtypes`, and the locate() that knows them."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        self.wholes = [torch.zeros(RECORD_BYTES, dtype=torch.uint8).view(dtype) for dtype in dtypes]
        self.nbytes = {str(index): RECORD_BYTES for index in range(len(dtypes))}
        self._keys = {t.untyped_storage().data_ptr(): str(i) for i, t in enumerate(self.wholes)}

    def locate(self, tensor: torch.Tensor) -> StorageRef | None:
        key = self._keys.get(tensor.untyped_storage().data_ptr())
        return None if key is None else StorageRef(str(int(key)), tensor.storage_offset())


@st.composite
def views(draw, wholes: list[torch.Tensor]) -> torch.Tensor:
    whole = draw(st.sampled_from(wholes))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = draw(st.lists(st.integers(0, 16), min_size=len(shape), max_size=len(shape)))
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    offset = draw(st.integers(0, whole.numel() - max(span, 1)))
    return whole.as_strided(shape, strides, offset)


def nests(tensors: st.SearchStrategy[torch.Tensor]) -> st.SearchStrategy[object]:
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["storage", "cpu", "0", "1", "10"]),
        st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu")]),
        st.binary(min_size=1, max_size=5),
        st.complex_numbers(),
        st.sets(st.integers(0, 9), max_size=3),
        st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
        st.dictionaries(st.text(max_size=2), st.integers(0, 5), max_size=2).map(Counter),
    )

    def grow(inner):
        return st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(st.one_of(st.text(max_size=4), st.integers(0, 99)), inner, max_size=4),
            st.dictionaries(st.text(max_size=4), inner, max_size=4).map(OrderedDict),
            st.dictionaries(st.text(max_size=4), inner, max_size=4).map(with_metadata),
        )

    return st.recursive(st.one_of(tensors, scalars), grow, max_leaves=20)


def with_metadata(items: dict) -> OrderedDict:
    state = OrderedDict(items)
    state._metadata = OrderedDict({name: {"version": 1} for name in items})
    return state


@settings(max_examples=examples(150))
@given(data=st.data())
def test_equals_torch_save_byte_for_byte(data) -> None:
    payload = Store(data.draw(st.lists(st.sampled_from(PRINTABLE), max_size=12)))
    resident = [torch.ones(200), torch.zeros(20, 10), torch.arange(200), torch.empty(0)]
    first_uses = [whole[:1] for whole in payload.wholes] + [whole.reshape(-1)[:1] for whole in resident]
    state = [first_uses, data.draw(nests(views(payload.wholes + resident[:3])))]

    pickled = pickle_state(state, payload.nbytes, payload.locate)

    assert pickled.data == torch_data_pkl(state)
    assert pickled.keys == tuple(str(index) for index in range(len(first_uses)))
    assert list(pickled.resident) == list(pickled.keys[len(payload.wholes) :])
    for storage, whole in zip(pickled.resident.values(), resident, strict=True):
        assert storage.data_ptr() == whole.untyped_storage().data_ptr()


def test_the_dtypes_tested_are_those_that_people_train_with() -> None:
    names = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128"
    names += " uint16 uint32 uint64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz complex32"
    assert {getattr(torch, name) for name in names.split()} <= set(DTYPES)


@pytest.mark.whole
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_resident", [False, True], ids=["payload", "resident"])
def test_every_dtype_equals_torch_save(dtype, is_resident) -> None:
    store = Store([dtype])
    state = {"whole": store.wholes[0], "part": store.wholes[0][3:7], "scalar": store.wholes[0][9]}
    nbytes, locate = ({}, lambda tensor: None) if is_resident else (store.nbytes, store.locate)
    pickled = pickle_state(state, nbytes, locate)
    assert pickled.data == torch_data_pkl(state)
    assert len(pickled.resident) == is_resident


def test_an_untyped_record_has_tensors_of_several_dtypes_as_torch_load_reads_them() -> None:
    record = torch.randint(0, 2, (RECORD_BYTES,), dtype=torch.uint8)
    places = {dtype: 64 * number for number, dtype in enumerate(DTYPES)}  # bytes
    state = {str(dtype): record[at : at + 64].view(dtype) for dtype, at in places.items()}

    def locate(tensor: torch.Tensor) -> StorageRef:
        return StorageRef("0", places[tensor.dtype] // tensor.itemsize, untyped=True)

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle_state(state, {"0": RECORD_BYTES}, locate).data)
        archive.writestr("archive/data/0", record.numpy().tobytes())
        archive.writestr("archive/version", "3\n")
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8))


def test_a_model_and_its_optimizer_equal_torch_save() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    assert pickle_state(state, {}, lambda tensor: None).data == torch_data_pkl(state)


def test_a_key_is_one_string_however_locate_spells_it() -> None:
    """A pickle writes an object once and refers to it after that; keys of two digits are new objects."""
    store = Store([torch.float32] * 12)
    state = [whole[:2] for whole in store.wholes] + [whole[2:] for whole in store.wholes]
    assert pickle_state(state, store.nbytes, store.locate).data == torch_data_pkl(state)


def test_resident_tensors_keep_the_tag_of_their_device_and_payload_is_tagged_cpu() -> None:
    tensor = torch.zeros(1024)
    addresses = {tensor.data_ptr()}  # emptied in the end: a registration lasts, and addresses are used again
    torch.serialization.register_package(
        1, lambda storage: "elsewhere" if storage.data_ptr() in addresses else None, lambda storage, tag: None
    )
    resident = pickle_state(tensor, {}, lambda _: None).data
    assert resident == torch_data_pkl(tensor)
    assert b"elsewhere" in resident
    payload = pickle_state(tensor, {"0": RECORD_BYTES}, lambda _: StorageRef("0", 0)).data
    assert b"cpu" in payload
    assert b"elsewhere" not in payload
    addresses.clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_resident_tensors_on_a_gpu_equal_torch_save() -> None:
    tensor = torch.arange(7, device="cuda")
    assert pickle_state(tensor, {}, lambda _: None).data == torch_data_pkl(tensor)


def test_requires_grad_is_kept() -> None:
    store = Store([torch.float32])
    tensor = store.wholes[0].requires_grad_()
    assert pickle_state(tensor, store.nbytes, store.locate).data == torch_data_pkl(tensor)


def test_meta_tensors_may_stand_for_payload() -> None:
    real = torch.zeros(1024)[8:24].view(4, 4).t()
    stand_in = torch.empty(4, 4, device="meta").t()
    pickled = pickle_state(stand_in, {"0": RECORD_BYTES}, lambda tensor: StorageRef("0", 8))
    assert pickled.data == torch_data_pkl(real)


UNREADABLE = """
import ctypes, mmap, torch
from swapper.formats.torch_writer import StorageRef, pickle_state
from swapper.formats.container import ChecksumChunk, ContainerLayout, PreparedTail
memory = mmap.mmap(-1, 8192)
dtypes = torch.float32, torch.float8_e4m3fn
tensors = [torch.frombuffer(memory, dtype=dtype, count=16, offset=4096) for dtype in dtypes]
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), 8192, 0) == 0
keys = {torch.float32: "0", torch.float8_e4m3fn: "1"}
state = {"a": tensors, "b": tensors[0].view(4, 4).t(), "c": tensors[1][3]}
layout = ContainerLayout.plan([4096, 4096])
tail = PreparedTail(layout, state, lambda t: StorageRef(keys[t.dtype], 0))
print(len(tail.build([ChecksumChunk(r.offset, r.nbytes, 0) for r in layout.records])), flush=True)
tensors[0].sum()
"""


def test_located_data_is_not_touched() -> None:
    """Memory that cannot be read: the tail is made, and the one read after it ends the process."""
    result = subprocess.run([sys.executable, "-c", UNREADABLE], capture_output=True, text=True, check=False)
    assert result.stdout.strip().isdigit(), result.stderr
    assert result.returncode == -11


class Colour(enum.Enum):
    RED = 1


class Custom:
    pass


Pair = namedtuple("Pair", "a b")

REFUSED = {
    "enum": Colour.RED,
    "object": Custom(),
    "class": Custom,
    "function": every_dense_dtype,
    "builtin": len,
    "namedtuple": Pair(1, 2),
    "defaultdict": defaultdict(list),
    "frozenset": frozenset({1}),
    "fraction": Fraction(1, 2),
    "numpy scalar": numpy.float64(1.0),
    "numpy array": numpy.zeros(2),
    "empty bytes": b"",
    "module": torch.nn.Linear(2, 2),
}


@pytest.mark.whole
@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_what_torch_load_refuses_is_refused_by_name(value) -> None:
    file = io.BytesIO()
    torch.save({"x": value}, file)
    file.seek(0)
    with pytest.raises(Exception, match=r"[Ww]eights"):
        torch.load(file, weights_only=True)
    kind = value if isinstance(value, type) or callable(value) else type(value)
    name = getattr(kind, "__qualname__", type(value).__qualname__)
    with pytest.raises(CheckpointError, match=name):
        pickle_state({"x": [value]}, {}, lambda tensor: None)


def test_what_the_user_allows_is_written() -> None:
    with torch.serialization.safe_globals([Colour]):
        pickled = pickle_state({"x": Colour.RED}, {}, lambda tensor: None)
    assert pickled.data == torch_data_pkl({"x": Colour.RED})
    with pytest.raises(CheckpointError):
        pickle_state({"x": Colour.RED}, {}, lambda tensor: None)


class Marked(torch.Tensor):
    pass


def tensor_with_attribute() -> torch.Tensor:
    tensor = torch.zeros(2)
    tensor.note = "hello"
    return tensor


REFUSED_TENSORS = {
    "Parameter": (torch.nn.Parameter(torch.zeros(2)), "Parameter.*state_dict"),
    "subclass": (torch.zeros(2).as_subclass(Marked), "Marked.*plain tensor"),
    "sparse": (torch.eye(3).to_sparse(), "sparse"),
    "csr": (torch.eye(3).to_sparse_csr(), "sparse"),
    "nested": (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "nested"),
    "quantized": (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
    "bytes seen as quantized": (torch.zeros(3, dtype=torch.uint8).view(torch.quint8), "quantized"),
    "conjugate": (torch.zeros(3, dtype=torch.complex64).conj(), "conjugate"),
    "negation": (torch.zeros(3, dtype=torch.complex64).conj().imag, "negation"),
    "meta": (torch.zeros(3, device="meta"), "meta device"),
    "attributes": (tensor_with_attribute(), "attributes.*note"),
    "storage": (torch.zeros(3).untyped_storage(), "UntypedStorage"),
}


@pytest.mark.whole
@pytest.mark.parametrize(("value", "message"), REFUSED_TENSORS.values(), ids=REFUSED_TENSORS)
def test_tensors_that_cannot_be_written_exactly_are_refused(value, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        pickle_state({"x": value}, {}, lambda tensor: None)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("tensor", "ref", "fits"),
    [
        (torch.zeros(1024), StorageRef("0", 0), True),
        (torch.zeros(1023), StorageRef("0", 1), True),
        (torch.zeros(()), StorageRef("0", 1023), True),
        (torch.zeros(0), StorageRef("0", 1024), True),
        (torch.zeros(4, 256).t(), StorageRef("0", 0), True),
        (torch.zeros(2, 2).as_strided((2, 2), (0, 0)), StorageRef("0", 1023), True),
        (torch.zeros(1024), StorageRef("0", 1), False),
        (torch.zeros(1024, dtype=torch.float64), StorageRef("0", 0), False),
        (torch.zeros(()), StorageRef("0", 1024), False),
        (torch.zeros(()), StorageRef("0", -1), False),
        (torch.zeros(0), StorageRef("0", 1025), False),
        (torch.zeros(2048)[::2], StorageRef("0", 0), False),
        (torch.zeros(1), StorageRef("1", 0), False),
        (torch.zeros(1), StorageRef("", 0), False),
    ],
)
def test_a_place_outside_of_its_record_is_refused(tensor, ref, fits) -> None:
    def write() -> bytes:
        return pickle_state([tensor], {"0": RECORD_BYTES}, lambda _: ref).data

    if fits:
        assert write().endswith(b".")
    else:
        with pytest.raises(CheckpointError, match="record"):
            write()


@pytest.mark.whole
@pytest.mark.parametrize("other", [torch.bfloat16, torch.int32, torch.uint16], ids=str)
def test_two_dtypes_in_one_record_are_refused(other) -> None:
    whole = torch.zeros(1024)
    with pytest.raises(CheckpointError, match="another dtype"):
        pickle_state([whole, whole.view(other)], {"0": RECORD_BYTES}, lambda _: StorageRef("0", 0))
    with pytest.raises(CheckpointError, match="another dtype"):
        pickle_state([whole, whole.view(other)], {}, lambda _: None)

"""Pickles of a few bytes that describe a nest without end, or ask for work without end: refused, and at once.

A test that fails here does not return: pytest's timeout ends it.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swapper.checkpoint import load
from swapper.checkpoint.exporting import export, select
from swapper.checkpoint.inspecting import inspect
from swapper.errors import CheckpointError, SwapperError
from swapper.formats.pickle_reader import read_skeleton
from swapper.formats.sources import open_source
from swapper.formats.unpickling import Global


def pickled(*opcodes: bytes) -> bytes:
    return b"\x80\x02" + b"".join(opcodes) + b"."


def twice(make: Callable[[Any], Any], levels: int = 60) -> bytes:
    """A nest each of whose levels holds the next one twice."""
    inner: Any = make({"leaf": 1})
    for _ in range(levels):
        inner = make(inner)
    return pickle.dumps(inner, 2)


def holding_itself(make: Callable[[], Any], put: Callable[[Any, Any], None]) -> bytes:
    holder = make()
    put(holder, holder)
    return pickle.dumps(holder, 2)


ENDLESS = {
    "a list that holds itself twice": pickled(b"]q\x00(h\x00h\x00e"),
    "a dict that holds itself": holding_itself(dict, lambda a, b: a.update(b={"c": b})),
    "an OrderedDict that holds itself": holding_itself(OrderedDict, lambda a, b: a.update(b=b)),
    "a tuple with a list with the tuple": pickled(b"]q\x00h\x00h\x00\x86q\x01a"),
    "lists doubled": twice(lambda inner: [inner, inner]),
    "tuples doubled": twice(lambda inner: (inner, inner)),
    "dicts doubled": twice(lambda inner: {"a": inner, "b": inner}),
    "OrderedDicts doubled": twice(lambda inner: OrderedDict(a=inner, b=inner)),
    "defaultdicts doubled": twice(lambda inner: defaultdict(list, a=inner, b=inner)),
    "few levels of many": twice(lambda inner: [inner] * 100, 5),
    "deeper than Python writes": pickled(b"]" * 100_000, b"a" * 99_999),
    "a name that is longer than any": pickle.dumps({"k" * 20_000: 1}, 2),
    "a long name of many": pickle.dumps({"k" * 9_000: [0] * 100_000}, 2),
    "half of a surrogate pair": pickle.dumps({"\ud800": 1}, 2),
}
"""What the unpickler may take, and the walk must not."""

DOUBLED_KEY = (b"(X\x01\x00\x00\x00at", *[b"2\x86"] * 60)
"""A tuple of 60 levels, each of which holds the next one twice: it takes an age to hash."""
GLOBAL = b"cposix\nsystem\n"
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


def tensor(offset: bytes, size: bytes, stride: bytes) -> bytes:
    return REBUILD + b"(" + STORAGE + offset + size + stride + b"\x89ccollections\nOrderedDict\n)RtR"


def huge(number: int) -> bytes:
    return pickle.dumps(number, 2)[2:-1]


ENDLESS_WORK = {
    "a key that takes an age to hash": pickled(b"}", *DOUBLED_KEY, b"Ns"),
    "such keys at once": pickled(b"(", *DOUBLED_KEY, b"Nd"),
    "such an item of a set": b"\x80\x04\x8f(" + b"".join(DOUBLED_KEY) + b"\x90.",
    "such an item of a frozenset": b"\x80\x04(" + b"".join(DOUBLED_KEY) + b"\x91.",
    "such an item of a set by its class": pickled(b"c__builtin__\nset\n(]", *DOUBLED_KEY, b"atR"),
    "such a key of an OrderedDict": pickled(b"ccollections\nOrderedDict\n((", *DOUBLED_KEY, b"N\x86tR"),
    "such a key in an object's state": pickled(b"}", GLOBAL, b")R}X\x01\x00\x00\x00b", *DOUBLED_KEY, b"sbNs"),
    "a key that overflows the stack": pickled(b"})", b"\x85" * 200_000, b"Ns"),
    "keys of one hash": pickled(b"}(", *(huge(k * ((1 << 61) - 1)) + b"K\x00" for k in range(20_000)), b"u"),
    "arguments copied again and again": pickled(
        b"ccollections\nOrderedDict\nq\x00(", b"K\x00K\x00\x86" * 20_000, b"tq\x01\x85q\x02", b"0h\x00h\x02R" * 10_000
    ),
    "a size copied again and again": pickled(
        b"ctorch\nSize\nq\x00(", b"K\x01" * 1000, b"tq\x01\x85q\x02", b"h\x00h\x02R"
    ),
    "a bytearray beyond the end": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "bytes by their number": pickled(b"c__builtin__\nbytearray\n", huge(1 << 40), b"\x85R"),
    "a tensor beyond its storage": pickled(tensor(b"K\x00", b"K\x05\x85", b"K\x01\x85")),
    "a tensor of more than there can be": pickled(tensor(b"K\x00", huge(1 << 61) + b"\x85", b"K\x00\x85")),
    "strides that overflow": pickled(tensor(b"K\x00", b"K\x02\x85", huge(1 << 63) + b"\x85")),
    "a negative offset": pickled(tensor(huge(-4), b"K\x01\x85", b"K\x01\x85")),
    "more dimensions than there can be": pickled(
        tensor(b"K\x00", b"(" + b"K\x01" * 100 + b"t", b"(" + b"K\x00" * 100 + b"t")
    ),
    "a tensor that is changed when it was checked": pickled(
        tensor(b"K\x00", b"K\x04\x85", b"K\x01\x85"), b"(NNK\x00K\x09\x85K\x01\x85\x89tb"
    ),
    "a storage that is changed": pickled(STORAGE, b"(X\x01\x00\x00\x000Nh\x00K\x09tb"),
    **{
        f"such an argument of {name.decode()}": pickled(b"c" + module + b"\n" + name + b"\n", *DOUBLED_KEY, b"\x85R")
        for module, name in (
            (b"torch.serialization", b"_get_layout"),
            (b"torch.distributed.checkpoint.metadata", b"_MEM_FORMAT_ENCODING"),
            (b"builtins", b"slice"),
        )
    },
    "a path of paths": pickled(b"cpathlib\nPosixPath\nq\x00X\x01\x00\x00\x00a\x85R", b"q\x01h\x00h\x01h\x01\x86R" * 60),
    "a call of a nest": pickled(*DOUBLED_KEY, b"K\x01R"),
    "a storage that is a nest": pickled(*DOUBLED_KEY, b"Q"),
    "a class that is changed": pickled(GLOBAL, b"}X\x01\x00\x00\x00aNsb"),
}
"""What the unpickler itself must not take."""


NONSENSE = {
    "it calls something with invalid arguments": pickled(b"ccollections\nOrderedDict\n", b"K\x01R"),
    "it calls a str": pickled(b"X\x01\x00\x00\x00a", b")R"),
    "it puts items into a list, or half a pair": pickled(b"](K\x01K\x02u"),
    "it appends to a dict": pickled(b"}(K\x01e"),
    "it adds to a list": b"\x80\x04](K\x01\x90.",
    "it names objects by numbers": b"\x80\x02\x82\x01.",
    "it has 1099511627776 bytes in one piece": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "it has an invalid torch.Size": pickled(b"ctorch\nSize\n", b"K\x01\x85R"),
    "of a kind or size that checkpoints do not have": pickled(b"}", b"(" + b"K\x01" * 10_000 + b"tNs"),
    "is damaged: TypeError: unhashable type": pickled(b"}", b"]\x85Ns"),
}
PLAIN = {
    "an object by its class and arguments": pickled(b"(icollections\nOrderedDict\n"),
    "the same from the stack": pickled(b"(ccollections\nOrderedDict\no"),
    "the same with names": b"\x80\x04ccollections\nOrderedDict\n)}\x92.",
    "keys that are tuples": pickled(b"}(K\x01K\x02\x86K\x03X\x01\x00\x00\x00a\x85Nu"),
    "a frozenset": b"\x80\x04(K\x01\x91.",
    "what is called on something that is not known": pickled(GLOBAL, b")R)R"),
}


@pytest.mark.whole
@pytest.mark.parametrize("says", NONSENSE)
def test_a_pickle_that_makes_no_sense_is_refused(says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        list(read_skeleton(NONSENSE[says], "a file").leaves())


@pytest.mark.whole
@pytest.mark.parametrize("name", PLAIN)
def test_an_unusual_pickle_is_taken(name: str) -> None:
    list(read_skeleton(PLAIN[name], "a file").leaves())


@pytest.mark.whole
@pytest.mark.parametrize("data", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_nest_without_end_is_refused(data: bytes) -> None:
    skeleton = read_skeleton(data, "x")
    with pytest.raises(CheckpointError, match=r"hostile or damaged|is not a string"):
        for _ in skeleton.leaves():
            pass


@pytest.mark.whole
@pytest.mark.parametrize("data", ENDLESS_WORK.values(), ids=ENDLESS_WORK.keys())
def test_work_without_end_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^x"):
        read_skeleton(data, "x")


def archive(path: Path, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", data)
        file.writestr("x/data/0", bytes(16))
        file.writestr("x/version", b"3\n")
    return path


@pytest.mark.whole
@pytest.mark.parametrize("data", [*ENDLESS.values(), *ENDLESS_WORK.values()], ids=[*ENDLESS, *ENDLESS_WORK])
def test_whatever_reads_a_file_refuses_them(data: bytes, tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pt", data)
    for read in (open_source, inspect, select, lambda path: export(path, tmp_path / "y.pt", "torch")):
        with pytest.raises(CheckpointError):
            read(path)
    if data in ENDLESS_WORK.values():  # torch makes nothing of the others' names
        with pytest.raises(CheckpointError):
            load(path)
        old = tmp_path / "old.pt"
        torch.save({}, old, _use_new_zipfile_serialization=False)
        content = old.read_bytes()
        empty = pickle.dumps({}, 2)
        old.write_bytes(content.replace(empty, data, 1) if empty in content else content + data)
        with pytest.raises(CheckpointError):
            load(old)


def test_in_a_directory_of_dcp_and_of_an_item_they_are_refused(tmp_path: Path) -> None:
    from swapper.checkpoint.dcp_reader import StorageReader

    for data in ENDLESS_WORK.values():
        (tmp_path / ".metadata").write_bytes(data)
        for read in (open_source, inspect, select, lambda path: StorageReader(path).read_metadata()):
            with pytest.raises(CheckpointError):
                read(tmp_path)


def test_what_real_checkpoints_have_is_taken() -> None:
    shared = {"betas": (0.9, 0.999), "lr": 1e-3}
    tree = {
        "groups": [shared] * 5000,
        "history": [0] * 200_000,
        "keys": {1: "a", 2.5: "b", None: "c", (0, ("a", 1)): "d", b"x": "e"},
        "counter": Counter("abca"),
        "default": defaultdict(list, a=[1]),
        "ordered": OrderedDict([("a", 1), ("b", OrderedDict())]),
        "set": {1, 2, (3, 4)},
        "frozen": frozenset({1}),
        "bytes": (b"abc", bytearray(b"abc"), bytearray()),
        "vocabulary": {f"token {n}": n for n in range(10_000)},
    }
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        skeleton = read_skeleton(pickle.dumps(tree, protocol), "x")
        names = {name for name, _ in skeleton.leaves()}
        wanted = ["groups.4999.lr", "history.199999", "keys.(0, ('a', 1))", "keys.2.5", "vocabulary.token 7"]
        wanted += ["ordered.a", "default.a.0", "counter.a"] if protocol >= 2 else []
        assert names >= set(wanted), protocol
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    assert len(list(read_skeleton(pickle.dumps(deep), "x").leaves())) == 1


def test_a_class_that_is_named_is_not_run() -> None:
    assert isinstance(read_skeleton(pickled(GLOBAL), "x").tree, Global)


def test_compressed_records_unpack_to_what_the_pickle_says(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for info in old.infolist():
            is_payload = "/data/" in info.filename
            content = bytes(1 << 24) if is_payload else old.read(info)
            new.writestr(info.filename, content, zipfile.ZIP_DEFLATED if is_payload else zipfile.ZIP_STORED)
    with pytest.raises(CheckpointError, match=r"has 16777216 bytes, and its data.pkl says 4000"):
        load(tmp_path / "y.pt")


def test_an_expanded_tensor_is_exported_in_bounded_memory(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(6.0).view(2, 1, 3).expand(2, 1_200_000, 3)}, tmp_path / "x.pt")
    export(tmp_path / "x.pt", tmp_path / "y.pt", "torch")
    written = torch.load(tmp_path / "y.pt", mmap=True)["a"]
    assert torch.equal(written, torch.arange(6.0).view(2, 1, 3).expand(2, 1_200_000, 3))


@pytest.mark.whole
@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"F32","shape":[' + b"4611686018427387904," * 100_000 + b'1],"data_offsets":[0,4]}}',
        b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"' + b"x" * 100_000 + b'","shape":[1],"data_offsets":[0,4]}}',
    ],
    ids=["a product without end", "half of a surrogate pair", "a long dtype"],
)
def test_hostile_headers_are_refused_in_few_words(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(CheckpointError) as caught:
        open_source(path)
    assert len(str(caught.value)) < 2000


@pytest.mark.whole
@pytest.mark.parametrize("place", ["file", "index", "shard", "metadata"])
def test_a_pipe_is_refused_and_not_waited_for(place: str, tmp_path: Path) -> None:
    import os

    names = {"index": "model.safetensors.index.json", "shard": "model.safetensors", "metadata": ".metadata"}
    os.mkfifo(tmp_path / names.get(place, "x.pt"))
    path = tmp_path if place != "file" else tmp_path / "x.pt"
    for read in (open_source, inspect, load) if place == "file" else (open_source, inspect):
        with pytest.raises(SwapperError):
            read(path)

"""Headers of safetensors files: what they say is found, and what they must not say is refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from sampling import examples

from swapper.errors import CheckpointError, IoError, SwapperError
from swapper.formats import safetensors
from swapper.formats.sources import open_source


def write(path: Path, header: Any, data: bytes = b"", claimed: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if claimed is None else claimed) + text + data)
    return path


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_every_tensor_of_a_file_by_the_library_is_where_the_reader_says(tmp_path):
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
    dtypes += [torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
    tensors = {f"t{i}": torch.randint(0, 2, (3, i + 1)).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(3.0)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = open_source(tmp_path / "model.safetensors")
    assert source.tensors.keys() == tensors.keys()
    assert source.metadata == {"format": "pt"}
    content = (tmp_path / "model.safetensors").read_bytes()
    for name, tensor in tensors.items():
        stored = source.tensors[name]
        assert (stored.dtype, stored.shape, stored.stride) == (tensor.dtype, tuple(tensor.shape), None)
        expected = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert content[stored.offset : stored.offset + stored.nbytes] == expected


HOSTILE = {
    "not JSON": (b"{nonsense", b""),
    "not UTF-8": (b'{"a\xff": 1}', b""),
    "nested without end": (b"{" + b'"a":[' * 100_000, b""),
    "an array": (b"[]      ", b""),
    "a duplicate key": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
    ),
    "a duplicate field": (b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"x"),
    "an unknown dtype": ({"a": entry(0, 1, dtype="F7")}, b"x"),
    "a dtype that is no text": ({"a": entry(0, 1, dtype=["U8"])}, b"x"),
    "an entry that is no object": ({"a": [0, 1]}, b"x"),
    "a shape that does not agree": ({"a": entry(0, 4, shape=[5])}, b"xxxx"),
    "a negative size": ({"a": entry(0, 1, shape=[-1])}, b"x"),
    "two negative sizes": ({"a": entry(0, 4, shape=[-2, -2])}, b"xxxx"),
    "a size that is a truth value": ({"a": entry(0, 1, shape=[True])}, b"x"),
    "a size that is a fraction": ({"a": entry(0, 1, shape=[1.0])}, b"x"),
    "a huge size": ({"a": entry(0, 0, shape=[1 << 80])}, b""),
    "offsets backwards": ({"a": entry(4, 0, shape=[0])}, b"xxxx"),
    "three offsets": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"x"),
    "an overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, b"x" * 6),
    "the same bytes twice": ({"a": entry(0, 4), "b": entry(0, 4)}, b"x" * 4),
    "a hole": ({"a": entry(0, 2), "b": entry(4, 6)}, b"x" * 6),
    "a hole at the start": ({"a": entry(1, 2)}, b"xx"),
    "bytes behind the end": ({"a": entry(0, 2)}, b"xxx"),
    "an end behind the file": ({"a": entry(0, 1 << 40)}, b"xxx"),
    "metadata that is no map": ({"__metadata__": 3}, b""),
    "metadata that is no text": ({"__metadata__": {"a": 1}}, b""),
}


@pytest.mark.whole
@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path, what):
    path = write(tmp_path / "hostile.safetensors", *HOSTILE[what])
    with pytest.raises(CheckpointError, match=r"hostile\.safetensors"):
        safetensors.read(path)


@pytest.mark.whole
@pytest.mark.parametrize("claimed", [1 << 63, 100_000_001, 17])
def test_a_header_larger_than_the_file_is_not_allocated(tmp_path, claimed):
    path = write(tmp_path / "x.safetensors", b"{}", claimed=claimed)
    with pytest.raises(CheckpointError, match=str(claimed)):
        safetensors.read(path)


def test_every_truncation_is_noticed(tmp_path):
    save_file({"a": torch.arange(10), "b": torch.zeros(3)}, tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    for nbytes in range(len(content)):
        path = tmp_path / "cut.safetensors"
        path.write_bytes(content[:nbytes])
        with pytest.raises(CheckpointError):
            safetensors.read(path)


@settings(max_examples=examples(200))
@given(position=st.integers(0, 400), value=st.integers(0, 255))
def test_any_changed_byte_gives_tensors_within_the_file_or_an_error_of_ours(tmp_path_factory, position, value):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    save_file({"a": torch.arange(10), "bb": torch.zeros(3, 5), "c": torch.ones(2, dtype=torch.bfloat16)}, path)
    content = bytearray(path.read_bytes())
    content[position % len(content)] = value
    path.write_bytes(content)
    try:
        source = safetensors.read(path)
    except SwapperError:
        return
    for tensor in source.tensors.values():
        assert tensor.offset >= 0 and tensor.offset + tensor.nbytes <= len(content)
        assert tensor.numel * tensor.dtype.itemsize == tensor.nbytes


# --- directories ------------------------------------------------------------------------------------------------------


def make_shards(directory: Path) -> None:
    save_file({"a": torch.zeros(2)}, directory / "model-1.safetensors")
    save_file({"b": torch.ones(2), "spare": torch.ones(1)}, directory / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_that_the_index_names_are_joined_with_all_that_they_have(tmp_path):
    make_shards(tmp_path)
    source = open_source(tmp_path)
    assert source.kind == "huggingface"
    assert source.tensors.keys() == {"a", "b", "spare"}
    assert source.tensors["b"].path == tmp_path / "model-2.safetensors"
    assert source.stamps.keys() == {tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"}


def test_missing_shards_are_named(tmp_path):
    make_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing: model-2\.safetensors"):
        open_source(tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize("shard", ["../secret", "/etc/passwd", "..", ""])
def test_an_index_cannot_lead_out_of_its_directory(tmp_path, shard):
    make_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match="not a file in its directory"):
        open_source(tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize("content", ["nonsense", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_is_refused(tmp_path, content):
    make_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_source(tmp_path)


def test_an_index_that_has_a_tensor_twice_is_refused(tmp_path):
    make_shards(tmp_path)
    twice = '{"weight_map": {"a": "model-1.safetensors", "a": "model-2.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(twice)
    with pytest.raises(CheckpointError, match="the key 'a' twice"):
        open_source(tmp_path)


def test_a_tensor_that_is_not_where_the_index_says_is_named(tmp_path):
    make_shards(tmp_path)
    weight_map = {"a": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="'a' is in model-2"):
        open_source(tmp_path)


def test_what_is_no_checkpoint_is_refused_with_the_reason(tmp_path):
    (tmp_path / "legacy.bin").write_bytes(b"\x80\x02}q\x00.")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    (tmp_path / "noise").write_bytes(b"0123456789abcdef")
    (tmp_path / "empty").mkdir()
    for name, reason in [
        ("legacy.bin", "old kind"),
        ("model.gguf", "GGUF"),
        ("noise", "neither"),
        ("empty", "no weights"),
    ]:
        with pytest.raises(CheckpointError, match=reason):
            open_source(tmp_path / name)
    with pytest.raises(IoError):
        open_source(tmp_path / "absent")


def test_several_files_without_an_index_are_not_guessed_at(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    assert open_source(tmp_path).tensors.keys() == {"a"}
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="several weight files"):
        open_source(tmp_path)


def test_a_file_that_changes_is_noticed(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    source = open_source(tmp_path)
    source.check_unchanged()
    save_file({"a": torch.zeros(3)}, tmp_path / "one.safetensors")
    with pytest.raises(CheckpointError, match="was changed while"):
        source.check_unchanged()
    (tmp_path / "one.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be checked any more"):
        source.check_unchanged()

"""The storage writer and reader of torch.distributed.checkpoint: each side reads what the other writes, sharded and not."""

from __future__ import annotations

import errno
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from e2e import fsdp_run
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import swapper
from checkpoint import dcp_process
from checkpoint.equality import bytes_of
from swapper.checkpoint.dcp import StorageReader, StorageWriter, split_by_size
from swapper.formats.dcp_format import read_directory

pytestmark = pytest.mark.filterwarnings("ignore")
WRITERS: dict[str, Callable[..., Any]] = {"ours": StorageWriter, "stock": dcp.FileSystemWriter}
READERS: dict[str, Callable[..., Any]] = {"ours": StorageReader, "stock": dcp.FileSystemReader}


def make_state() -> dict[str, Any]:
    torch.manual_seed(2)
    state: dict[str, Any] = {f"w{n}": torch.randn(200 + n, 1000) for n in range(5)}
    state |= {f"b{n}": torch.randn(n) for n in range(5)}
    state["half"] = torch.randn(77, 5).bfloat16()
    state["turned"] = torch.randn(60, 80).t()
    state["scalar"] = torch.tensor(3)
    state["part"] = torch.arange(1000.0)[10:20]
    state["words"] = {"a": 1, "b": [1, "x"]}
    return state


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else {"a": 0, "b": [0, ""]}
        for name, value in state.items()
    }


def assert_loaded(target: dict[str, Any], state: dict[str, Any]) -> None:
    assert target["words"] == state["words"]
    for name, value in target.items():
        if isinstance(value, torch.Tensor):
            assert bytes_of(value) == bytes_of(state[name]), name


@pytest.mark.whole
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False, "thread_count": 2}])
def test_each_reads_what_the_other_writes(writer: str, reader: str, options: dict[str, Any], tmp_path: Path) -> None:
    state = make_state()
    dcp.save(state, storage_writer=WRITERS[writer](tmp_path / "x", **options), no_dist=True)
    target = emptied(state)
    dcp.load(target, storage_reader=READERS[reader](tmp_path / "x"), no_dist=True)
    assert_loaded(target, state)
    files = list((tmp_path / "x").glob("*.distcp"))
    tensors = sum(isinstance(value, torch.Tensor) for value in state.values())
    assert (
        len(files) == options.get("thread_count", 1)
        if options.get("single_file_per_rank", True)
        else len(files) >= tensors
    )


def test_large_tensors_are_aligned(tmp_path: Path) -> None:
    dcp.save(make_state(), storage_writer=StorageWriter(tmp_path / "x"), no_dist=True)
    state = {name: value for name, value in make_state().items() if name.startswith("w") and name != "words"}
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "y"), no_dist=True)
    for tensor in read_directory(tmp_path / "y").tensors.values():
        assert tensor.chunks[0].stored.offset % 4096 == 0


def test_async_save_works_as_with_torchs_own(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        state = make_state()
        future = dcp.async_save(state, storage_writer=StorageWriter(tmp_path / "x"))
        getattr(future, "upload_completion", future).result()
        target = emptied(state)
        dcp.load(target, storage_reader=StorageReader(tmp_path / "x"))
        assert_loaded(target, state)
    finally:
        dist.destroy_process_group()


def run_together(world: int, directory: Path, action: str, whose: str) -> None:
    """Run `dcp_process.run` in `world` forked processes, which have torch imported: that saves most of the time."""
    meeting = Path(tempfile.mkdtemp(dir=directory.parent)) / "meeting"
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                dcp_process.run(rank, world, meeting, directory, action, whose)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * world


def test_two_processes_save_and_one_and_three_load(tmp_path: Path) -> None:
    run_together(2, tmp_path / "ours", "save", "ours")
    run_together(1, tmp_path / "ours", "load", "ours")
    run_together(3, tmp_path / "ours", "load", "ours")
    run_together(3, tmp_path / "ours", "load", "stock")


def test_what_torchs_writer_sharded_is_loaded(tmp_path: Path) -> None:
    run_together(2, tmp_path / "stock", "save", "stock")
    run_together(3, tmp_path / "stock", "load", "ours")


def test_a_checkpoint_that_is_overwritten_is_whole_until_the_new_one_is(tmp_path: Path) -> None:
    old, new = {"a": torch.zeros(5000)}, {"a": torch.ones(5000)}
    dcp.save(old, storage_writer=StorageWriter(tmp_path / "x"), no_dist=True)
    seen: list[float] = []

    class Watched(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            target = {"a": torch.full((5000,), 7.0)}
            dcp.load(target, storage_reader=StorageReader(tmp_path / "x"), no_dist=True)
            seen.append(target["a"].max().item())
            super().finish(metadata, results)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Detected an existing checkpoint")
        dcp.save(new, storage_writer=Watched(tmp_path / "x"), no_dist=True)
    target = {"a": torch.zeros(5000)}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "x"), no_dist=True)
    assert (seen, target["a"].min().item()) == ([0.0], 1.0)
    assert len(list((tmp_path / "x").iterdir())) == 2
    with pytest.raises(CheckpointException, match="overwrite=True"):
        dcp.save(new, storage_writer=StorageWriter(tmp_path / "x", overwrite=False), no_dist=True)


def test_a_failed_save_leaves_no_metadata_and_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swapper.checkpoint.stream import StreamWriter

    def fails(writer: StreamWriter) -> None:
        raise swapper.IoError("write", "x", 0, 1, errno.ENOSPC)

    monkeypatch.setattr(StreamWriter, "finish", fails)
    with pytest.raises(CheckpointException, match="No space left"):
        dcp.save({"a": torch.ones(3)}, storage_writer=StorageWriter(tmp_path / "x"), no_dist=True)
    assert list((tmp_path / "x").iterdir()) == []


def test_what_a_writer_cannot_do_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(swapper.ConfigError, match="thread_count=0 must be 1 or more"):
        StorageWriter(tmp_path / "x", thread_count=0)
    dcp.save({"a": torch.ones(3)}, storage_writer=StorageWriter(tmp_path / "x"), no_dist=True)
    before = {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}
    with pytest.raises(CheckpointException, match="holds a checkpoint already: choose another, or pass overwrite=True"):
        dcp.save({"a": torch.zeros(3)}, storage_writer=StorageWriter(tmp_path / "x", overwrite=False), no_dist=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()} == before


def _attributes_of_a_class() -> bytes:
    """A pickle that sets an attribute of torch's class, not of an instance."""
    return b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(S'storage_meta'\nI3\ndtb."


def _records(metadata: Any) -> list[Any]:
    """Every kind of record in the metadata of one tensor."""
    tensor = metadata.state_dict_metadata["a"]
    index, info = next((index, info) for index, info in metadata.storage_data.items() if index.fqn == "a")
    return [metadata, tensor, tensor.properties, tensor.chunks[0], index, info]


@pytest.mark.whole
@pytest.mark.parametrize(
    "wrong", [None, 3, -1, "x", "../x", [7], torch.Size([-1]), torch.Size([9, 9, 9]), 1 << 62, "deleted"]
)
def test_a_field_of_the_metadata_that_is_missing_or_of_another_kind_ends_in_an_error_of_ours(
    tmp_path: Path, wrong: Any
) -> None:
    """Or it changes nothing: some fields are not read."""
    saved = {"a": torch.arange(5000.0).view(50, 100), "b": {"c": 3}}
    dcp.save(saved, storage_writer=StorageWriter(tmp_path / "x"), no_dist=True)
    path = tmp_path / "x" / ".metadata"
    good = path.read_bytes()
    refused: set[str] = set()
    for nth, record in enumerate(_records(pickle.loads(good))):
        for field in vars(record):
            metadata = pickle.loads(good)
            changed = _records(metadata)[nth]
            if wrong == "deleted":
                vars(changed).pop(field)
            else:
                vars(changed)[field] = wrong
            try:
                path.write_bytes(pickle.dumps(metadata))
            except Exception:  # torch's own records refuse to be written so
                continue
            target = {"a": torch.zeros(50, 100), "b": {"c": 0}}
            reader = StorageReader(tmp_path / "x")
            try:
                reader.read_metadata()  # dcp.load would give the message of its error only
                dcp.load(target, storage_reader=reader, no_dist=True)
                assert bytes_of(target["a"]) == bytes_of(saved["a"]) and target["b"] == {"c": 3}, field
            except swapper.CheckpointError:
                refused.add(field)
            except CheckpointException as error:
                failure, where = next(iter(error.failures.values()))
                planner = where[-1].filename.endswith(("planner_helpers.py", "default_planner.py"))
                assert planner or isinstance(failure, swapper.SwapperError), (field, failure)
                refused.add(field)
    assert {"state_dict_metadata", "storage_data", "chunks", "properties"} <= refused


def test_damaged_and_hostile_checkpoints_end_in_errors_of_ours(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(5000)}, storage_writer=StorageWriter(tmp_path / "x"), no_dist=True)
    metadata = tmp_path / "x" / ".metadata"
    good = metadata.read_bytes()

    class Hostile:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "was here"),))

    for data, message in (
        (pickle.dumps(Hostile()), "mkdir"),
        (good[:-20], "damaged"),
        (pickle.dumps(3), "no Metadata"),
        (_attributes_of_a_class(), "hostile"),
    ):
        metadata.write_bytes(data)
        with pytest.raises(swapper.CheckpointError, match=message):
            StorageReader(tmp_path / "x").read_metadata()
    assert not (tmp_path / "was here").exists()
    metadata.write_bytes(good)
    os.truncate(tmp_path / "x" / "__0_0.distcp", 10_000)
    with pytest.raises(CheckpointException, match=r"it was cut"):
        dcp.load({"a": torch.zeros(5000)}, storage_reader=StorageReader(tmp_path / "x"), no_dist=True)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("reader", READERS)
def test_tensors_that_are_views_with_a_sign_are_loaded_as_their_values(
    writer: str, reader: str, tmp_path: Path
) -> None:
    turned = torch.randn(4, 3, dtype=torch.complex64).conj()
    state = {"conjugate": turned, "negative": turned.imag, "parameter": torch.nn.Parameter(torch.ones(3))}
    dcp.save(state, storage_writer=WRITERS[writer](tmp_path / "x"), no_dist=True)
    found = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in state.items()}
    dcp.load(found, storage_reader=READERS[reader](tmp_path / "x"), no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_metadata_and_files_that_do_not_fit_together_end_in_errors_that_say_so(tmp_path: Path) -> None:
    state = {
        "a": torch.ones(50, 10),
        "short": torch.ones(40, 10),
        "word": "x",
        "m.codec": "8bit",
        "m.odd": torch.ones(3),
    }
    plain = {name: value for name, value in state.items() if not name.startswith("m.")}
    dcp.save(plain, storage_writer=StorageWriter(tmp_path / "x"), no_dist=True)
    path = tmp_path / "x" / ".metadata"
    good = path.read_bytes()

    def place(metadata: Any, name: str) -> Any:
        return next(index for index in metadata.storage_data if index.fqn == name)

    def refused(change: Callable[[Any], None]) -> str:
        metadata = pickle.loads(good)
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"a": torch.zeros(50, 10)}, storage_reader=StorageReader(tmp_path / "x"), no_dist=True)
        (failure, _) = next(iter(caught.value.failures.values()))
        assert isinstance(failure, swapper.CheckpointError), failure
        return str(failure)

    def moved_to(name: str) -> Callable[[Any], None]:
        def change(metadata: Any) -> None:
            metadata.storage_data[place(metadata, "a")] = metadata.storage_data[place(metadata, name)]

        return change

    def transformed(metadata: Any) -> None:
        metadata.storage_data[place(metadata, "a")].transform_descriptors = ["gzip"]

    assert "a is (40, 10) there: (50, 10) from (0, 0) on are beyond its end" in refused(moved_to("short"))
    assert "a is no tensor" in refused(moved_to("word"))
    assert "an item was transformed (['gzip']) when it was saved: use torch's reader" in refused(transformed)
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "y"), no_dist=True)
    with pytest.raises(
        swapper.CheckpointError, match=r"m is encoded, in parts that this swapper does not know: \['odd'\]"
    ):
        StorageReader(tmp_path / "y").read_metadata()


def test_a_directory_of_the_name_of_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "x" / ".metadata").mkdir(parents=True)
    with pytest.raises(CheckpointException, match=r"Is a directory.*\.metadata|\.metadata.*Is a directory"):
        dcp.save({"a": torch.ones(3)}, storage_writer=StorageWriter(tmp_path / "x"), no_dist=True)


def test_shares_are_of_about_equal_size() -> None:
    def item(rows: int) -> WriteItem:
        size = torch.Size([rows, 10])
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
        data = TensorWriteData(chunk, TensorProperties(torch.float32), size)
        return WriteItem(MetadataIndex(str(rows)), WriteItemType.TENSOR, tensor_data=data)

    items = [item(rows) for rows in (100, 90, 80, 70, 60, 50, 10, 5)]
    shares = split_by_size(items, 3)
    sizes = [sum(one.tensor_data.size[0] for one in share if one.tensor_data) for share in shares]
    assert sum(sizes) == 465 and max(sizes) - min(sizes) <= 20
    assert [len(split_by_size(items[:2], 5)), len(split_by_size([], 5))] == [2, 1]


def test_encoded_state_of_a_snapshot_is_loaded_as_its_values(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Of more ranks: test_resharding.py."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    model, optimizer = fsdp_run.make({})
    options = {"params": "nvme", "optimizer_state": "nvme", "state_codec": "8bit"}
    with swapper.SwapManager(tmp_path / "run", host_memory="64MiB") as manager:
        _, paged = manager.offload(model, optimizer, **options)
        fsdp_run.train(model, paged, {}, None, 0)
        manager.snapshot(tmp_path / "snapshot").result()
        saved = get_optimizer_state_dict(model, paged)
        expected = {name: value.full_tensor().clone() for name, value in moments(saved)}
    assert StorageReader(tmp_path / "snapshot").read_metadata().state_dict_metadata.keys() > expected.keys()
    other, plain = fsdp_run.make({})
    fsdp_run.train(other, plain, {}, None, 1)
    state = {"optimizer": get_optimizer_state_dict(other, plain)}
    dcp.load(state, storage_reader=StorageReader(tmp_path / "snapshot"))
    found = {name: value.full_tensor() for name, value in moments(state["optimizer"])}
    assert found.keys() == expected.keys() and len(found) > 10
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def moments(state: Any) -> list[tuple[str, Any]]:
    """Return AdamW's moments in a state dict of an optimizer, by their names in a snapshot."""
    return [
        (f"optimizer.state.{parameter}.{key}", value)
        for parameter, values in state["state"].items()
        for key, value in values.items()
        if key != "step"
    ]

"""Every format becomes every other one, bit for bit; what cannot be exported is refused; and nothing is left half-done."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from e2e.processes import run_python
from typer.testing import CliRunner

import swapper
from checkpoint.equality import bytes_of
from swapper.checkpoint import load, save
from swapper.checkpoint.exporting import FORMATS, export, select
from swapper.checkpoint.inspecting import inspect
from swapper.checkpoint.writers import PIECE_ELEMENTS
from swapper.cli import app
from swapper.formats.dcp_format import read_directory
from swapper.formats.sources import open_source

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint's remarks about one process


def model_state() -> dict[str, torch.Tensor]:
    """Large and small tensors, of several dtypes and strides, one of them twice."""
    torch.manual_seed(5)
    state = {f"layers.{n}.weight": torch.randn(300 + n, 1024) for n in range(6)}
    state |= {f"layers.{n}.bias": torch.randn(n + 1).bfloat16() for n in range(6)}
    state["scalar"] = torch.tensor(7, dtype=torch.int64)
    state["turned"] = torch.randn(50, 70).t()
    state["none"] = torch.empty(0, 3)
    state["tied"] = state["layers.0.weight"]
    return state


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def read_back(path: Path, to: str, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the format's own library reads."""
    if to == "torch":
        return torch.load(path)
    if to == "safetensors":
        return safetensors.torch.load_file(path)
    if to == "dcp":
        target = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        dcp.load(target, checkpoint_id=path, no_dist=True)
        return target
    loaded: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        loaded |= safetensors.torch.load_file(file)
    return loaded


def assert_equal(loaded: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(loaded[name]) == bytes_of(tensor), name


@pytest.mark.whole
@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("to", FORMATS)
def test_every_format_becomes_every_other(source: str, to: str, tmp_path: Path) -> None:
    state = model_state()
    save({"model": state, "optimizer": {"state": {0: torch.ones(5)}}, "step": 12}, tmp_path / "x.pt")
    export(tmp_path / "x.pt", tmp_path / "source", source, shard_bytes=3_000_000)
    export(tmp_path / "source", tmp_path / "target", to, shard_bytes=2_000_000)
    assert_equal(read_back(tmp_path / "target", to, state), state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target", "x.pt"]


def test_what_torch_distributed_checkpoint_and_safetensors_write_is_read(tmp_path: Path) -> None:
    state = model_state()
    dcp.save({"model": state, "step": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    export(tmp_path / "dcp", tmp_path / "a.pt", "torch")
    assert_equal(torch.load(tmp_path / "a.pt"), state)
    plain = {name: tensor.contiguous() for name, tensor in state.items() if name != "tied"}
    safetensors.torch.save_file(plain, tmp_path / "x.safetensors")
    export(tmp_path / "x.safetensors", tmp_path / "b.pt", "torch")
    assert_equal(torch.load(tmp_path / "b.pt"), plain)


def test_a_file_for_torch_is_sound_and_keeps_what_is_one_as_one(tmp_path: Path) -> None:
    save(model_state(), tmp_path / "x.pt")
    export(tmp_path / "x.pt", tmp_path / "y.pt", "torch")
    with zipfile.ZipFile(tmp_path / "y.pt") as archive:
        assert archive.testzip() is None
    loaded = load(tmp_path / "y.pt", verify=True)
    assert loaded["tied"].data_ptr() == loaded["layers.0.weight"].data_ptr()
    assert torch.load(tmp_path / "y.pt", mmap=True)["scalar"] == 7


def test_all_means_the_optimizer_too(tmp_path: Path) -> None:
    whole = {"model": model_state(), "optimizer": {"state": {0: {"exp_avg": torch.ones(5)}}}, "step": 12}
    save(whole, tmp_path / "x.pt")
    export(tmp_path / "x.pt", tmp_path / "y.safetensors", "safetensors", what="all")
    loaded = safetensors.torch.load_file(tmp_path / "y.safetensors")
    assert torch.equal(loaded["optimizer.state.0.exp_avg"], torch.ones(5))
    assert bytes_of(loaded["model.turned"]) == bytes_of(whole["model"]["turned"])  # type: ignore[index]
    export(tmp_path / "x.pt", tmp_path / "y.pt", "torch", what="all")
    assert torch.load(tmp_path / "y.pt")["step"] == 12
    assert select(tmp_path / "x.pt").left_out == ["optimizer.state.0.exp_avg", "step"]


def test_shards_have_an_index_and_transformers_names(tmp_path: Path) -> None:
    state = model_state()
    save(state, tmp_path / "x.pt")
    export(tmp_path / "x.pt", tmp_path / "hf", "huggingface", shard_bytes=3_000_000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "hf").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files and len(files) > 2
    assert index["weight_map"].keys() == state.keys()
    assert all(path.stat().st_size < 3_100_000 for path in (tmp_path / "hf").glob("*.safetensors"))
    assert f"model-00001-of-{len(files):05d}.safetensors" in files


def test_large_tensors_are_aligned_in_every_format(tmp_path: Path) -> None:
    save({f"w{n}": torch.randn(256, 1024) for n in range(3)} | {"b": torch.ones(3)}, tmp_path / "x.pt")
    for to in ("torch", "safetensors", "dcp"):
        export(tmp_path / "x.pt", tmp_path / to, to)
        tensors = open_source(tmp_path / to).tensors
        assert all(tensors[f"w{n}"].offset % 4096 == 0 for n in range(3))


def test_inspect_says_where_everything_is(tmp_path: Path) -> None:
    state = model_state()
    save({"model": state, "step": 12}, tmp_path / "x.pt")
    found = inspect(tmp_path / "x.pt")
    assert (found["kind"], found["step"], len(found["tensors"])) == ("torch", 12, len(state))
    data = (tmp_path / "x.pt").read_bytes()
    entry = next(entry for entry in found["tensors"] if entry["name"] == "model.layers.2.weight")
    assert data[entry["offset"] : entry["offset"] + entry["bytes"]] == bytes_of(state["layers.2.weight"])
    assert entry["alignment"] >= 4096 and len(entry["crc32"]) == 8
    for to in FORMATS:
        export(tmp_path / "x.pt", tmp_path / to, to)
        found = json.loads(json.dumps(inspect(tmp_path / to)))
        assert {entry["name"] for entry in found["tensors"]} == state.keys()


def test_the_last_piece_of_a_tensor_with_strides_may_be_one_element(tmp_path: Path) -> None:
    count = PIECE_ELEMENTS + 1
    state = {"a": torch.arange(2 * count, dtype=torch.uint8)[::2]}
    torch.save(state, tmp_path / "x.pt")
    export(tmp_path / "x.pt", tmp_path / "y.pt", "torch")
    assert_equal(torch.load(tmp_path / "y.pt"), state)


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(3), "s": torch.eye(3).to_sparse()}}, tmp_path / "sparse.pt")
    save({"model": {"a": torch.ones(3, dtype=torch.complex128)}}, tmp_path / "wide.pt")
    save({"__metadata__": torch.ones(3)}, tmp_path / "reserved.pt")
    save({"model": {}}, tmp_path / "empty.pt")
    (tmp_path / "bin").mkdir()
    save({"a": torch.ones(3), "s": torch.eye(3).to_sparse()}, tmp_path / "bin" / "pytorch_model.bin")
    save({"a": torch.ones(3)}, tmp_path / "x.pt")
    (tmp_path / "there").mkdir()
    (tmp_path / "mine").write_bytes(b"mine")
    before = names_in(tmp_path)
    for source, target, to, message in (
        ("sparse.pt", "y", "torch", "sparse"),
        ("bin", "y", "torch", "s is a sparse"),
        ("reserved.pt", "y", "safetensors", "'__metadata__', which safetensors keeps for itself: use --to torch"),
        ("wide.pt", "y", "safetensors", "safetensors lacks"),
        ("wide.pt", "y", "huggingface", "safetensors lacks"),
        ("empty.pt", "y", "torch", "no tensors"),
        ("x.pt", "mine", "torch", "exists already"),
        ("x.pt", "there", "dcp", "exists already"),
        ("x.pt", "mine/y", "torch", "Not a directory"),
        ("x.pt", "y", "gguf", "no format"),
        ("mine", "y", "torch", "neither"),
        ("there", "y", "torch", "no weights"),
    ):
        with pytest.raises(swapper.CheckpointError, match=message):
            export(tmp_path / source, tmp_path / target, to)
    for options, message in (
        ({"what": "modle"}, "what='modle' is not known: use one of 'model', 'all'"),
        ({"shard_bytes": 0}, "shard_bytes=0 must be more than 0"),
        ({"shard_bytes": "5q"}, "shard_bytes='5q' is not a size"),
    ):
        with pytest.raises(swapper.ConfigError, match=message):
            export(tmp_path / "x.pt", tmp_path / "y", "huggingface", **options)
    assert names_in(tmp_path) == before
    assert (tmp_path / "mine").read_bytes() == b"mine"
    with pytest.raises(swapper.IoError):
        export(tmp_path / "nothing", tmp_path / "y", "torch")


def test_a_source_that_is_cut_off_or_changes_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    save(model_state(), tmp_path / "x.pt")
    chosen = select(tmp_path / "x.pt")
    (tmp_path / "x.pt").touch()
    with pytest.raises(swapper.CheckpointError, match="was changed"):
        export(tmp_path / "x.pt", tmp_path / "y.pt", "torch", selection=chosen)
    os.truncate(tmp_path / "x.pt", 1_000_000)
    with pytest.raises(swapper.SwapperError):
        export(tmp_path / "x.pt", tmp_path / "hf", "huggingface", selection=chosen)
    assert names_in(tmp_path) == ["x.pt"]


def test_a_damaged_dcp_directory_is_refused(tmp_path: Path) -> None:
    state = model_state()
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert read_directory(tmp_path / "dcp").tensors.keys() == state.keys()
    metadata = tmp_path / "dcp" / ".metadata"
    good = metadata.read_bytes()

    class Hostile:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "was here"),))

    for data in (
        good[:-10],
        b"",
        good.replace(b"__0_0.distcp", b"../../passwd"),
        good.replace(b"__0_0.distcp", b"__0_1.distcp"),
        pickle.dumps(Hostile()),
        pickle.dumps({"state_dict_metadata": {}}),
    ):
        metadata.write_bytes(data)
        with pytest.raises(swapper.SwapperError):
            read_directory(tmp_path / "dcp")
    assert not (tmp_path / "was here").exists()
    metadata.write_bytes(good)
    file = next((tmp_path / "dcp").glob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(swapper.SwapperError):
        read_directory(tmp_path / "dcp")


@pytest.mark.parametrize("name", [3, None, b"a", ("a",), ("a", 1)], ids=repr)
@pytest.mark.parametrize("entry", ["a", "step"], ids=["of a tensor", "of another entry"])
def test_a_dcp_directory_whose_names_are_no_text_is_refused(tmp_path: Path, name: Any, entry: str) -> None:
    dcp.save({"a": torch.ones(50), "step": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tmp_path / "dcp" / ".metadata"
    good = pickle.loads(path.read_bytes())
    for field in ("state_dict_metadata", "storage_data"):
        metadata = copy.deepcopy(good)
        names = getattr(metadata, field)
        if field == "state_dict_metadata":
            names[name] = names.pop(entry)
        else:
            index = next(index for index in names if index.fqn == entry)
            names[replace(index, fqn=name)] = names.pop(index)
        path.write_bytes(pickle.dumps(metadata))
        for what in ("model", "all"):
            with pytest.raises(swapper.CheckpointError, match=r"the name of an entry is no text"):
                export(tmp_path / "dcp", tmp_path / "out", "torch", what=what)
        with pytest.raises(swapper.CheckpointError, match=r"the name of an entry is no text"):
            inspect(tmp_path / "dcp")
    assert names_in(tmp_path) == ["dcp"]


def test_the_commands(tmp_path: Path) -> None:
    save({"model": model_state(), "step": 4}, tmp_path / "x.pt")
    shown_as = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    arguments = ["export", tmp_path / "x.pt", tmp_path / "y.safetensors", "--to", "safetensors"]
    done = run_python("-m", "swapper.__main__", *arguments, **shown_as)
    assert done.returncode == 0 and "16 tensors" in done.stderr and "left out: 1 (step)" in done.stderr
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["inspect", str(tmp_path / "x.pt")])
    assert shown.exit_code == 0 and "step 4" in shown.stdout and "model.layers.0.weight" in shown.stdout
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "y.safetensors"), "--json"])
    assert json.loads(shown.stdout)["kind"] == "safetensors"
    wrong = CliRunner().invoke(app, ["export", str(tmp_path / "x.pt"), str(tmp_path / "y"), "--to", "gguf"])
    assert wrong.exit_code == 2 and "safetensors" in wrong.output and "Traceback" not in wrong.output
    wrong = CliRunner().invoke(app, ["inspect", str(tmp_path / "missing.pt")])
    assert wrong.exit_code == 1 and "No such file" in wrong.output and "Traceback" not in wrong.output


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    save({f"{n}": torch.zeros(1 << 20) for n in range(8)}, tmp_path / "x.pt")
    script = (
        "import os, signal, sys\n"
        "from swapper.checkpoint.stream import StreamWriter\n"
        "begin = StreamWriter._begin_write\n"
        "count = 0\n"
        "def interrupted(self):\n"
        "    global count\n"
        "    begin(self)\n"
        "    count += 1\n"
        f"    if count == 3: os.kill(os.getpid(), {int(how)})\n"
        "StreamWriter._begin_write = interrupted\n"
        "from swapper.cli import app\n"
        f"app(['export', {str(tmp_path / 'x.pt')!r}, {str(tmp_path / 'hf')!r}, '--to', 'huggingface'])\n"
    )
    done = run_python("-c", script)
    assert done.returncode == 130, done.stderr
    assert names_in(tmp_path) == ["x.pt"]


def test_a_snapshot_of_a_paged_run_is_exported_and_inspected(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    (tmp_path / "run").mkdir()
    with swapper.SwapManager(tmp_path / "run", host_memory="64MB") as manager:
        paged, paged_optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        paged(torch.ones(2, 300)).sum().backward()
        paged_optimizer.step()
        manager.snapshot(tmp_path / "x.pt")
    state = torch.load(tmp_path / "x.pt")
    found = inspect(tmp_path / "x.pt")
    assert found["step"] == 1
    assert all(entry["alignment"] >= 64 for entry in found["tensors"] if entry["name"].startswith("model."))
    for to in FORMATS:
        export(tmp_path / "x.pt", tmp_path / to, to)
        assert_equal(read_back(tmp_path / to, to, state["model"]), dict(state["model"]))
    export(tmp_path / "x.pt", tmp_path / "all.pt", "torch", what="all")
    loaded = load(tmp_path / "all.pt")
    assert loaded["swapper"] == state["swapper"]
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])
    assert_equal(dict(load(tmp_path / "x.pt", verify=True)["model"]), dict(state["model"]))

"""Every kind of file that swapper reads, exported as every kind that it writes, and back: equal to what plain torch loads of the
source, or refused by name; and what an export leaves out is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from fuzz.export_sources import Tensors, content_of, flat
from fuzz.originals import snapshot
from typer.testing import CliRunner

import swapper
from checkpoint.equality import bytes_of
from checkpoint.test_export import read_back
from swapper.checkpoint import load, save
from swapper.checkpoint.exporting import FORMATS, export, select
from swapper.cli import app
from swapper.errors import CheckpointError
from swapper.formats.sources import open_source

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint's remarks about one process


def weights() -> Tensors:
    """With names as in a model whose own first module is called like an entry of a training state."""
    torch.manual_seed(0)
    return {
        "model.layers.0.weight": torch.randn(256, 256),
        "model.norm.weight": torch.randn(7).bfloat16(),
        "lm_head.weight": torch.randn(5, 3).t(),
        "optim_steps": torch.tensor(3),
    }


def training_state() -> dict[str, Any]:
    return {
        "model": weights(),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(5)}}},
        "step": 12,
        "model.ema": torch.ones(2),
    }


def torch_save(state: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(state, path)


def dcp_save(state: Any) -> Callable[[Path], None]:
    return lambda path: dcp.save(copy.deepcopy(state), checkpoint_id=path, no_dist=True)


def huggingface(path: Path) -> None:
    save(weights(), path.with_name("whole"), durable=False)
    export(path.with_name("whole"), path, "huggingface", shard_bytes=1000)


def quantized(scheme: str, to: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        torch.save(weights(), path.with_name("whole"))
        export(path.with_name("whole"), path, to, quantize=scheme, shard_bytes=1000)

    return make


def trained(**options: Any) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        place = path.with_name("made")
        place.mkdir()
        snapshot(place, **options)
        (place / "x.pt").rename(path)

    return make


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        make: writes one.
        key: of the model in what it holds; "" if that is the model.
        refused: what an export of all as anything but one torch file says.
    """

    make: Callable[[Path], None]
    key: str = ""
    refused: str = ""


def safetensors_file(path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in weights().items()}
    safetensors.torch.save_file(tensors, path, {"by": "me", "format": "pt"})


FLAT_STATE = {**weights(), "step": 12, "epoch_losses": [0.5, 0.25]}
CODED = "encoded optimizer state.*say --to torch"
KINDS = {
    "torch.save": Kind(torch_save(training_state()), "model"),
    "torch.save of a flat state": Kind(torch_save(FLAT_STATE)),
    "torch.save of one with a model's settings": Kind(torch_save({"model": {"layers": 2}, "state_dict": weights()}), "state_dict"),
    "swapper's save": Kind(lambda path: save(training_state(), path, durable=False), "model"),
    "safetensors": Kind(safetensors_file),
    "huggingface": Kind(huggingface),
    "dcp": Kind(dcp_save({name: value for name, value in training_state().items() if name != "model.ema"}), "model"),
    "dcp of a flat state": Kind(dcp_save(FLAT_STATE)),
    "dcp of a flat model": Kind(dcp_save(weights())),
    "snapshot": Kind(trained(), "model"),
    "snapshot of several": Kind(trained(count=2), "model"),
    "encoded snapshot": Kind(trained(state_codec="8bit"), "model", CODED),
    "encoded snapshot of several": Kind(trained(count=2, state_codec="8bit"), "model", CODED),
    "encoded snapshot of three": Kind(trained(count=3, state_codec="bf16"), "model", CODED),
    "int8": Kind(quantized("int8", "safetensors")),
    "int4": Kind(quantized("int4", "safetensors")),
    "int8 shards": Kind(quantized("int8", "huggingface")),
}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a file of a kind, once."""
    made: dict[str, Path] = {}

    def source(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("source") / "source"
            KINDS[name].make(made[name])
        return made[name]

    return source


def model_in(content: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the model's part of a state, by its own names."""
    if not key:
        return content
    names = weights() if f"{key}.lm_head.weight" in content else ("0.weight", "0.bias", "1.weight", "1.bias")
    return {name: content[f"{key}.{name}"] for name in names}


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    tensors = {name: value for name, value in wanted.items() if isinstance(value, torch.Tensor)}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bytes_of(found[name]) == bytes_of(tensor), name


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_as_every_other_and_back(
    name: str, to: str, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    kind, source = KINDS[name], sources(name)
    content = content_of(source)
    model = model_in(content, kind.key)
    export(source, tmp_path / "target", to, shard_bytes=1000)
    assert_equal(content_of(tmp_path / "target"), model)
    chosen = select(source)
    there = {f"{kind.key}.{n}" if kind.key else n for n in (tensor.name for tensor in chosen.tensors)}
    left_out = {name for name in content if name not in there}
    assert {part.split(".")[0] for part in chosen.left_out} == {part.split(".")[0] for part in left_out}
    for back in FORMATS:
        export(tmp_path / "target", tmp_path / f"back-{back}", back, shard_bytes=500)
        assert_equal(content_of(tmp_path / f"back-{back}"), model)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", KINDS)
def test_all_of_every_kind_of_file(name: str, to: str, sources: Callable[[str], Path], tmp_path: Path) -> None:
    kind, source, target = KINDS[name], sources(name), tmp_path / "target"
    if kind.refused and to != "torch":
        with pytest.raises(CheckpointError, match=kind.refused):
            export(source, target, to, what="all")
        assert not target.exists()
        return
    export(source, target, to, what="all")
    if to == "torch" and source.is_file() and open_source(source).kind == "torch":
        assert_same_tree(torch.load(target), load(source))
    else:
        assert_equal(content_of(target), content_of(source))


def assert_same_tree(found: Any, wanted: Any) -> None:
    one, other = dict(flat(found)), dict(flat(wanted))
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(one[name], value) if isinstance(value, torch.Tensor) else one[name] == value, name


@pytest.mark.parametrize("to", ["safetensors", "huggingface"])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_what_is_quantized_stays_so_where_the_format_says_it(scheme: str, to: str, tmp_path: Path) -> None:
    quantized(scheme, "safetensors")(tmp_path / "source")
    export(tmp_path / "source", tmp_path / "target", to)
    one, other = (open_source(tmp_path / name) for name in ("source", "target"))
    assert other.metadata == one.metadata and any(key.startswith("swapper.quantized.") for key in one.metadata)
    models = []
    for name in ("source", "target"):
        model = torch.nn.Linear(256, 256, bias=False)
        swapper.load(model, tmp_path / name, host_memory="8MiB", rename={"model.layers.0.weight": "weight"}.get)
        with torch.no_grad():
            models.append(model(torch.eye(256)))
        swapper.loaded(model).unload()
    assert torch.equal(*models)
    with pytest.raises(CheckpointError, match="quantized already: quantize the original"):
        export(tmp_path / "source", tmp_path / "again", to, quantize="int8")
    assert not (tmp_path / "again").exists()


def test_remarks_of_safetensors_are_kept_or_named(tmp_path: Path) -> None:
    KINDS["safetensors"].make(tmp_path / "source")
    export(tmp_path / "source", tmp_path / "target", "safetensors")
    with safetensors.safe_open(tmp_path / "target", "pt") as file:
        assert file.metadata() == {"by": "me", "format": "pt"}
    command = ["export", str(tmp_path / "source"), str(tmp_path / "other"), "--to", "torch"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and "left out: 1 (metadata of safetensors: by)" in result.stderr
    assert read_back(tmp_path / "other", "torch", {}).keys() == weights().keys()

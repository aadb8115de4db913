"""Weights in 8 and 4 bits: near what they were, the same however they are cut, and refused where a file does not fit them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import swapper
from checkpoint.equality import bytes_of
from swapper import _C
from swapper.checkpoint.exporting import export
from swapper.checkpoint.quantization import QuantizedLayout, layouts_of, metadata_of
from swapper.cli import app
from swapper.errors import CheckpointError, ConfigError
from swapper.formats.sources import open_source

MAX_ERROR = {8: 1 / 254 + 2**-8, 4: 1 / 8 + 2**-7}
"""Of a value, to the largest one of its block: half a step, in 4 bits a whole one at the end of the range; and rounding to bf16."""


def layout_of(bits: int, columns: int, dtype: torch.dtype) -> QuantizedLayout:
    layout = QuantizedLayout.of(bits, columns, dtype)
    assert layout is not None
    return layout


@pytest.mark.whole
@pytest.mark.parametrize("columns", [64, 192, 256, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_values_are_near_what_they_were(bits: int, dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(columns)
    values = (torch.randn(37, columns) * torch.logspace(-3, 1, 37).view(-1, 1)).to(dtype)
    values[5] = 0
    values[6, 3] = -1000
    layout = layout_of(bits, columns, dtype)
    stored = layout.quantise(values)
    assert stored.dtype == torch.uint8
    assert stored.shape == (37, layout.row_bytes)
    found = layout.dequantise(stored, dtype)
    assert found.dtype == dtype
    blocks = values.float().view(37, -1, layout.block)
    error = (found.float().view_as(blocks) - blocks).abs()
    assert (error <= MAX_ERROR[bits] * blocks.abs().amax(-1, keepdim=True) * 1.05).all()
    assert not found[5].any()


@pytest.mark.whole
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_give_the_same_by_themselves_and_rounding_is_done_once(bits: int) -> None:
    values = torch.randn(4, 3000, 256)
    layout = layout_of(bits, 256, torch.float32)
    stored = layout.quantise(values.view(-1, 256)).view(4, 3000, -1)
    whole = layout.dequantise(stored, torch.bfloat16)
    assert torch.equal(layout.dequantise(stored[2], torch.bfloat16), whole[2])
    assert torch.equal(layout.dequantise(stored[1, 7:9], torch.bfloat16), whole[1, 7:9])
    assert torch.equal(layout.dequantise(stored, torch.float32).bfloat16(), whole)


@pytest.mark.whole
@pytest.mark.parametrize("isa", _C.codec_isas())
@pytest.mark.parametrize("block", [32, 64, 96, 128])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_kernels_have_the_bits_of_torchs_operations(bits: int, block: int, isa: str) -> None:
    """All codes, and scales of every size: values that are subnormal, or too large for bf16, are rounded the same too."""
    columns = block * (6 if bits == 8 else 4)
    layout = QuantizedLayout(bits, block, columns, "BF16")
    random = torch.Generator().manual_seed(block)
    codes = torch.randint(0, 256, (700, layout.code_bytes), dtype=torch.uint8, generator=random)
    exponents = torch.randint(-140, 128, (700, columns // block), generator=random)
    scales = ((1 + torch.rand(exponents.shape, generator=random)) * 2.0**exponents).bfloat16()
    scales[3], scales[4], scales[5] = 0, -scales[4], 2.0**-133
    rows = torch.cat([codes, scales.view(torch.uint8)], dim=1)
    for dtype in (torch.bfloat16, torch.float32):
        expected = torch.empty(700, columns, dtype=dtype)
        layout._dequantise_by_torch(rows, expected, torch.empty)
        for threads, first in ((1, 0), (3, 0), (1, 699)):
            found = torch.full((700 - first, columns), torch.nan, dtype=dtype)
            layout._dequantise_natively(rows[first:], found, threads, isa)
            assert bytes_of(found) == bytes_of(expected[first:]), (dtype, threads)


@pytest.mark.parametrize(
    "columns, block, bits, dtype",
    [
        (64, 0, 8, "fp32"),
        (96, 48, 8, "fp32"),
        (32, 32, 4, "fp32"),
        (0, 32, 8, "fp32"),
        (64, 32, 5, "fp32"),
        (64, 32, 8, "fp16"),
    ],
)
def test_the_kernels_refuse_what_they_do_not_know(columns: int, block: int, bits: int, dtype: str) -> None:
    with pytest.raises(ConfigError, match="blocks of a multiple of 32 columns"):
        _C.dequantise(0, 1, columns, block, bits, (0, dtype))


@pytest.mark.whole
@pytest.mark.parametrize("columns, dtype", [(100, torch.float32), (31, torch.float32), (256, torch.int32)])
def test_what_does_not_fit_is_not_quantised(columns: int, dtype: torch.dtype) -> None:
    assert QuantizedLayout.of(4, columns, dtype if dtype.is_floating_point else torch.float64) is None


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embedding.weight": torch.randn(1000, 256).bfloat16(),
        "experts": torch.randn(4, 512, 128),
        "head.weight": torch.randn(1000, 256).half(),
        "odd.weight": torch.randn(2000, 101),
        "small.weight": torch.randn(64, 64),
        "norm.weight": torch.randn(70_000),
    }


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("to", ["safetensors", "huggingface"])
@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
@pytest.mark.parametrize("scheme, bits", [("int8", 8), ("int4", 4)])
def test_an_export_quantises_the_large_matrices(tmp_path: Path, scheme: str, bits: int, form: str, to: str) -> None:
    before = state()
    source = tmp_path / "source"
    if form == "dcp":
        dcp.save(before, checkpoint_id=source, no_dist=True)
    else:
        (save_file if form == "safetensors" else torch.save)(before, source)
    target = tmp_path / "target"
    losses = export(source, target, to, quantize=scheme, keep="head.*", shard_bytes=400_000)
    assert losses.keys() == {"embedding.weight", "experts"}
    opened = open_source(target)
    layouts = layouts_of(opened.metadata, target)
    assert layouts.keys() == losses.keys()
    found = {}
    for file in sorted(target.glob("*.safetensors")) if target.is_dir() else [target]:
        found |= load_file(file)
    for name, tensor in before.items():
        if name not in losses:
            assert torch.equal(found[name], tensor)
            continue
        values = layouts[name].dequantise(found[name], tensor.dtype)
        difference = (values.float() - tensor.float()).double()
        assert losses[name].largest_error == difference.abs().max().item()
        relative = (difference.square().sum() / tensor.double().square().sum()).sqrt().item()
        assert losses[name].relative == pytest.approx(relative)
        assert relative < (0.01 if bits == 8 else 0.12)


def test_what_cannot_be_quantised_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    bad = state()
    bad["embedding.weight"][3, 3] = torch.inf
    save_file(bad, tmp_path / "source")
    with pytest.raises(CheckpointError, match=r"embedding\.weight cannot be quantized.*not finite.*--keep"):
        export(tmp_path / "source", tmp_path / "target", "safetensors", quantize="int8")
    with pytest.raises(CheckpointError, match="not torch"):
        export(tmp_path / "source", tmp_path / "target", "torch", quantize="int8")
    with pytest.raises(CheckpointError, match="int8, int4"):
        export(tmp_path / "source", tmp_path / "target", "safetensors", quantize="int3")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_command_reports_the_error_by_layer(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "source")
    command = ["export", str(tmp_path / "source"), str(tmp_path / "target"), "--to", "safetensors"]
    options = ["--quantize", "int4", "--keep", "experts", "--json"]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 0, result.output
    assert "embedding.weight" in result.stderr
    written = json.loads(result.stdout)
    assert written["errors"].keys() == {"embedding.weight", "head.weight"}
    assert written["nbytes"] == (tmp_path / "target").stat().st_size
    assert CliRunner().invoke(app, [*command, "--quantize", "int5"]).exit_code != 0


@pytest.mark.whole
@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"bits": 8}', "null", "[" * 5000,
        '{"bits": 3, "block": 128, "columns": 256, "dtype": "F32"}',
        '{"bits": 4, "block": 128, "columns": 128, "dtype": "F32"}',
        '{"bits": 8, "block": 0, "columns": 256, "dtype": "F32"}',
        '{"bits": 8, "block": 128, "columns": 256.0, "dtype": "F32"}',
        '{"bits": 8, "block": 128, "columns": 256, "dtype": "I32"}',
        '{"bits": 8, "block": 128, "columns": 256, "dtype": "F32", "more": 1}',
        '{"bits": true, "block": 128, "columns": 256, "dtype": "F32"}',
    ],
)  # fmt: skip
def test_layouts_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="does not describe the quantization of a tensor"):
        layouts_of({"swapper.quantized.x": text}, "file")


def test_a_tensor_that_is_not_what_its_layout_says_is_refused(tmp_path: Path) -> None:
    layout = layout_of(8, 256, torch.float32)
    for wrong in (torch.zeros(300, 256), torch.zeros(300, 17, dtype=torch.uint8), torch.tensor(1, dtype=torch.uint8)):
        save_file({"weight": wrong}, tmp_path / "wrong", metadata=metadata_of({"weight": layout}))
        with pytest.raises(CheckpointError, match="quantized in 8 bits it would be"):
            swapper.load(torch.nn.Linear(256, 300, bias=False), tmp_path / "wrong", host_memory="8MiB")

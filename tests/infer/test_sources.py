"""Every form of checkpoint runs a model in place: directories of torch.distributed.checkpoint, and torch's zips in every dtype."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import swapper
from infer.small import TOKENS, make, on_meta
from swapper.checkpoint.dcp import StorageWriter

BUDGET = "6MiB"


def outputs_of(model):
    with torch.no_grad():
        return [model(TOKENS) for _ in range(3)]


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, StorageWriter])
def test_a_directory_of_distributed_checkpoint_is_read_in_place(tmp_path, writer, nested):
    reference = make(torch.bfloat16)
    state = reference.state_dict()
    dcp.save({"model": state, "step": 7} if nested else state, storage_writer=writer(str(tmp_path / "dcp")))
    model = swapper.load(on_meta(dtype=torch.bfloat16), tmp_path / "dcp", host_memory=BUDGET)
    assert swapper.loaded(model).read_bytes_a_pass > 0
    expected = outputs_of(reference)[0]
    assert all(torch.equal(output, expected) for output in outputs_of(model))
    swapper.loaded(model).unload()


class Mixed(nn.Module):
    """Weights of every dtype that checkpoints have, each large enough to stream, and buffers of integers."""

    def __init__(self):
        super().__init__()
        self.fp16 = nn.Linear(256, 512, dtype=torch.float16)
        self.bf16 = nn.Linear(512, 256, dtype=torch.bfloat16)
        self.fp32 = nn.Linear(256, 256)
        self.fp64 = nn.Linear(256, 256, dtype=torch.float64)
        self.fp8 = nn.Parameter(torch.randn(512, 256).to(torch.float8_e4m3fn), requires_grad=False)
        self.wide_fp8 = nn.Parameter(torch.randn(512, 256).to(torch.float8_e5m2), requires_grad=False)
        self.int8 = nn.Parameter(torch.randint(-100, 100, (512, 256), dtype=torch.int8), requires_grad=False)
        self.bools = nn.Parameter(torch.randint(0, 2, (512, 512)).bool(), requires_grad=False)
        self.register_buffer("counts", torch.arange(40_000))

    def forward(self, x):
        x = self.bf16(self.fp16(x.half()).bfloat16()).float()
        x = self.fp64(self.fp32(x).double()).float()
        for weight in (self.fp8, self.wide_fp8, self.int8):
            x = x + x @ weight[:256].float()
        return x * self.bools.sum() + self.counts[-1]


@pytest.mark.whole
@pytest.mark.parametrize("aligned", [False, True])
def test_a_torch_checkpoint_of_every_dtype_is_read_in_place(tmp_path, aligned):
    torch.manual_seed(0)
    reference = Mixed().eval()
    path = tmp_path / "model.pt"
    if aligned:
        swapper.checkpoint.save(reference.state_dict(), path)
    else:
        torch.save(reference.state_dict(), path)
    with torch.device("meta"):
        model = Mixed().eval()
    swapper.load(model, path, host_memory="7MiB")
    assert {name: p.dtype for name, p in model.named_parameters()} == {
        name: p.dtype for name, p in reference.named_parameters()
    }
    assert torch.equal(model.counts, reference.counts)
    x = torch.randn(3, 256)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), reference(x))
    state = model.state_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(state[name].view(torch.uint8), tensor.view(torch.uint8)), name
    swapper.loaded(model).unload()


@pytest.mark.parametrize("lazy", [lambda values: values.conj(), lambda values: values.conj().imag])
def test_a_tensor_that_was_saved_lazily_is_named(tmp_path, lazy):
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(lazy(torch.randn(8, dtype=torch.cfloat)))

    torch.save(Complex().state_dict(), tmp_path / "model.pt")
    with pytest.raises(swapper.CheckpointError, match=r"or lazy tensors: weight: save .*resolve_conj\(\)"):
        swapper.load(Complex(), tmp_path / "model.pt", host_memory=BUDGET)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("path", [".", "pytorch_model.bin"], ids=["directory", "file"])
def test_a_sparse_tensor_is_named_and_not_left_out(tmp_path, strict, path):
    """It would be missing, and the model keep values of its own."""
    state = {"module": {"weight": torch.eye(8).to_sparse(), "bias": torch.ones(8)}}
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        swapper.CheckpointError, match=r"sparse, quantized or lazy tensors: weight: save .*to_dense\(\)"
    ):
        swapper.load(nn.Linear(8, 8), tmp_path / path, host_memory=BUDGET, strict=strict)

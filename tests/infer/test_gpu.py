"""Models on a CUDA device: bit-equal to the plain model there, within the budget, and nothing left behind."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import swapper
from swapper.checkpoint.exporting import export
from swapper.device import tier

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@dataclass(frozen=True)
class Config:
    vocabulary: int
    context: int
    layers: int
    width: int


LARGE = Config(vocabulary=4096, context=128, layers=8, width=1024)
"""About 430 MB in fp32."""
SMALL = Config(vocabulary=512, context=32, layers=6, width=256)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (8, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config.width) for _ in range(config.layers))
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale.to(self.head.weight.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make(dtype=torch.float32, config=SMALL):
    torch.manual_seed(0)
    return Model(config).to(dtype).eval()


def on_meta(config=SMALL, dtype=torch.float32):
    with swapper.without_weights():
        return Model(config).to(dtype).eval()


@pytest.fixture
def path(tmp_path):
    torch.save(make(config=LARGE).state_dict(), tmp_path / "model")
    return tmp_path / "model"


def load(path, config=LARGE, dtype=torch.float32, **options):
    return swapper.load(on_meta(config, dtype), path, device="cuda", **options)


def tokens(config=LARGE, rows=2):
    return (torch.arange(rows * config.context).view(rows, -1) * 7 % config.vocabulary).cuda()


def run(model, *arguments):
    with torch.no_grad():
        return model(*arguments)


@pytest.mark.parametrize("device_memory", [80 * MIB, 220 * MIB, 1 << 30])
@pytest.mark.parametrize("host_memory", [64 * MIB, 1 << 30])
def test_outputs_are_those_of_the_plain_model_on_the_device(path, device_memory, host_memory):
    reference = make(config=LARGE).cuda()
    before = torch.cuda.memory_allocated()
    model = load(path, host_memory=host_memory, device_memory=device_memory)
    for rows in (1, 2, 1):
        expected = run(reference, tokens(rows=rows))
        for _ in range(4):
            assert torch.equal(run(model, tokens(rows=rows)), expected)
    torch.cuda.synchronize()
    swapper.loaded(model).unload()
    del expected
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + MIB


def test_many_passes_queued_without_waiting_are_right(path):
    """Python is far ahead of the device: what is freed and filled anew is still in use there."""
    reference = make(config=LARGE).cuda()
    model = load(path, host_memory=1 << 30, device_memory=100 * MIB)
    batches = [tokens() + number for number in range(30)]
    batches = [batch % LARGE.vocabulary for batch in batches]
    found = [run(model, batch) for batch in batches]
    for output, batch in zip(found, batches, strict=True):
        assert torch.equal(output, run(reference, batch))
    swapper.loaded(model).unload()


def test_the_budget_is_what_weights_take(path):
    budget = 150 * MIB
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load(path, host_memory=128 * MIB, device_memory=budget)
    one = tokens(rows=1)[:, :1]
    for _ in range(3):
        run(model, one)
    activations = 8 * MIB  # of one token, with the workspace of cuBLAS
    assert torch.cuda.max_memory_allocated() - before <= budget + activations + 32 * MIB
    swapper.loaded(model).unload()


def test_the_pool_is_registered(path):
    model = load(path, host_memory=128 * MIB, device_memory=100 * MIB)
    registration = swapper.loaded(model)._streaming.host_side
    registration.wait()
    assert registration.describe() == "registered"
    run(model, tokens())
    swapper.loaded(model).unload()
    assert torch.equal(torch.zeros(4, device="cuda").cpu(), torch.zeros(4))  # no error was left behind


def test_on_a_side_stream_and_back(path):
    reference = make(config=LARGE).cuda()
    model = load(path, host_memory=128 * MIB, device_memory=100 * MIB)
    expected, stream = run(reference, tokens()), torch.cuda.Stream()
    for _ in range(4):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            there = run(model, tokens())
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(there, expected)
        assert torch.equal(run(model, tokens()), expected)
    swapper.loaded(model).unload()


def test_a_device_that_is_full_gives_up_what_stays(path, monkeypatch):
    """Allocations of weights fail; those of one token's activations come from what torch keeps for small tensors."""
    monkeypatch.setattr(tier, "MIN_FREE_BYTES", 0)
    reference, one = make(config=LARGE).cuda(), tokens(rows=1)[:, :1]
    expected = run(reference, one)
    device_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 150 * MIB) / device_bytes)
    try:
        model = load(path, host_memory=1 << 30, device_memory=300 * MIB)
        for _ in range(4):
            assert torch.equal(run(model, one), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    swapper.loaded(model).unload()


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantised_weights(path, tmp_path, scheme):
    export(path, tmp_path / "quantised", "safetensors", quantize=scheme)
    model = load(tmp_path / "quantised", host_memory=64 * MIB, device_memory=60 * MIB)
    reference = make(config=LARGE)
    reference.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert torch.equal(run(model, tokens()), run(reference.cuda(), tokens()))
    swapper.loaded(model).unload()


def test_many_batches_for_one_copy(tmp_path):
    torch.save(make(torch.bfloat16).state_dict(), tmp_path / "model")
    model = load(tmp_path / "model", SMALL, torch.bfloat16, host_memory="4MiB", device_memory="3MiB")
    reference = make(torch.bfloat16).cuda()
    batches = [(tokens(SMALL) + number) % SMALL.vocabulary for number in range(6)]
    loaded = swapper.loaded(model)
    run(model, batches[0])
    before = loaded.counters.uploaded_bytes
    with torch.no_grad():
        found = loaded.map(model, batches)
    assert loaded.counters.uploaded_bytes - before < 3 * sum(p.nbytes for p in reference.parameters())
    assert all(torch.equal(a, run(reference, b)) for a, b in zip(found, batches, strict=True))
    loaded.unload()


def test_an_input_on_the_cpu_is_named(path):
    model = load(path, host_memory=64 * MIB, device_memory=80 * MIB)
    with pytest.raises(swapper.DeviceError, match="an input is on cpu"):
        run(model, tokens().cpu())
    swapper.loaded(model).unload()


def test_a_device_that_there_is_not(path):
    with pytest.raises(swapper.DeviceError, match="counted from 0"):
        swapper.load(on_meta(LARGE), path, device="cuda:99")

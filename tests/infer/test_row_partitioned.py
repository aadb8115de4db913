"""A linear map whose matrix is larger than the budget is multiplied by some of its rows at a time."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import swapper


class Wide(nn.Module):
    def __init__(self, outputs, bias, dtype, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(outputs, 256, dtype=dtype)
        self.inner = nn.Linear(256, 256, dtype=dtype)
        self.head = nn.Linear(256, outputs, bias=bias, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.inner(self.embedding(ids)))


def make(outputs, bias, dtype, tied=False):
    torch.manual_seed(0)
    return Wide(outputs, bias, dtype, tied).eval()


def empty(*arguments):
    with torch.device("meta"):
        model = Wide(*arguments).eval()
        if arguments[-1] is True:
            model.head.weight = model.embedding.weight
    return model


def save(model, path, padding=0):
    state = dict(model.state_dict())
    if model.head.weight is model.embedding.weight:
        del state["head.weight"]
    save_file(state, path, metadata={"pad": "x" * padding})


def inputs_of(outputs):
    return [torch.arange(n).view(1, n) * 97 % outputs for n in (1, 3, 40)]


@pytest.mark.parametrize("padding", [0, 24])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", [32_768, 40_001])
def test_outputs_have_the_bits_of_the_whole_matrix(tmp_path, outputs, bias, dtype, padding):
    reference = make(outputs, bias, dtype)
    path = tmp_path / "model.safetensors"
    save(reference, path, padding)
    matrix_bytes = reference.head.weight.nbytes
    model = swapper.load(empty(outputs, bias, dtype), path, host_memory=matrix_bytes // 2 + (2 << 20))
    loaded = swapper.loaded(model)
    assert loaded.counters.pool_bytes < matrix_bytes
    assert loaded.read_bytes_a_pass >= matrix_bytes
    with torch.no_grad():
        for ids in inputs_of(outputs):
            found, expected = model(ids), reference(ids)
            if dtype is torch.float32 and outputs % 64:  # a whole matrix's last rows may be another kernel's
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(found, expected)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in reference.state_dict().items())
    loaded.unload()
    assert "forward" not in model.head.__dict__


def test_weights_in_another_dtype_and_tied_ones_are_cut_too(tmp_path):
    reference = make(32_768, True, torch.float32, True)
    path = tmp_path / "model.safetensors"
    save(reference, path)
    model = swapper.load(empty(32_768, True, torch.float32, True), path, host_memory="12MiB", dtype=torch.bfloat16)
    assert model.head.weight is model.embedding.weight
    reference.to(torch.bfloat16)
    with torch.no_grad():
        for ids in inputs_of(32_768):
            assert torch.equal(model(ids), reference(ids))
    swapper.loaded(model).unload()


def test_a_gradient_through_a_matrix_that_is_cut_is_refused(tmp_path):
    reference = make(32_768, False, torch.float32)
    save(reference, tmp_path / "model.safetensors")
    model = swapper.load(empty(32_768, False, torch.float32), tmp_path / "model.safetensors", host_memory="12MiB")
    with pytest.raises(swapper.StateError, match="gradient"):
        model.head(torch.randn(1, 256, requires_grad=True))
    swapper.loaded(model).unload()


def test_what_cannot_be_cut_says_what_is_needed(tmp_path):
    class Own(nn.Linear):
        pass

    reference = Own(256, 32_768)
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Own(256, 32_768)
    with pytest.raises(swapper.BudgetError, match=r"this model needs at least 3[0-9]\.\d+ MiB"):
        swapper.load(model, tmp_path / "model.safetensors", host_memory="12MiB")


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(256, outputs) for outputs in (32_768, 20_000, 40_064))

    def forward(self, x, order=(0, 1, 2)):
        return [self.maps[index](x) for index in order]


def test_the_map_that_came_next_is_read_ahead_and_any_other_is_right_too(tmp_path):
    torch.manual_seed(0)
    reference = Several().eval()
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Several().eval()
    swapper.load(model, tmp_path / "model.safetensors", host_memory="14MiB")
    loaded = swapper.loaded(model)
    x = torch.randn(3, 256)
    with torch.no_grad():
        for order in ((0, 1, 2), (0, 1, 2), (0, 1, 2), (2, 0), (1, 1, 1), (2, 1, 0), (0, 1, 2)):
            for found, wanted in zip(model(x, order), reference(x, order), strict=True):
                assert torch.equal(found[:, :64], wanted[:, :64]) and torch.allclose(found, wanted)
        model(x)
        loaded._streaming.engine.drain()  # of what is read ahead
        before = loaded.counters.bytes_read
        for _ in range(4):
            model(x)
        loaded._streaming.engine.drain()
    used = 4 * sum(parameter.nbytes for parameter in reference.parameters() if parameter.dim() > 1)
    assert used <= loaded.counters.bytes_read - before + (8 << 20) <= used + (24 << 20)  # nothing is read twice
    loaded.unload()


def test_a_model_that_is_forgotten_while_parts_are_read_ahead_leaves_nothing(tmp_path):
    reference = Several().eval()
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    for _ in range(3):
        with torch.device("meta"):
            model = Several().eval()
        swapper.load(model, tmp_path / "model.safetensors", host_memory="14MiB")
        with torch.no_grad():
            model(torch.randn(1, 256))
            model(torch.randn(1, 256))
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None

"""A model with its weights on NVMe gives what the same model gives in memory, bit for bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import swapper
from infer.small import TOKENS, make, on_meta, total_bytes


@pytest.fixture
def saved(tmp_path):
    def save(model, metadata=None):
        path = tmp_path / "model.safetensors"
        save_file(model.state_dict(), path, metadata=metadata)
        return path

    return save


@pytest.mark.parametrize("padding", range(0, 72, 8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_equal_wherever_the_file_puts_the_weights(saved, dtype, padding):
    reference = make(dtype)
    path = saved(reference, {"pad": "x" * padding})
    with torch.no_grad():
        expected = reference(TOKENS)
        model = swapper.load(on_meta(dtype=dtype), path, host_memory="6MiB")
        assert swapper.loaded(model).read_bytes_a_pass > 0.3 * total_bytes(reference)
        for _ in range(3):
            assert torch.equal(model(TOKENS), expected)
            assert torch.equal(model(TOKENS[:, :1]), reference(TOKENS[:, :1]))
    swapper.loaded(model).unload()


@pytest.mark.parametrize("budget", ["5MiB", "8MiB", "16MiB", "1GiB"])
def test_what_the_budget_can_hold_is_read_once(saved, budget):
    reference = make()
    path = saved(reference)
    with torch.no_grad():
        expected = reference(TOKENS)
        model = swapper.load(on_meta(), path, host_memory=budget)
        loaded = swapper.loaded(model)
        model(TOKENS)
        model(TOKENS)
        before, passes = loaded.counters.bytes_read, 8
        for _ in range(passes):
            assert torch.equal(model(TOKENS), expected)
        ahead = loaded.counters.pool_bytes
        assert loaded.counters.bytes_read - before <= passes * loaded.read_bytes_a_pass + ahead
        assert (loaded.read_bytes_a_pass == 0) == (budget == "1GiB")
    loaded.unload()


@pytest.mark.parametrize("budget", ["3MiB", "5MiB", "1GiB"])
def test_a_compiled_model_gives_what_it_gives_in_memory(saved, budget):
    """Rows, parts of matrices and hooks are called between compiled graphs. No optimisation: that gives other bits."""
    reference = make()
    path = saved(reference)
    with torch.no_grad():
        model = swapper.load(on_meta(), path, host_memory=budget)
        loaded = swapper.loaded(model)
        planned = loaded.read_bytes_a_pass
        compiled = torch.compile(model, backend="eager")
        for length in (32, 32, 5):
            assert torch.equal(compiled(TOKENS[:, :length]), reference(TOKENS[:, :length]))
        assert loaded.read_bytes_a_pass == planned
        assert torch.equal(model(TOKENS), reference(TOKENS))
    loaded.unload()

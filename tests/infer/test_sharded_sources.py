"""A checkpoint of several processes, each with a part of every tensor, runs in place, and becomes one file, bit for bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import swapper
from infer.sharding_process import save_together
from infer.small import TOKENS, make, on_meta
from swapper.checkpoint import load
from swapper.checkpoint.exporting import export
from swapper.formats.sources import open_source
from swapper.integrations.transformers import from_pretrained

pytestmark = pytest.mark.filterwarnings("ignore:.*")  # torch.distributed's remarks
HOW = [
    ("rows", "stock", torch.float32),
    ("rows", "ours", torch.bfloat16),
    ("fsdp", "stock", torch.float32),
    ("columns", "ours", torch.float32),
    ("mesh", "stock", torch.bfloat16),
]


@pytest.mark.parametrize(("how", "whose", "dtype"), HOW)
def test_a_sharded_checkpoint_runs_in_place_and_is_exported(tmp_path, how, whose, dtype):
    reference = make(dtype)
    save_together(how, reference, tmp_path / "dcp", whose)
    source = open_source(tmp_path / "dcp")
    assert source.joined and bool(source.grids) == (how in ("columns", "mesh"))
    with torch.no_grad():
        expected = reference(TOKENS)
    state = reference.state_dict()
    budgets = ["8MiB", "64MiB"] if source.grids else ["5MiB", "8MiB", "64MiB"]
    for budget in budgets:
        model = swapper.load(on_meta(dtype=dtype), source, host_memory=budget)
        assert (swapper.loaded(model).read_bytes_a_pass > 0) == (budget != "64MiB")
        with torch.no_grad():
            assert all(torch.equal(model(TOKENS), expected) for _ in range(3))
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, state[name]), name
        swapper.loaded(model).unload()
    export(tmp_path / "dcp", tmp_path / "x.safetensors", "safetensors")
    export(tmp_path / "dcp", tmp_path / "x.pt", "torch")
    for found in (load_file(tmp_path / "x.safetensors"), load(tmp_path / "x.pt"), torch.load(tmp_path / "x.pt")):
        found = {name.removeprefix("model."): tensor for name, tensor in found.items()}
        assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.whole
@pytest.mark.parametrize("how", ["rows", "mesh"])
def test_a_model_of_transformers_runs_from_what_its_training_saved_sharded(tmp_path, how):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=600, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, tie_word_embeddings=True,
    )  # fmt: skip
    reference = MixtralForCausalLM(config).eval()
    reference.set_experts_implementation("eager")
    save_together(how, reference, tmp_path / "dcp", "stock")
    source = open_source(tmp_path / "dcp")
    config.save_pretrained(tmp_path / "dcp")
    ids = torch.tensor([[3, 599, 4, 171]])
    wanted = reference.generate(ids, max_new_tokens=5, do_sample=False)
    model = from_pretrained(AutoModelForCausalLM, tmp_path / "dcp", host_memory="6MiB")
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), wanted)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)
    swapper.loaded(model).unload()
    assert source.kind == "dcp"


def test_chunks_are_quantised_as_the_whole_is(tmp_path):
    reference = make()
    save_together("mesh", reference, tmp_path / "dcp", "stock")
    export(tmp_path / "dcp", tmp_path / "whole.safetensors", "safetensors")
    export(tmp_path / "dcp", tmp_path / "a.safetensors", "safetensors", quantize="int8")
    export(tmp_path / "whole.safetensors", tmp_path / "b.safetensors", "safetensors", quantize="int8")
    one, other = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert any(tensor.dtype == torch.uint8 for tensor in one.values())


@pytest.mark.whole
@pytest.mark.parametrize(("how", "is_refused"), [("rows", False), ("mesh", True)])
def test_a_training_begins_from_what_was_saved_sharded(tmp_path, how, is_refused):
    reference = make()
    save_together(how, reference, tmp_path / "dcp", "stock")
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters())
    (tmp_path / "run").mkdir()
    with swapper.SwapManager(tmp_path / "run", host_memory="64MiB") as manager:
        if is_refused:
            with pytest.raises(swapper.UnsupportedError, match="swapper export"):
                manager.offload(model, optimizer, init=tmp_path / "dcp")
            return
        model, _ = manager.offload(model, optimizer, init=tmp_path / "dcp")
        with manager.gather(model):
            for (name, parameter), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert torch.equal(parameter, wanted), name

"""Many batches go through a model for one read of its weights, and give what each gives alone."""

from __future__ import annotations

import threading

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import swapper
from infer.small import make, on_meta
from swapper.integrations.transformers import from_pretrained

BATCHES = [
    torch.arange(length).view(1, length) * factor % 512
    for length, factor in ((32, 7), (5, 3), (17, 11), (1, 1), (32, 5))
]


@pytest.fixture
def path(tmp_path):
    save_file(make().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def load(path, budget="6MiB"):
    model = swapper.load(on_meta(), path, host_memory=budget)
    return model, swapper.loaded(model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("at_once", [None, 2])
def test_each_batch_gives_what_it_gives_alone(path, at_once, mode):
    reference = make()
    model, loaded = load(path)
    with mode():
        for _ in range(2):
            found = loaded.map(model, BATCHES, at_once=at_once)
            assert all(torch.equal(a, reference(b)) for a, b in zip(found, BATCHES, strict=True))
            assert all(a.is_inference() == (mode is torch.inference_mode) for a in found)
        assert torch.equal(model(BATCHES[0]), reference(BATCHES[0]))
    loaded.unload()


def test_the_weights_are_read_once_for_all_batches(path):
    model, loaded = load(path)
    with torch.no_grad():
        loaded.map(model, BATCHES)
        model(BATCHES[0])
        loaded._streaming.engine.drain()
        before = loaded.counters.bytes_read
        for _ in range(5):
            loaded.map(model, BATCHES)
    rows = sum(batch.unique().numel() for batch in BATCHES) * 256 * 4 * 2  # of both embeddings, looked up by each batch
    assert loaded.counters.bytes_read - before <= 5 * (loaded.read_bytes_a_pass + rows) + loaded.counters.pool_bytes
    assert loaded.read_bytes_a_pass > 0.3 * sum(p.nbytes for p in make().parameters())
    loaded.unload()


def test_a_model_that_fits_is_mapped_too(path):
    reference = make()
    model, loaded = load(path, "1GiB")
    with torch.no_grad():
        for _ in range(3):
            found = loaded.map(model, BATCHES)
            assert all(torch.equal(a, reference(b)) for a, b in zip(found, BATCHES, strict=True))
    loaded.unload()


def test_the_first_exception_ends_all_batches_and_leaves_nothing_behind(path):
    reference = make()
    model, loaded = load(path)
    seen = []

    def fail(module, args):
        seen.append(args[0].shape[1])
        if args[0].shape[1] == 17:
            raise ValueError("from outside")

    handle = model.layers[3].mlp_out.register_forward_pre_hook(fail)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(ValueError, match="from outside"):
                loaded.map(model, BATCHES)
        handle.remove()
        assert seen.count(17) == 2
        for batch in BATCHES:
            assert torch.equal(model(batch), reference(batch))
        assert all(torch.equal(a, reference(b)) for a, b in zip(loaded.map(model, BATCHES), BATCHES, strict=True))
    assert not [thread for thread in threading.enumerate() if "(_work)" in thread.name]
    loaded.unload()


def test_generations_go_together(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    model = from_pretrained(transformers.LlamaForCausalLM, tmp_path, host_memory="5MiB")
    loaded = swapper.loaded(model)
    prompts = [torch.arange(n).view(1, n) * 31 % 1022 + 2 for n in (4, 9, 12)]
    options = {"do_sample": False, "num_beams": 1}

    def continue_prompt(ids, model):
        return model.generate(input_ids=ids, max_new_tokens=3 + ids.shape[1] // 4, **options)

    found = loaded.map(lambda ids: continue_prompt(ids, model), prompts)
    assert all(torch.equal(a, continue_prompt(b, reference)) for a, b in zip(found, prompts, strict=True))
    loaded.unload()


class Branching(nn.Module):
    """Batches take different ways."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(256, 256) for _ in range(6)])

    def forward(self, x):
        for number, way in enumerate(self.ways):
            if x.shape[0] & 1 << number:
                x = way(x)
        return x


def test_batches_that_take_different_ways(tmp_path):
    torch.manual_seed(0)
    reference = Branching()
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Branching()
    swapper.load(model, tmp_path / "model.safetensors", host_memory="1200KiB")
    batches = [torch.randn(rows, 256) for rows in (63, 1, 42, 21, 56, 7)]
    with torch.no_grad():
        for _ in range(2):
            found = swapper.loaded(model).map(model, batches)
            assert all(torch.equal(a, reference(b)) for a, b in zip(found, batches, strict=True))
    swapper.loaded(model).unload()


def test_wrong_numbers_of_batches_are_refused(path):
    model, loaded = load(path)
    assert loaded.map(model, []) == []
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(swapper.ConfigError, match="at_once"):
            loaded.map(model, BATCHES, at_once=wrong)
    loaded.unload()
    with pytest.raises(swapper.StateError, match="unloaded"):
        loaded.map(model, BATCHES)

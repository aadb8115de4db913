"""Usual arguments of transformers' from_pretrained do what they do there, or are refused with what to say instead."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

import swapper
from swapper.integrations.transformers import from_pretrained

IDS = torch.tensor([[1, 2, 3, 4, 5]])
CONFIG = LlamaConfig(
    vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    model.generation_config.max_new_tokens = 6
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return directory


def read(cls, path, **options):
    return from_pretrained(cls, path, host_memory="3MiB", **options)


@pytest.mark.parametrize(
    "said", [{"torch_dtype": torch.float32}, {"torch_dtype": "float32"}, {"dtype": torch.float32}, {"dtype": "float32"}]
)
def test_a_dtype_is_taken_by_either_name(path, said):
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = read(AutoModelForCausalLM, path, **said)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, reference(IDS).logits)
    swapper.loaded(model).unload()


def test_options_of_the_configuration_reach_it(path):
    model = read(AutoModelForSequenceClassification, path, num_labels=3, local_files_only=True, pad_token_id=0)
    with torch.no_grad():
        assert model(IDS).logits.shape == (1, 3)
    swapper.loaded(model).unload()
    model = read(AutoModel, path, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    swapper.loaded(model).unload()


def test_ways_to_generate_give_what_they_give_in_memory(path):
    reference = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    model = read(AutoModelForCausalLM, path)
    for options in ({}, {"num_beams": 3}, {"cache_implementation": "static"}, {"repetition_penalty": 1.3}):
        wanted = reference.generate(IDS, do_sample=False, **options)
        assert wanted.shape[1] == IDS.shape[1] + 6  # by generation_config.json
        assert torch.equal(model.generate(IDS, do_sample=False, **options), wanted), options
    assert torch.equal(
        model.generate(IDS, do_sample=False, assistant_model=model), reference.generate(IDS, do_sample=False)
    )
    swapper.loaded(model).unload()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "auto"}, "device_map= .*host_memory="),
        ({"max_memory": {0: "1GB"}}, "max_memory= .*host_memory="),
        ({"load_in_8bit": True}, "load_in_8bit= .*swapper export --quantize"),
        ({"subfolder": "x"}, "subfolder= .*path of the directory"),
        ({"output_loading_info": True}, "output_loading_info="),
        ({"state_dict": {}}, "state_dict= .*swapper.load"),
        ({"dtype": torch.float16, "torch_dtype": torch.float32}, "both given"),
    ],
)
def test_what_is_not_taken_is_refused_by_its_name(path, options, message):
    with pytest.raises(swapper.ConfigError, match=message):
        read(AutoModelForCausalLM, path, **options)


def test_a_name_of_the_hub_is_refused_with_the_way_to_get_it():
    with pytest.raises(swapper.CheckpointError, match="snapshot_download"):
        read(AutoModelForCausalLM, "somebody/some-model")


def test_training_is_refused_where_it_begins(path):
    model = read(AutoModelForCausalLM, path)
    for module in (model, model.model.layers[0]):
        with pytest.raises(swapper.StateError, match="SwapManager"):
            module.train()
    model.eval()
    assert not any(module.training for module in model.modules())
    swapper.loaded(model).unload()
    assert model.train() is model and model.training

"""Usual arguments of transformers' from_pretrained do what they do there, or are refused with what to say instead."""

from __future__ import annotations

import ast
import inspect
import json
import shutil
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import swapper
from swapper.integrations import transformers
from swapper.integrations.transformers import for_training, from_pretrained, streamed

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
        ({"state_dict": {"a": 1}}, "state_dict= .*swapper.load"),
        ({"distributed_config": object()}, "distributed_config= .*one process"),
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


# --- every option, and every file --------------------------------------------------------------------------------------------


def test_every_option_of_the_installed_transformers_is_known():
    """A new one must be taken, passed on or refused: it is not to be accepted and ignored."""
    taken = {"config", "dtype", "torch_dtype"}
    of_others = {"_from_auto", "_from_pipeline"}  # what transformers tells itself
    known = {*transformers.NOT_TAKEN, *transformers.FOR_LOADING, *transformers.OF_THE_HUB}
    known |= {*transformers.WITHOUT_EFFECT, *taken, *of_others}
    of_auto = AutoModel.from_pretrained.__func__
    for function in (PreTrainedModel.from_pretrained.__func__, of_auto):
        named = inspect.signature(function).parameters.values()
        options = {p.name for p in named if p.kind is p.KEYWORD_ONLY}
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="kwargs"), attr="pop" | "get")):
                    options |= {argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)}
                case ast.For(iter=ast.List(elts=names)):
                    options |= {name.value for name in names if isinstance(name, ast.Constant)}
        assert len(options) > 3
        assert options - {"code_revision"} <= known, options - known


FORMS = ("one.safetensors", "shards.safetensors", "one.bin", "shards.bin")


def write(model, directory, form):
    """Save other values in each form."""
    kind, suffix = form.split(".")
    with torch.no_grad():
        model.model.norm.weight.fill_(1 + FORMS.index(form) / 4)
    if suffix == "safetensors":
        model.save_pretrained(directory, max_shard_size="10GB" if kind == "one" else "500KB")
        return
    state = model.state_dict()
    if kind == "one":
        torch.save(state, directory / "pytorch_model.bin")
        return
    names = list(state)
    parts = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for file, own in parts.items():
        torch.save({name: state[name] for name in own}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


PAIRS = [("one.safetensors", "one.bin"), ("shards.safetensors", "shards.bin"), ("one.bin", "shards.bin")]


@pytest.mark.parametrize("use_safetensors", [None, True, False])
@pytest.mark.parametrize("forms", [*PAIRS, ("one.bin",), ("shards.safetensors",)])
def test_the_files_are_those_that_transformers_takes(tmp_path, forms, use_safetensors):
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    CONFIG.save_pretrained(tmp_path)
    for form in forms:
        write(model, tmp_path, form)
    try:
        plain = LlamaForCausalLM.from_pretrained(tmp_path, use_safetensors=use_safetensors)
    except OSError:
        with pytest.raises(swapper.CheckpointError, match="has no weights"):
            read(LlamaForCausalLM, tmp_path, use_safetensors=use_safetensors)
        return
    ours = from_pretrained(LlamaForCausalLM, tmp_path, host_memory="6MiB", use_safetensors=use_safetensors)
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, plain(IDS).logits)
    swapper.loaded(ours).unload()


def test_a_file_that_the_configuration_names_is_taken(path, tmp_path):
    """Other weights are under the usual name."""
    shutil.copytree(path, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    for value in ("other.safetensors", "../other.safetensors"):
        (tmp_path / "model/config.json").write_text(json.dumps({**config, "transformers_weights": value}))
        state = {name: tensor / 2 for name, tensor in load_file(path / "model.safetensors").items()}
        save_file(state, tmp_path / "model/other.safetensors", metadata={"format": "pt"})
        if value.startswith(".."):
            with pytest.raises(swapper.CheckpointError, match="transformers_weights"):
                read(LlamaForCausalLM, tmp_path / "model")
            continue
        plain = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
        ours = read(LlamaForCausalLM, tmp_path / "model")
        with torch.no_grad():
            assert torch.equal(ours(IDS).logits, plain(IDS).logits)
        swapper.loaded(ours).unload()


# --- generation, configuration and code ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [AutoModelForCausalLM, LlamaForCausalLM])
@pytest.mark.parametrize(
    "said",
    [{}, {"generation_config": GenerationConfig(max_new_tokens=2, pad_token_id=9)}, {"pad_token_id": 7}],
    ids=str,
)
def test_what_is_said_of_generation_is_taken(path, cls, said):
    plain, ours = cls.from_pretrained(path, **said), read(cls, path, **said)
    assert ours.generation_config.to_dict() == plain.generation_config.to_dict()
    swapper.loaded(ours).unload()


def test_a_configuration_may_be_a_path(path, tmp_path):
    other = LlamaConfig(**{**CONFIG.to_dict(), "rms_norm_eps": 0.5})
    other.save_pretrained(tmp_path)
    plain = LlamaForCausalLM.from_pretrained(path, config=str(tmp_path))
    ours = read(LlamaForCausalLM, path, config=str(tmp_path))
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, plain(IDS).logits)
    swapper.loaded(ours).unload()


def test_code_of_the_directory_is_refused_by_name(path, tmp_path):
    shutil.copytree(path, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    auto_map = {"AutoModelForCausalLM": "modeling_own.Own"}
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    with pytest.raises(swapper.UnsupportedError, match=r"modeling_own\.Own.*get_class_from_dynamic_module"):
        read(AutoModelForCausalLM, tmp_path / "model", trust_remote_code=True)
    swapper.loaded(read(AutoModelForCausalLM, tmp_path / "model")).unload()


# --- directories that are not a model's -----------------------------------------------------------------------------------------


@pytest.fixture
def adapter(path, tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = LlamaForCausalLM.from_pretrained(path)
    get_peft_model(model, LoraConfig(init_lora_weights=False, target_modules=["q_proj"])).save_pretrained(
        tmp_path / "adapter"
    )
    return tmp_path / "adapter"


@pytest.mark.parametrize("cls", [AutoModelForCausalLM, LlamaForCausalLM])
@pytest.mark.parametrize("has_base", [False, True])
def test_an_adapter_is_refused_and_its_error_says_how_to_load_it(path, adapter, cls, has_base):
    from peft import PeftModel

    if has_base:
        shutil.copytree(path, adapter, dirs_exist_ok=True)
    with pytest.raises(swapper.UnsupportedError, match=r"adapter of peft.*PeftModel\.from_pretrained"):
        read(cls, adapter)
    with pytest.raises(swapper.UnsupportedError, match="adapter of peft"):
        for_training(cls, adapter)
    with streamed(host_memory="4MiB"), pytest.raises(swapper.UnsupportedError, match="adapter of peft"):
        cls.from_pretrained(adapter)
    if has_base:
        config = AutoConfig.from_pretrained(adapter)
        ours = from_pretrained(cls, adapter / "model.safetensors", config=config, host_memory="3MiB")
    else:
        ours = read(cls, path)
    plain = PeftModel.from_pretrained(cls.from_pretrained(path), adapter)
    loaded = swapper.loaded(ours)
    ours = PeftModel.from_pretrained(ours, adapter)
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, plain(IDS).logits)
    loaded.unload()


def test_without_a_configuration_no_default_model_is_made(path, tmp_path):
    shutil.copy(path / "model.safetensors", tmp_path)
    for cls in (AutoModelForCausalLM, LlamaForCausalLM):
        with pytest.raises(swapper.CheckpointError, match=r"has no config\.json"):
            read(cls, tmp_path)


QUANTIZED = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bitsandbytes of old": {"load_in_8bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


@pytest.mark.parametrize("quantization", QUANTIZED.values(), ids=QUANTIZED)
def test_weights_of_another_quantizer_are_refused_with_what_to_do(path, tmp_path, quantization):
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    shutil.copy(path / "model.safetensors", tmp_path)
    name = quantization.get("quant_method", "bitsandbytes")
    with pytest.raises(
        swapper.UnsupportedError, match=f"{name} has quantized .*not quantized.*swapper export --quantize"
    ):
        read(AutoModelForCausalLM, tmp_path)

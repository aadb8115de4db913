"""Models of transformers as they are, made small by their configurations: bit-equal to plain torch within the smallest budget.

A sample of unlike ones; with SWAPPER_TEST_ALL=1 all that are causal, masked, from sequence to sequence or classify images: some
three hundred, of which five sixths can be made small and run in plain torch (five minutes).
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.auto import modeling_auto as auto

from e2e.models import finish_step
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]

VOCABULARY = 128
MAX_PARAMETERS = 40e6
SAMPLE = {
    "BartForCausalLM": "leaves layers out by chance",
    "BigBirdForMaskedLM": "random attention",
    "MobileNetV2ForImageClassification": "stages of unlike sizes",
    "DeepseekV3ForCausalLM": "experts, and attention by way of narrow products",
    "FalconMambaForCausalLM": "a state space in place of attention",
    "FNetForMaskedLM": "Fourier transforms in place of attention",
    "PoolFormerForImageClassification": "lists of layers in a list",
    "T5ForConditionalGeneration": "layers that all return what the first one has made",
}
UPDATES = ("step", "deferred", "backward")

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "hidden_dim", "ffn_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 6),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 5),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads", "num_kv_heads"), 4
    ),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "attention_hidden_size"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "state_size", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.3),
    **dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("patch_size", "rotary_dim", "attention_window"), 8),
    "vocab_size": VOCABULARY,
    "image_size": 64,
    "num_labels": 5,
    "num_experts_per_tok": 2,
    "v_head_dim": 16,
    "q_lora_rank": 32,
}
"""What configurations call their sizes, and what they are to be."""
WORDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "decoder_start_token_id": 0}


def names() -> list[str]:
    if not os.environ.get("SWAPPER_TEST_ALL"):
        return list(SAMPLE)
    tables = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )
    found = [name for table in tables for name in table.values()]
    return list(dict.fromkeys(name if isinstance(name, str) else name[0] for name in found))


def small(usual: Any) -> Any:
    """Return a configuration like that one, and of small parts where it has parts; lists, of a size for each stage, stay."""
    kind = type(usual)
    known = {key for key in usual.to_dict() if not isinstance(getattr(kind, key, None), property)}
    listed = {key for key in known if isinstance(getattr(usual, key, None), list | tuple)}
    sizes = {key: size for key, size in SMALL.items() if key in known - listed}
    if "layer_types" in known and usual.layer_types:
        sizes["layer_types"] = list(usual.layer_types)[: SMALL["num_layers"]]
    parts = {key: getattr(usual, key, None) for key in getattr(kind, "sub_configs", {})}
    sizes.update({key: small(part) for key, part in parts.items() if part is not None})
    return kind(**sizes, **WORDS)


def make_small(name: str) -> nn.Module:
    """Return the model of that class with few parameters; skips the test where that cannot be."""
    made = getattr(hf, name)
    try:
        config = small(made.config_class())
        with torch.device("meta"):
            parameters = sum(p.numel() for p in made(copy.deepcopy(config)).parameters())
    except Exception as error:  # of any kind: there are hundreds of configurations
        pytest.skip(f"cannot be made small: {error}")
    if parameters > MAX_PARAMETERS:
        pytest.skip(f"cannot be made small: {parameters / 1e6:.0f} million parameters")
    return made(config).train()


def loss_of(model: Any) -> torch.Tensor:
    if "ImageClassification" in type(model).__name__:
        size = getattr(model.config, "image_size", SMALL["image_size"])
        side = size if isinstance(size, int) else SMALL["image_size"]
        images = torch.randn(2, getattr(model.config, "num_channels", 3), side, side)
        return model(pixel_values=images, labels=torch.tensor([0, 1])).loss
    words = torch.randint(2, VOCABULARY, (2, 16))
    return model(input_ids=words, labels=words).loss


def check_plain(model: nn.Module) -> None:
    """Skip the test where plain torch cannot train the model, or gives another result the second time."""
    seen = []
    for _ in range(2):
        torch.manual_seed(0)
        other = copy.deepcopy(model)
        try:
            loss = loss_of(other)
            loss.backward()
        except Exception as error:
            pytest.skip(f"does not run in plain torch: {error}")
        seen.append([loss.detach(), *(p.grad for p in other.parameters() if p.grad is not None)])
    if len(seen[0]) != len(seen[1]) or not all(itertools.starmap(torch.equal, zip(*seen, strict=True))):
        pytest.skip("plain torch is not deterministic")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "update"), list(zip(names(), itertools.cycle(UPDATES))))
def test_training_is_bit_equal_within_the_smallest_budget(twins: MakeTwins, name: str, update: str) -> None:
    model = make_small(name)
    check_plain(model)
    pair = twins(model, update=update, room_bytes=1 << 19)

    pair.train(lambda net, optimizer: finish_step(loss_of(net), optimizer), steps=3)
    pair.finish(paged=False)

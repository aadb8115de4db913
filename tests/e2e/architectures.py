"""Architectures of transformers by small configurations, of a width and depth that can be chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn

from e2e.models import VOCABULARY, tokens


@dataclass(frozen=True)
class Size:
    """How large a model is. Its inner width is four times `width`; `layers` is None for each architecture's own depth."""

    width: int = 64
    layers: int | None = None
    vocabulary: int = VOCABULARY

    @property
    def text(self) -> dict[str, int]:
        return {"vocab_size": self.vocabulary, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}

    def depth(self, usual: int) -> int:
        return self.layers or usual


def text(model: Any) -> torch.Tensor:
    batch = tokens()
    return model(input_ids=batch, labels=batch).loss


def images(model: Any) -> torch.Tensor:
    return model(pixel_values=torch.randn(2, 3, 32, 32), labels=torch.tensor([0, 3])).loss


def speech(model: Any) -> torch.Tensor:
    return model(input_features=torch.randn(2, 20, 64), labels=tokens(2, 8)).loss


def whisper(size: Size) -> nn.Module:
    layers, inner = size.depth(3), 4 * size.width
    config = hf.WhisperConfig(
        **size.text, num_mel_bins=20, d_model=size.width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=inner, decoder_ffn_dim=inner,
        max_source_positions=32, max_target_positions=32, decoder_start_token_id=0,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


def bert(size: Size) -> nn.Module:
    config = hf.BertConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, intermediate_size=4 * size.width,
        num_hidden_layers=size.depth(4), num_attention_heads=4,
    )  # fmt: skip
    return hf.BertForMaskedLM(config)


def vit(size: Size) -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=size.width, intermediate_size=4 * size.width, num_hidden_layers=size.depth(6), num_attention_heads=4,
        image_size=32, patch_size=8, num_labels=5,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def t5(size: Size) -> nn.Module:
    config = hf.T5Config(
        **size.text, d_model=size.width, d_ff=4 * size.width, d_kv=size.width // 4, num_layers=size.depth(3), num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def gpt2(size: Size) -> nn.Module:
    config = hf.GPT2Config(**size.text, n_embd=size.width, n_layer=size.depth(5), n_head=4, n_positions=64)
    return hf.GPT2LMHeadModel(config)


def decoder(size: Size, name: str, **more: Any) -> nn.Module:
    config = getattr(hf, f"{name}Config")(
        **size.text, hidden_size=size.width, intermediate_size=4 * size.width, num_hidden_layers=size.depth(4),
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, **more,
    )  # fmt: skip
    return getattr(hf, f"{name}ForCausalLM")(config)


MODELS: dict[str, tuple[Callable[[Size], nn.Module], Callable[[Any], torch.Tensor]]] = {
    "Llama": (partial(decoder, name="Llama"), text),
    "Mistral": (partial(decoder, name="Mistral", sliding_window=8), text),
    "Qwen2": (partial(decoder, name="Qwen2", tie_word_embeddings=True), text),
    "GPT-2": (gpt2, text),
    "Mixtral": (partial(decoder, name="Mixtral", num_local_experts=4, output_router_logits=True), text),
    "BERT": (bert, text),
    "T5": (t5, text),
    "ViT": (vit, images),
    "Whisper": (whisper, speech),
}
"""How each is made, and a loss of it on new random inputs."""

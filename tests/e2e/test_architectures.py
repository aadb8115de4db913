"""Architectures of transformers x optimizers x placements x accumulation x checkpointing, against plain torch, bit for bit.

A sample, in which every architecture and every choice occurs; all of them with SWAPPER_TEST_ALL=1 (some hundred, some minutes).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from e2e import third_party
from e2e.models import VOCABULARY, tokens
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]

TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
DECODER = {
    **TEXT, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def text(model: Any) -> torch.Tensor:
    batch = tokens()
    return model(input_ids=batch, labels=batch).loss


def images(model: Any) -> torch.Tensor:
    return model(pixel_values=torch.randn(2, 3, 32, 32), labels=torch.tensor([0, 3])).loss


def speech(model: Any) -> torch.Tensor:
    return model(input_features=torch.randn(2, 20, 64), labels=tokens(2, 8)).loss


def whisper() -> nn.Module:
    config = hf.WhisperConfig(
        **TEXT, num_mel_bins=20, d_model=64, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_source_positions=32,
        max_target_positions=32, decoder_start_token_id=0,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


def bert() -> nn.Module:
    config = hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    return hf.BertForMaskedLM(config)


def vit() -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, image_size=32, patch_size=8,
        num_labels=5,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def t5() -> nn.Module:
    config = hf.T5Config(**TEXT, d_model=64, d_ff=256, d_kv=16, num_layers=3, num_heads=4, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(config)


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**TEXT, n_embd=64, n_layer=5, n_head=4, n_positions=64))


def decoder(name: str, **more: Any) -> nn.Module:
    config = getattr(hf, f"{name}Config")(**DECODER, **more)
    return getattr(hf, f"{name}ForCausalLM")(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.Tensor]]] = {
    "Llama": (partial(decoder, "Llama"), text),
    "Mistral": (partial(decoder, "Mistral", sliding_window=8), text),
    "Qwen2": (partial(decoder, "Qwen2", tie_word_embeddings=True), text),
    "GPT-2": (gpt2, text),
    "Mixtral": (partial(decoder, "Mixtral", num_local_experts=4, output_router_logits=True), text),
    "BERT": (bert, text),
    "T5": (t5, text),
    "ViT": (vit, images),
    "Whisper": (whisper, speech),
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "SGD, nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "Lion": partial(third_party.Lion, lr=1e-4),
}
PLACES = {"all on NVMe": ("nvme", "nvme"), "state on NVMe": ("host", "nvme"), "parameters on NVMe": ("nvme", "host")}
KINDS = ("fp32", "bf16 with masters")
CHECKPOINTING = (None, False, True)


def combinations() -> list[Any]:
    everything = list(itertools.product(MODELS, OPTIMIZERS, PLACES, KINDS, (1, 2), CHECKPOINTING))
    if not os.environ.get("SWAPPER_TEST_ALL"):
        sample = range(len(MODELS))
        return [
            (
                model,
                list(OPTIMIZERS)[i % 5],
                list(PLACES)[i % 3],
                KINDS[i % 2],
                1 + i // 2 % 2,
                CHECKPOINTING[i // 3 % 3],
            )
            for i, model in zip(sample, MODELS, strict=True)
        ]
    # Each pair of choices occurs: one in 7 of all, which is prime to every number of choices.
    return everything[::7]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize(("model", "optimizer", "places", "kind", "accumulate", "checkpointing"), combinations())
def test_training_is_bit_equal(
    twins: MakeTwins, model: str, optimizer: str, places: str, kind: str, accumulate: int, checkpointing: bool | None
) -> None:
    make, loss_of = MODELS[model]
    net = make().train()
    if kind != "fp32":
        net = net.bfloat16()
    if checkpointing is not None:
        net.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    params, state = PLACES[places]
    pair = twins(net, OPTIMIZERS[optimizer], master=kind != "fp32", params=params, optimizer_state=state)

    def step(net: Any, optimizer: Any) -> list[torch.Tensor]:
        losses = []
        for _ in range(accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=kind != "fp32"):
                losses.append(loss_of(net))
            (losses[-1] / accumulate).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach() for loss in losses]

    pair.train(step, steps=3)
    pair.finish(paged=False)

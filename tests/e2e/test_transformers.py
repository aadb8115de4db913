"""Models of the transformers library, built from small configurations, against plain torch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from e2e.models import VOCABULARY, finish_step, tokens
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=128, n_layer=4, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1
    )
    model = GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


def mixtral() -> nn.Module:
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        output_router_logits=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def t5() -> nn.Module:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=128, d_ff=256, d_kv=32, num_layers=2, num_decoder_layers=2, num_heads=4,
        pad_token_id=0, decoder_start_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


MODELS = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral, "t5": t5}


def step(model: Any, optimizer: Any) -> torch.Tensor:
    batch = tokens()
    loss = model(input_ids=batch, labels=batch).loss
    return finish_step(loss, optimizer)


@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_equal(twins: MakeTwins, name: str) -> None:
    pair = twins(MODELS[name]())
    pair.train(step, steps=4)
    pair.finish(paged=name != "mixtral")
    assert pair.manager.counters.bytes_read > 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bf16_with_fp32_masters_is_bit_equal(twins: MakeTwins, name: str) -> None:
    pair = twins(MODELS[name]().bfloat16(), master=True)
    pair.train(step, steps=4)
    pair.finish()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_their_gradient_checkpointing_is_bit_equal(twins: MakeTwins, name: str, use_reentrant: bool) -> None:
    model = MODELS[name]()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train()
    pair = twins(model)
    pair.train(step, steps=3)
    pair.finish()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_checkpointing_enabled_after_offload_is_bit_equal(twins: MakeTwins) -> None:
    pair = twins(llama())
    pair.train(step, steps=2)
    pair.both(lambda model, _: model.gradient_checkpointing_enable({"use_reentrant": False}))
    pair.train(step, steps=2)
    pair.finish()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generation_between_steps_gives_the_same_tokens(twins: MakeTwins, name: str) -> None:
    def generate(model: Any, _: Any) -> torch.Tensor:
        model.eval()
        result = model.generate(tokens(2, 4), attention_mask=torch.ones(2, 4), max_new_tokens=6, do_sample=True)
        model.train()
        return result

    pair = twins(MODELS[name]())
    pair.train(step, steps=2)
    pair.train(generate, steps=1)
    pair.train(step, steps=2)
    pair.finish()


def test_hidden_states_and_attentions_in_the_output_are_bit_equal(twins: MakeTwins) -> None:
    def run(model: Any, optimizer: Any) -> Any:
        batch = tokens()
        output = model(input_ids=batch, labels=batch, output_hidden_states=True)
        (output.loss + output.hidden_states[2].square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [output.loss.detach(), [hidden.detach() for hidden in output.hidden_states], output.logits.detach()]

    pair = twins(llama())
    pair.train(run, steps=2)
    pair.finish()

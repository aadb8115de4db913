"""Models with adapters of peft in training, changed between steps as users change them: the reference is plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import swapper
from e2e.twins import Twins

peft = pytest.importorskip("peft", reason="adapters need peft")
pytestmark = pytest.mark.filterwarnings("ignore")

MakeTwins = Callable[..., Twins]


def ids() -> torch.Tensor:
    return torch.arange(12)[None]


def adapted(tied: bool, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=tied))
    config = peft.LoraConfig(r=4, init_lora_weights=False, **{"target_modules": ["q_proj"], **options})
    found: nn.Module = peft.get_peft_model(model, config)
    return found


def step(model: Any, optimizer: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(input_ids=ids(), labels=ids()).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids()).logits
    return found


def merge_and_go_on(model: Any, optimizer: Any) -> Any:
    found = []
    for is_safe in (False, True):
        found.append(step(model, optimizer))
        model.merge_adapter(safe_merge=is_safe)
        found.append(logits(model))
        model.unmerge_adapter()
    with model.disable_adapter():
        found.append(logits(model))
    return [*found, step(model, optimizer)]


ADAPTERS: dict[str, dict[str, Any]] = {
    "all linear": {"target_modules": "all-linear"},
    "on embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "on the head": {"target_modules": ["lm_head", "q_proj"]},
    "embeddings and head to save": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "norm to save": {"modules_to_save": ["norm"]},
    "tokens": {"trainable_token_indices": [1, 2, 3]},
}


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_are_merged_between_steps(twins: MakeTwins, options: dict[str, Any], tied: bool) -> None:
    update = "deferred" if tied else "step"
    pair = twins(adapted(tied, **options), update=update)
    pair.both(merge_and_go_on)
    pair.finish(paged=False)


def test_a_merge_whose_graph_keeps_the_weights_from_before_is_refused_with_the_way(twins: MakeTwins) -> None:
    pair = twins(adapted(tied=False, target_modules=["embed_tokens", "q_proj"], use_dora=True))
    for _ in range(2):
        pair.both(step)
        with torch.no_grad():
            pair.both(lambda model, _: model.merge_adapter())
            pair.both(lambda model, _: logits(model))
            pair.both(lambda model, _: model.unmerge_adapter())
    pair.both(step)
    pair.swapped.merge_adapter()
    with pytest.raises(swapper.ColdParameterError, match=r"embed_tokens.*the graph of x itself.*no_grad"):
        pair.swapped.unmerge_adapter()


REFUSED: dict[str, Callable[[Any], Any]] = {
    "larger": lambda model: model.resize_token_embeddings(520),
    "smaller": lambda model: model.resize_token_embeddings(500),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_embeddings_of_another_size_are_refused_and_training_goes_on(
    twins: MakeTwins, change: Callable[[Any], Any]
) -> None:
    pair = twins(adapted(tied=False))
    pair.both(step)
    with pytest.raises(swapper.ColdParameterError, match=r"embed_tokens\.weight.*resize_token_embeddings.*before"):
        change(pair.swapped)
    pair.both(step)
    pair.both(lambda model, _: logits(model))
    pair.finish(paged=False)

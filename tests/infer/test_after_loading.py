"""Changes that libraries and users make to a model after its load: new vocabularies, adapters, merges, copies of parts, traces."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import swapper
from swapper.integrations.transformers import from_pretrained

IDS = torch.arange(1, 9)[None]
BUDGETS = {"by-rows": "4MiB", "streamed": "9MiB", "in-memory": "64MiB"}
CONFIG = LlamaConfig(
    vocab_size=2000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    pad_token_id=0,
)  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "tied"])
def path(request: Any, tmp_path_factory: Any) -> Path:
    torch.manual_seed(0)
    directory: Path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": request.param})).save_pretrained(
        directory
    )
    return directory


def outputs(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS).logits


def adapted(model: Any, **options: Any) -> Any:
    config = LoraConfig(r=4, init_lora_weights=False, **{"target_modules": ["q_proj", "v_proj"], **options})
    return get_peft_model(model, config).eval()


def merged(model: Any) -> Any:
    model = adapted(model)
    model.merge_adapter(safe_merge=True)
    return model


def merged_and_back(model: Any) -> Any:
    model = merged(model)
    outputs(model)
    model.unmerge_adapter()
    return model


def resized(model: Any) -> Any:
    model.resize_token_embeddings(2010)
    return model


def shrunk(model: Any) -> Any:
    model.resize_token_embeddings(1500)
    return model


def other_memory(model: Any) -> Any:
    for parameter in (model.model.embed_tokens.weight, model.model.layers[1].mlp.up_proj.weight):
        parameter.data = parameter.detach() * 2
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    "resize": resized,
    "shrink": shrunk,
    "other memory": other_memory,
    "lora": adapted,
    "lora on embeddings": lambda m: adapted(m, target_modules=["embed_tokens", "q_proj"]),
    "dora": lambda m: adapted(m, use_dora=True),
    "a head to save": lambda m: adapted(m, modules_to_save=["lm_head"]),
    "both to save": lambda m: adapted(m, modules_to_save=["embed_tokens", "lm_head"]),
    "merged": merged,
    "merged and back": merged_and_back,
    "merged for good": lambda m: adapted(m).merge_and_unload(safe_merge=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_gives_what_it_gives_in_memory(path: Path, change: Callable[[Any], Any], budget: str) -> None:
    model = from_pretrained(LlamaForCausalLM, path, host_memory=BUDGETS[budget])
    loaded = swapper.loaded(model)
    outputs(model)
    made = []
    if change is CHANGES["merged for good"] and model.config.tie_word_embeddings and budget == "by-rows":
        with pytest.raises(
            swapper.ColdParameterError, match=r"data_ptr.*merge_adapter\(safe_merge=True\)"
        ):  # by which peft looks for ties
            change(model)
        return
    for one in (model, LlamaForCausalLM.from_pretrained(path)):
        torch.manual_seed(7)
        made.append(change(one))
    for _ in range(2):
        assert torch.equal(*map(outputs, made))
    loaded.unload()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_saved_adapter_is_loaded_with_the_embeddings_that_peft_saves(path: Path, tmp_path: Path, budget: str) -> None:
    """They are the base's own values: writing them changes nothing."""
    torch.manual_seed(7)
    plain = adapted(LlamaForCausalLM.from_pretrained(path), target_modules=["embed_tokens", "q_proj"])
    plain.save_pretrained(tmp_path / "adapter")
    model = from_pretrained(LlamaForCausalLM, path, host_memory=BUDGETS[budget])
    loaded = swapper.loaded(model)
    assert torch.equal(outputs(PeftModel.from_pretrained(model, tmp_path / "adapter")), outputs(plain))
    loaded.unload()


@pytest.mark.filterwarnings("ignore")
def test_a_merge_in_place_is_refused_with_the_way(path: Path) -> None:
    model = from_pretrained(LlamaForCausalLM, path, host_memory="4MiB")
    loaded = swapper.loaded(model)
    model = adapted(model)
    expected = outputs(model)
    with pytest.raises(swapper.SwapperError, match=r"q_proj\.weight.*safe_merge=True"):
        model.merge_adapter()
    with torch.no_grad(), pytest.raises(swapper.StateError, match=r"embed_tokens\.weight.*weight\.data ="):
        model.get_input_embeddings().weight.mul_(2)
    assert torch.equal(outputs(model), expected)
    loaded.unload()


# --- copies and traces ----------------------------------------------------------------------------------------------------


def made(directory: Path, budget: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.BatchNorm1d(256)).eval().requires_grad_(False)
    torch.save(plain.state_dict(), directory / "weights.pt")
    model = copy.deepcopy(plain)
    return plain, swapper.load(model, directory / "weights.pt", host_memory=budget)


@pytest.mark.parametrize("budget", ["1400KiB", "64MiB"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_a_part_is_a_plain_module(tmp_path: Path, duplicate: Callable[[Any], Any], budget: str) -> None:
    plain, model = made(tmp_path, budget)
    x = torch.randn(3, 256)
    model(x)
    for own, part in zip(plain, model, strict=True):
        copied = duplicate(part)
        assert copied.__dict__.keys() == own.__dict__.keys()
        assert torch.equal(copied(x), own(x))
        copied.train().to(torch.float64)
        assert copied.weight.dtype == torch.float64 and not part.training
    assert torch.equal(model(x), plain(x))
    swapper.loaded(model).unload()
    assert torch.equal(copied.double()(x.double()), own.train().double()(x.double()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("budget", ["1400KiB", "64MiB"])
def test_a_trace_has_the_weights_or_is_refused(tmp_path: Path, budget: str) -> None:
    plain, model = made(tmp_path, budget)
    x = torch.randn(3, 256)
    model(x)
    for of_model, of_plain in ((model, plain), (model[0], plain[0]), (lambda x: model(x), lambda x: plain(x))):
        if budget == "64MiB":
            assert torch.equal(torch.jit.trace(of_model, x)(x), torch.jit.trace(of_plain, x)(x))
        else:
            with pytest.raises(swapper.StateError, match="is being traced"):
                torch.jit.trace(of_model, x)
    assert torch.equal(model(x), plain(x))
    swapper.loaded(model).unload()

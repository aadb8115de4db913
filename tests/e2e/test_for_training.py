"""Fine-tuning from a checkpoint that people have, the model never being whole in memory: `for_training`, and adapters by peft.

The reference is transformers' own from_pretrained, trained by plain torch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import swapper
from e2e.twins import assert_same
from swapper.integrations.transformers import for_training

SMALL = {
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def llama(**options: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SMALL, hidden_size=128, intermediate_size=512, **options))


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SMALL, hidden_size=64, intermediate_size=128, num_local_experts=4))


def written(model: nn.Module, directory: Path) -> Path:
    model.save_pretrained(directory, max_shard_size="1MB")  # type: ignore[operator]
    return directory


def losses(model: Any, optimizer: Any, labels: torch.Tensor | None = None) -> list[float]:
    tokens = torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(2))
    model.train()
    found = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens if labels is None else labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, torch.Tensor | None]] = {
    "llama": (llama, AutoModelForCausalLM, None),
    "tied": (lambda: llama(tie_word_embeddings=True), AutoModelForCausalLM, None),
    "experts, stacked while they are read": (mixtral, AutoModelForCausalLM, None),
    "a head that is new": (llama, AutoModelForSequenceClassification, torch.tensor([0, 1])),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_from_pretrained_and_plain_torch(tmp_path: Path, name: str) -> None:
    make, cls, labels = MODELS[name]
    path = written(make(), tmp_path / "model")
    torch.manual_seed(5)
    plain = cls.from_pretrained(path)
    torch.manual_seed(5)
    model, values = for_training(cls, path)
    assert any(parameter.is_meta for parameter in model.parameters())
    with swapper.SwapManager(tmp_path, "24MiB") as manager:
        model, optimizer = manager.offload(model, adamw(model), init=values, params="nvme", optimizer_state="nvme")
        assert losses(model, optimizer, labels) == losses(plain, adamw(plain), labels)
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_run_goes_on(tmp_path: Path) -> None:
    path = written(llama(), tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(path)
    expected = losses(plain, optimizer := adamw(plain)) + losses(plain, optimizer)
    found = []
    for _ in range(2):
        model, values = for_training(AutoModelForCausalLM, path)
        with swapper.SwapManager(tmp_path, "24MiB", resume="auto") as manager:
            model, paged = manager.offload(model, adamw(model), init=values, params="nvme", optimizer_state="nvme")
            found += losses(model, paged)
    assert found == expected


def test_adapters_by_peft_have_their_values(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    from swapper.integrations.peft import get_peft_model

    def config() -> Any:
        return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    path = written(llama(), tmp_path / "model")
    torch.manual_seed(3)
    plain = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(path), config())
    model, values = for_training(AutoModelForCausalLM, path)
    torch.manual_seed(3)
    model = get_peft_model(model, config())
    with swapper.SwapManager(tmp_path, "24MiB") as manager:
        model, optimizer = manager.offload(model, adamw(model), init=values, params="nvme", optimizer_state="nvme")
        assert losses(model, optimizer) == losses(plain, adamw(plain))
        model.save_pretrained(tmp_path / "adapters")
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), tmp_path / "adapters")
    assert_same(dict(again.state_dict()), dict(plain.state_dict()))


@pytest.mark.whole
@pytest.mark.parametrize(
    "option", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"modules_to_save": ["lm_head"]}], ids=str
)
def test_adapters_that_begin_from_the_models_values_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    from swapper.integrations.peft import get_peft_model

    model, _ = for_training(AutoModelForCausalLM, written(llama(), tmp_path / "model"))
    with pytest.raises(swapper.UnsupportedError, match=next(iter(option))):
        get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], **option))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LoraConfig", {"target_modules": ["q_proj"], "use_dora": True}),
        ("LoraConfig", {"target_modules": ["q_proj"], "init_lora_weights": "pissa"}),
        ("LoraConfig", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ("LoHaConfig", {"target_modules": ["q_proj"]}),
        ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
        ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    ],
    ids=str,
)
def test_a_model_with_values_takes_adapters_of_every_kind(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    path = written(llama(), tmp_path / "model")

    def adapted() -> Any:
        torch.manual_seed(3)
        config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
        return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(path), config)

    plain, model = adapted(), adapted()
    with swapper.SwapManager(tmp_path, "24MiB") as manager:
        model, optimizer = manager.offload(model, adamw(model), params="nvme", optimizer_state="nvme")
        assert losses(model, optimizer) == losses(plain, adamw(plain))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("inside", [True, False])
def test_adapters_are_merged_inside_gather_and_outside(tmp_path: Path, inside: bool) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), config)
    plain = copy.deepcopy(model).merge_and_unload()
    with swapper.SwapManager(tmp_path, "24MiB") as manager:
        manager.offload(model, adamw(model), params="nvme", optimizer_state="nvme")
        with manager.gather(model, write=True) if inside else contextlib.nullcontext():
            merged = model.merge_and_unload()
        assert_same(dict(merged.state_dict()), dict(plain.state_dict()))


def test_adapters_without_values_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    model, values = for_training(AutoModelForCausalLM, written(llama(), tmp_path / "model"))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with swapper.SwapManager(tmp_path, "24MiB") as manager:
        with pytest.raises(swapper.UnsupportedError, match=r"swapper\.integrations\.peft\.get_peft_model"):
            manager.offload(model, adamw(model), init=values)


def test_a_parameter_without_values_beside_one_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    model, values = for_training(AutoModelForCausalLM, written(llama(), tmp_path / "model"))
    model.lm_head.register_parameter("scale", nn.Parameter(torch.empty(8, device="meta")))
    with swapper.SwapManager(tmp_path, "24MiB") as manager:
        with pytest.raises(swapper.UnsupportedError, match=r"parameter lm_head\.scale has no values"):
            manager.offload(model, adamw(model), init=values)


def test_a_checkpoint_that_was_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    path = written(llama(), tmp_path / "model")
    model, values = for_training(AutoModelForCausalLM, path)
    shard = next(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes())
    with swapper.SwapManager(tmp_path, "24MiB") as manager:
        with pytest.raises(swapper.CheckpointError, match="was changed"):
            manager.offload(model, adamw(model), init=values)

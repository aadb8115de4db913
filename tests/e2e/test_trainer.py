"""The Trainer of transformers over an offloaded model and optimizer: its losses and checkpoints are those of plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import swapper

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
NVME = {"params": "nvme", "optimizer_state": "nvme"}


class Lines(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 512, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def llama(lora: bool) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if not lora:
        return model
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, adapters)


def train(
    directory: Path, placement: dict[str, Any] | None, lora: bool, resume: Path | None = None, **options: Any
) -> tuple[list[float], Path]:
    """Return the losses, and the checkpoint that the Trainer wrote in the middle."""
    directory.mkdir()
    model = llama(lora)
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    manager = None
    if placement is not None:
        manager = swapper.SwapManager(directory, "16MiB")
        model, optimizer = manager.offload(model, optimizer, **placement)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    arguments = TrainingArguments(
        output_dir=str(directory / "out"), per_device_train_batch_size=2, max_steps=6, logging_steps=1, save_steps=3,
        report_to=[], use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Lines(), optimizers=(optimizer, schedule))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if manager is not None:
        manager.close()
    return losses, directory / "out" / "checkpoint-3"


@pytest.mark.parametrize(
    ("placement", "lora", "options"),
    [
        (NVME, False, {"gradient_accumulation_steps": 2}),
        ({**NVME, "update": "deferred"}, False, {"gradient_checkpointing": True}),
        ({**NVME, "gradients": "nvme"}, False, {"bf16": True}),
        ({**NVME, "update": "backward"}, False, {"max_grad_norm": 1e9}),  # the norm is logged, and nothing clipped
        (NVME, True, {}),
    ],
    ids=["accumulation", "deferred, checkpointing", "gradients on NVMe, autocast", "backward", "lora"],
)
def test_losses_and_checkpoints_are_plain_torchs(
    tmp_path: Path, placement: dict[str, Any], lora: bool, options: dict[str, Any]
) -> None:
    plain, plain_checkpoint = train(tmp_path / "plain", None, lora, **options)
    ours, checkpoint = train(tmp_path / "ours", placement, lora, **options)
    assert ours == plain
    written = next(checkpoint.glob("*model.safetensors")).name
    assert (checkpoint / written).read_bytes() == (plain_checkpoint / written).read_bytes()
    for number, source in enumerate((plain_checkpoint, checkpoint)):
        resumed, _ = train(tmp_path / f"resumed {number}", placement, lora, source, **options)
        assert resumed == plain

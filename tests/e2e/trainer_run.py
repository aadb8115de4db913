"""Trains by an offloaded Trainer, which is killed in a step, and never closed. Usage: trainer_run.py DIRECTORY STEP."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from swapper.integrations.transformers import for_training, offloaded

NVME = {"params": "nvme", "optimizer_state": "nvme"}
DROPOUT = {"attention_dropout": 0.1}  # so that a run that resumes with other random numbers is found out


class Lines(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 512, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class AtStep(TrainerCallback):
    """Calls `act` between two micro-batches, after `step` steps."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._step, self._act = step, act

    def on_substep_end(self, arguments: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self._step:
            self._act()


def write_model(path: Path) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def arguments_of(directory: Path, **options: Any) -> TrainingArguments:
    chosen = {
        "learning_rate": 1e-3, "weight_decay": 0.1, "warmup_steps": 2, "lr_scheduler_type": "cosine", "num_train_epochs": 2,
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no", **options,
    }  # fmt: skip
    return TrainingArguments(
        str(directory / "out"), logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **chosen
    )


def plain_trainer(directory: Path, model: Path, **options: Any) -> Any:
    made = AutoModelForCausalLM.from_pretrained(model, **DROPOUT)
    return Trainer(made, arguments_of(directory, **options), train_dataset=Lines())


def offloaded_trainer(directory: Path, model: Path, *callbacks: TrainerCallback, **options: Any) -> Any:
    made, values = for_training(AutoModelForCausalLM, model, **DROPOUT)
    make = offloaded(Trainer, directory, init=values, **NVME)
    return make(made, arguments_of(directory, **options), train_dataset=Lines(), callbacks=list(callbacks))


def logged(trainer: Any) -> list[tuple[float, float, float]]:
    """Return loss, learning rate and gradient norm of each step."""
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["loss"], entry["learning_rate"], entry["grad_norm"]) for entry in history]


if __name__ == "__main__":
    run = Path(sys.argv[1])
    killed = AtStep(int(sys.argv[2]), lambda: os.kill(os.getpid(), signal.SIGKILL))
    offloaded_trainer(run, run.parent / "model", killed).train()

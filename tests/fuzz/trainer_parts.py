"""Models and data, TrainingArguments, and actions of callbacks, of which trainers.py makes its programs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

SMALL = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SMALL,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            attention_dropout=0.1,
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=2, n_positions=32)),
    "bert": lambda: BertForSequenceClassification(
        BertConfig(
            **SMALL, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_labels=3
        )
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(**SMALL, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)
    ),
}
ARGUMENTS: dict[str, list[Any]] = {
    "optim": ["adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop", "schedule_free_adamw"],
    "lr_scheduler_type": ["cosine", "constant_with_warmup", "inverse_sqrt", "polynomial", "reduce_lr_on_plateau"],
    "warmup_steps": [1, 3, 0.3],
    "weight_decay": [0.1],
    "max_grad_norm": [0.0, 0.01, 1e9],
    "gradient_accumulation_steps": [2, 3],
    "per_device_train_batch_size": [1, 3],
    "num_train_epochs": [1, 1.6, 3],
    "label_smoothing_factor": [0.1],
    "bf16": [True],
    "gradient_checkpointing": [True],
    "gradient_checkpointing_kwargs": [{"use_reentrant": True}, {"use_reentrant": False}],
    "neftune_noise_alpha": [5.0],
    "logging_first_step": [True],
    "logging_steps": [2, 3, 0.2],
    "logging_nan_inf_filter": [False],
    "eval_strategy": ["steps", "epoch"],
    "eval_steps": [1, 2, 3],
    "eval_on_start": [True],
    "eval_delay": [2],
    "eval_accumulation_steps": [1],
    "batch_eval_metrics": [False],
    "prediction_loss_only": [True],
    "per_device_eval_batch_size": [3],
    "save_strategy": ["steps", "epoch", "best"],
    "save_steps": [1, 2, 3],
    "save_total_limit": [1, 2],
    "save_only_model": [True],
    "load_best_model_at_end": [True],
    "metric_for_best_model": ["loss"],
    "include_num_input_tokens_seen": ["all", "non_padding"],
    "train_sampling_strategy": ["sequential", "group_by_length"],
    "dataloader_drop_last": [True],
    "dataloader_num_workers": [1],
    "data_seed": [7],
    "ignore_data_skip": [True],
    "remove_unused_columns": [False],
    "average_tokens_across_devices": [False],
    "auto_find_batch_size": [True],
    "full_determinism": [True],
    "torch_empty_cache_steps": [2],
    "predict_with_generate": [True],
}
OF_RANKS: dict[str, list[Any]] = {
    "ddp_find_unused_parameters": [True, False],
    "ddp_bucket_cap_mb": [1],
    "ddp_broadcast_buffers": [True],
    "ddp_static_graph": [True],
    "save_on_each_node": [True],
    "accelerator_config": [{"split_batches": True}, {"dispatch_batches": True}],
}
"""What several ranks have besides."""
EVENTS = (
    *("step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end"),
    *("log", "evaluate", "save", "epoch_begin", "epoch_end", "prediction_step"),
)


class Lines(Dataset[dict[str, torch.Tensor]]):
    """Sequences of several lengths, or of one, with labels of a model."""

    def __init__(self, kind: str, count: int) -> None:
        self._kind, self._count = kind, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self._count:
            raise IndexError(index)
        tokens = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(index))
        labels = tokens[0] % 3 if self._kind == "bert" else tokens.clone()
        if self._kind != "bert":
            labels[: index % 5] = -100  # not counted: micro-batches have other numbers of tokens
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def gradients(trainer: Any, chance: random.Random, control: Any) -> Any:
    found = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    return [gradient.detach().clone() for gradient in chance.sample(found, min(2, len(found)))]


def write(trainer: Any, chance: random.Random, control: Any) -> None:
    with torch.no_grad():
        chance.choice(list(trainer.model.parameters())).mul_(0.5)


def set_rate(trainer: Any, chance: random.Random, control: Any) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.5


def ask(name: str) -> Callable[[Any, random.Random, Any], None]:
    """Return an action that asks the Trainer for what a field of its TrainerControl says."""
    return lambda trainer, chance, control: setattr(control, name, True)


def generated(trainer: Any, chance: random.Random, control: Any) -> Any:
    if not hasattr(trainer.model, "generate"):
        return None
    tokens = torch.randint(3, 64, (2, 4), generator=torch.Generator().manual_seed(chance.randrange(99)))
    return trainer.model.generate(tokens, max_new_tokens=3, do_sample=False)


def state_of(trainer: Any, chance: random.Random, control: Any) -> Any:
    state = trainer.optimizer.state_dict()["state"]
    return copy.deepcopy([sorted(state[key].items(), key=str) for key in sorted(state)])


ACTIONS: dict[str, Callable[[Any, random.Random, Any], Any]] = {
    "read": lambda trainer, chance, control: chance.choice(list(trainer.model.parameters())).detach().clone(),
    "gradients": gradients,
    "write": write,
    "rate": set_rate,
    "generate": generated,
    "optimizer state": state_of,
    "weights": lambda trainer, chance, control: sorted((n, v.clone()) for n, v in trainer.model.state_dict().items()),
    "evaluate now": lambda trainer, chance, control: trainer.evaluate()["eval_loss"],
    "evaluate": ask("should_evaluate"),
    "save": ask("should_save"),
    "log": ask("should_log"),
    "stop": ask("should_training_stop"),
    "stop epoch": ask("should_epoch_stop"),
}


class Acting(TrainerCallback):
    """Does the actions of a program at their steps, and keeps what they return."""

    def __init__(self, actions: list[list[Any]]) -> None:
        self.trainer: Any = None
        self.results: list[Any] = []
        self._actions = actions
        self._is_acting = False
        self.end: tuple[str, int, Callable[[], object]] | None = None

    def __getattribute__(self, name: str) -> Any:
        event = name.removeprefix("on_")
        if not name.startswith("on_") or event not in EVENTS:
            return super().__getattribute__(name)
        return lambda arguments, state, control, **others: self._act(event, state.global_step, control)

    def _act(self, event: str, step: int, control: Any) -> None:
        if self.end is not None and self.end[0] == event and step >= self.end[1]:
            self.end[2]()
        if self._is_acting:  # an evaluation has events too
            return
        self._is_acting = True
        for number, (at, when, name, seed) in enumerate(self._actions):
            if (at, when) == (event, step):
                self.results.append((step, number, name, ACTIONS[name](self.trainer, random.Random(seed), control)))
        self._is_acting = False

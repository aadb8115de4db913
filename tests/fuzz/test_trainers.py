"""The fuzzer of Trainers in a short form. The long form: tools/fuzz trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="the fuzzer of Trainers needs transformers, accelerate and peft")
from fuzz import cases, programs
from fuzz.trainer_parts import ACTIONS
from fuzz.trainers import PLAIN, TRAINERS

pytestmark = pytest.mark.usefixtures("prepared")
OPTIONS = {**programs.PLAIN_OPTIONS, "commit_every": 1}
PROGRAM = {"seed": 1, **PLAIN, "arguments": {}, "actions": [["step_end", 12, "read", 1]], "options": OPTIONS}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1}


def test_some_trainers_train_as_without_swapper(run_some: Callable[[cases.Kind, int], None]) -> None:
    run_some(TRAINERS, 2)


GOES_ON: dict[str, dict[str, Any]] = {
    "after an evaluation that drew numbers": {"arguments": EVALUATES, "end": ["killed", "step_begin", 3]},
    "with its first step, after an evaluation": {
        "arguments": {"eval_on_start": True},
        "end": ["killed", "step_begin", 1],
    },
    "between a step and its schedule's": {"end": ["interrupted", "optimizer_step", 2]},
    "where patience was lost before": {
        "arguments": {**EVALUATES, "metric_for_best_model": "loss", "learning_rate": 1.0},
        "patience": 3,
        "end": ["interrupted", "step_begin", 3],
    },
    "after its last step": {"arguments": {"num_train_epochs": 1}, "end": ["interrupted", "optimizer_step", 5]},
    "with the mode of its optimizer": {
        "arguments": {"optim": "schedule_free_adamw"},
        "end": ["killed", "step_begin", 3],
    },
}


@pytest.mark.parametrize("how", GOES_ON)
def test_a_trainer_that_has_ended_goes_on(how: str) -> None:
    assert cases.watched(TRAINERS, {**PROGRAM, **GOES_ON[how]}) is None


@pytest.mark.parametrize("end", [None, "interrupted", "killed"])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["DDP", "FSDP2"])
def test_a_trainer_on_two_ranks_is_a_plain_one(is_sharded: bool, end: str | None) -> None:
    """It evaluates, clips and saves; ended on all ranks, it goes on."""
    arguments = {**EVALUATES, "save_strategy": "steps", "save_steps": 2, "save_only_model": is_sharded}
    program = {**PROGRAM, "size": 2, "sharded": is_sharded, "from a file": True, "arguments": arguments}
    assert cases.watched(TRAINERS, {**program, "after": ["predict"], "end": end and [end, "step_begin", 3]}) is None


def test_a_trainer_takes_a_step_more_from_a_checkpoint_of_its_last_one() -> None:
    """As one without swapper does: the checkpoint is its own."""
    arguments = {"num_train_epochs": 0.5, "save_strategy": "steps", "save_steps": 3}
    assert cases.watched(TRAINERS, {**PROGRAM, "arguments": arguments, "after": ["from a checkpoint"]}) is None


def test_norms_are_of_gradients_that_no_optimizer_has_written_to() -> None:
    """With updates in backward schedule-free AdamW has written to those that it was given when the Trainer asks for the norm."""
    arguments = {"optim": "schedule_free_adamw", "max_grad_norm": 0.0}
    program = {**PROGRAM, "arguments": arguments, "options": {**OPTIONS, "update": "backward"}}
    assert cases.watched(TRAINERS, program) is None


def change_ours(trainer: Any, chance: Any) -> None:
    with torch.no_grad():
        next(trainer.model.parameters()).mul_(2.0 if hasattr(trainer, "manager") else 1.0)


BAD: dict[str, tuple[str, Callable[..., object]]] = {
    "other weights": ("embed_tokens.weight differs", change_ours),
    "an error of Python's": ("KeyError", lambda trainer, chance: hasattr(trainer, "manager") and {}["key"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_the_fuzzer_notices(kind: str, check_noticed: Callable[..., None]) -> None:
    check_noticed(TRAINERS, {**PROGRAM, "arguments": {"weight_decay": 0.1}}, ACTIONS, "read", *BAD[kind])

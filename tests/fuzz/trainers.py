"""Trains by Trainers of transformers with TrainingArguments drawn from a seed, plain and offloaded, and compares them bit for bit.

Usage: tools/fuzz trainers [--minutes N] [--cases N] [--seed N] [--program JSON]

A program is a model, TrainingArguments, what callbacks do at which step, how the training ends and goes on, what follows it, and
options of `offloaded`, of the parts in trainer_parts.py; some are of two ranks, by DDP or FSDP2. Losses, norms, rates, evaluations,
checkpoints, parameters and optimizer states must be the plain Trainer's.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from e2e.twins import smallest_budget
from infer.host_device import ORDERS
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
)
from transformers.distributed import DistributedConfig

import swapper
from fuzz.cases import Impossible, Kind, Program, assert_like, end_within, outcome, run
from fuzz.programs import REFUSALS, draw_options, for_a_manager, smaller_options
from fuzz.ranks import is_first_rank, meet, of_ddp, run_parts
from fuzz.trainer_parts import ACTIONS, ARGUMENTS, EVENTS, MODELS, OF_RANKS, Acting, Lines
from swapper.integrations.transformers import for_training, offloaded

BEFORE_A_STEP = ("step_begin", "substep_end", "pre_optimizer_step", "optimizer_step")
"""Events after which nothing of the step before is to come."""
LAST = 1 << 20
"""The step of what follows the training."""
SHARDABLE = ("llama", "bert")
"""Models that transformers can shard by FSDP2 as it loads them; of others its tied weights are two."""
PLAIN = {
    "size": 1,
    "sharded": False,
    "model": "llama",
    "lora": False,
    "from a file": False,
    "at_once": 1,
    "patience": None,
    "end": None,
    "after": [],
}


def draw_arguments(chance: random.Random, model: str, size: int) -> dict[str, Any]:
    """Return TrainingArguments that a Trainer takes together."""
    known = ARGUMENTS | (OF_RANKS if size > 1 else {})
    chosen = {name: chance.choice(values) for name, values in known.items() if chance.random() < 0.2}
    if "eval_steps" in chosen or chosen.get("lr_scheduler_type") == "reduce_lr_on_plateau" or "eval_delay" in chosen:
        chosen.setdefault("eval_strategy", "steps")
    if "save_steps" in chosen or "save_total_limit" in chosen:
        chosen.setdefault("save_strategy", "steps")
    if "load_best_model_at_end" in chosen:
        chosen.update(
            save_strategy="steps", eval_strategy="steps", eval_steps=2, save_steps=2, metric_for_best_model="loss"
        )
    if chosen.get("save_strategy") == "best":
        chosen.update(metric_for_best_model="loss", eval_strategy="steps")
    if chosen.get("save_strategy") == "steps":
        chosen.setdefault("save_steps", 2)
    if chosen.get("eval_strategy") == "steps":
        chosen.setdefault("eval_steps", 2)
    if "gradient_checkpointing_kwargs" in chosen:
        chosen["gradient_checkpointing"] = True
    if model != "t5":
        chosen.pop("predict_with_generate", None)
    if model in ("bert", "t5"):  # which compute nothing without labels
        chosen.pop("label_smoothing_factor", None)
    return chosen


def draw(seed: str) -> Program:
    """Return the program of a seed."""
    chance = random.Random(seed)
    model = chance.choice(list(MODELS))
    size, options = chance.choice([1, 1, 1, 2]), draw_options(chance)
    if chance.random() < 0.3:
        options |= {"device": chance.choice(ORDERS), "update_on": chance.choice(["cpu", "device"])}
    is_sharded = size > 1 and model in SHARDABLE and chance.random() < 0.5
    if size > 1 and not is_sharded:
        options = of_ddp(chance, options)
    arguments = draw_arguments(chance, model, size)
    if is_sharded:  # a Trainer saves no state of their optimizer, and asks for the norm of all gradients
        arguments["save_only_model"] = True
        options["update"] = chance.choice(["step", "deferred"])
    if options["update"] == "backward":  # what needs all gradients at once is refused
        arguments["max_grad_norm"] = 0.0
    patience, after = chance.choice([None, 1]), ["evaluate", "predict", "save", "train", "from a checkpoint"]
    at_once = chance.choice(
        [1, 1, 2, None] if size == 1 else [1]
    )  # those that run together have run when their events come
    actions = []
    for _ in range(chance.choice([0, 1, 2, 4])):
        name, event = chance.choice(list(ACTIONS)), chance.choice(EVENTS)
        event = "pre_optimizer_step" if name == "gradients" or (event == "substep_end" and at_once != 1) else event
        if at_once != 1 and event == "step_begin" and name in ("stop", "stop epoch"):
            event = "step_end"  # where a step ends after its first micro-batch, all have drawn their random numbers
        has_left = "device" in options or options["gradients"] == "nvme"
        name = "read" if name == "gradients" and has_left else name
        actions.append([event, chance.randint(0, 7), name, chance.randrange(1 << 16)])
    end = chance.choice([None, None, "interrupted", "killed"])
    event = chance.choice(BEFORE_A_STEP)
    if end is not None:  # what a Trainer that resumes from a checkpoint of its own does not know either
        actions = [action for action in actions if action[2] not in ("stop", "stop epoch")]
        after.remove("train")
        lost = {"ignore_data_skip", "train_sampling_strategy", "logging_steps"}
        if patience or arguments.get("optim") == "schedule_free_adamw":  # which would evaluate, and round, once more
            lost.add("eval_on_start")
        actions = [action for action in actions if action[2] != "log" and "epoch" not in action[0]]
        # What was changed by hand in the step that is interrupted would be changed once more.
        actions = [action for action in actions if action[0] not in BEFORE_A_STEP or action[2] not in ("write", "rate")]
        if event == "optimizer_step":  # what follows the step does not come
            actions, lost = [], lost | {"eval_strategy", "lr_scheduler_type", "load_best_model_at_end", "save_strategy"}
        arguments = {name: value for name, value in arguments.items() if name not in lost}
    return {
        "seed": chance.randrange(1 << 30),
        "size": size,
        "sharded": is_sharded,
        "model": model,
        "lora": chance.random() < 0.2 and not is_sharded,
        "from a file": chance.random() < 0.3 or is_sharded,
        "at_once": at_once,
        "arguments": arguments,
        "patience": patience if "load_best_model_at_end" in arguments else None,
        "actions": actions,
        "end": end and [end, event, chance.randint(1, 6)],
        "after": chance.sample(after, chance.choice([0, 1, 2])),
        "options": options,
    }


class Trained:
    """A Trainer of a program, plain or offloaded, and what it did."""

    def __init__(self, program: Program, directory: Path, is_offloaded: bool) -> None:
        self.program, self.directory, self.is_offloaded = program, directory, is_offloaded
        self.results: list[Any] = []
        self.history: list[dict[str, Any]] = []
        self.trainer: Any = None
        self.begun = 0  # the step that it resumes from
        directory.mkdir(exist_ok=True)

    def make(self) -> Any:
        """Make its Trainer, as a script does that starts, and return its callback."""
        program, acting = self.program, Acting(self.program["actions"])
        kind: Any = Seq2SeqTrainer if program["model"] == "t5" else Trainer
        options: dict[str, Any] = {}
        model = self._model(options if self.is_offloaded else None)
        arguments = Seq2SeqTrainingArguments(str(self.directory / "out"), **self._arguments())
        data = {"train_dataset": Lines(program["model"], 11), "eval_dataset": Lines(program["model"], 5)}
        callbacks: list[Any] = [acting]
        if program["patience"] is not None:
            callbacks.append(EarlyStoppingCallback(program["patience"]))
        if self.is_offloaded:
            manager = self._manager(kind, model, arguments, data, options)
            kind = offloaded(kind, manager, at_once=program["at_once"], **options)
        self.trainer = acting.trainer = kind(model, arguments, callbacks=callbacks, **data)
        self.trainer.remove_callback(PrinterCallback)
        return acting

    def _arguments(self) -> dict[str, Any]:
        usual = {"learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "num_train_epochs": 2}
        usual |= {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
        usual |= {
            "per_device_eval_batch_size": 2,
            "restore_callback_states_from_checkpoint": self.program["end"] is not None,
        }
        usual |= {"label_names": ["labels"]}  # which a Trainer does not find in a model of PEFT
        return {**usual, **self.program["arguments"]}

    def _model(self, options: dict[str, Any] | None = None) -> Any:
        """Return a model. With `options` of `offloaded` maybe its shapes alone; its values are in the options then."""
        program, stored = self.program, self.directory.parent / "model"
        torch.manual_seed(program["seed"])
        model = MODELS[program["model"]]()
        if program["from a file"]:
            if not stored.exists() and is_first_rank():
                model.save_pretrained(stored)
            meet()
            if program["sharded"]:
                distributed = DistributedConfig(fsdp_size=dist.get_world_size())
                model = type(model).from_pretrained(stored, distributed_config=distributed)
            elif options is not None and not program["lora"]:
                model, options["init"] = for_training(type(model), stored)
            else:
                model = type(model).from_pretrained(stored)
                for parameter in model.parameters():  # torch rounds otherwise in memory that is aligned to 4 bytes only
                    parameter.data = parameter.data.clone()
        if program["lora"]:
            torch.manual_seed(program["seed"])
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1))
        return model

    def _manager(
        self, kind: Any, model: Any, arguments: Any, data: dict[str, Any], options: dict[str, Any]
    ) -> swapper.SwapManager:
        given, commits, room_bytes = for_a_manager(self.program["options"])
        if "device" in given:
            given["device_memory"] = "64MiB"
        probe = self.directory / "probe"
        full = model if "init" not in options else self._model()
        optimizer = kind(full, arguments, **data).create_optimizer()
        if hasattr(optimizer, "train"):
            optimizer.train()
        budget = smallest_budget(probe, full, optimizer, **given) + room_bytes
        options.update(given)
        return swapper.SwapManager(self.directory / "run", budget, resume="auto", rng=True, commits=commits)

    def train(self, acting: Acting, *given: Any, **options: Any) -> None:
        """Train, and keep what was logged and what callbacks saw."""
        try:
            self.trainer.train(*given, **options)
        finally:
            self.results += acting.results
            self.history = [measured(entry) for entry in self.trainer.state.log_history]
            acting.results = []

    def run(self) -> None:
        """Do all of the program without an end in its middle."""
        acting = self.make()
        self.train(acting)
        self.follow(acting)

    def follow(self, acting: Acting) -> None:
        """Do what follows the training."""
        for name in self.program["after"]:
            if name == "evaluate":
                self.results.append((LAST, 0, name, measured(self.trainer.evaluate())))
            elif name == "predict":
                found = self.trainer.predict(Lines(self.program["model"], 4))
                self.results.append((LAST, 0, name, measured(found.metrics)))
            elif name == "save":
                self.trainer.save_model(str(self.directory / "saved"))
                meet()
                self.results.append(
                    (LAST, 0, name, sorted(load_file(next((self.directory / "saved").glob("*.safetensors"))).items()))
                )
            elif name == "train":
                self.train(acting)
            else:
                saved = sorted((self.directory / "out").glob("checkpoint-*"))
                if saved:
                    self.train(acting, resume_from_checkpoint=str(saved[0]))

    def begin(self, end: Callable[[], object]) -> None:
        """Begin a training, which calls `end` at its place."""
        _, event, step = self.program["end"]
        acting = self.make()
        acting.end = (event, step, end)
        with self.trainer.manager:
            self.train(acting)

    def go_on(self) -> None:
        """Do all of the program, after a training that was ended."""
        self.results = []
        acting = self.make()
        self.begun = self.trainer.manager.step
        self.train(acting)
        self.follow(acting)


def measured(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what a Trainer has logged, without times."""
    return {
        k: v for k, v in entry.items() if not k.endswith(("_runtime", "_per_second", "_time")) and k != "total_flos"
    }


def compare(ours: Trained, plain: Trained) -> None:
    """Raises AssertionError where they differ."""
    begun = ours.begun
    histories = [[e for e in t.history if e["step"] > begun] for t in (ours, plain)]
    if begun:
        histories = [[{k: v for k, v in e.items() if k != "train_loss"} for e in h] for h in histories]
    assert str(histories[0]) == str(histories[1]), f"logged {histories[0]}, and plain {histories[1]}"
    results = [[r for r in t.results if r[0] > begun] for t in (ours, plain)]
    assert len(results[0]) == len(results[1]), [[r[:3] for r in found] for found in results]
    for found, expected in zip(*results, strict=True):
        assert_like(found, expected, str(expected[:3]))
    for name, value in plain.trainer.model.state_dict().items():
        assert_like(ours.trainer.model.state_dict()[name], value, name)
    assert_like(*(t.trainer.optimizer.state_dict()["state"] for t in (ours, plain)), "optimizer state")
    assert_like(*(position(t) for t in (ours, plain)), "state of the Trainer")
    assert_like(*(t.trainer.lr_scheduler.state_dict() for t in (ours, plain)), "schedule")
    assert_like(*(checkpoints(t) for t in (ours, plain)), "checkpoints")


def position(trained: Trained) -> dict[str, Any]:
    state = trained.trainer.state
    found = {
        name: getattr(state, name) for name in ("global_step", "max_steps", "epoch", "best_metric", "best_global_step")
    }
    found["tokens"] = state.num_input_tokens_seen
    found["best"] = state.best_model_checkpoint and Path(state.best_model_checkpoint).name
    return found


def checkpoints(trained: Trained) -> dict[str, Any]:
    """Return what is in the Trainer's checkpoints."""
    found: dict[str, Any] = {}
    for path in sorted((trained.directory / "out").glob("checkpoint-*/*")):
        name = "/".join(path.parts[-2:])
        if path.suffix == ".safetensors":
            found[name] = load_file(path)
        elif path.name in ("optimizer.pt", "scheduler.pt"):
            found[name] = torch.load(path)
        elif path.name == "trainer_state.json":
            state = json.loads(path.read_text())
            found[name] = {key: state[key] for key in ("global_step", "epoch", "stateful_callbacks")}
        else:
            found[name] = None
    return found


def run_case(program: Program, directory: Path) -> str | None:
    """Return what went wrong, None if nothing did; REFUSED and why, if swapper or a Trainer cannot do it."""
    if program["size"] == 1:
        return outcome(lambda: run_both(program, directory), REFUSALS)
    is_killed = program["end"] is not None and program["end"][0] == "killed"
    parts = [partial(begin_and_be_killed, program, directory)] if is_killed else []
    return run_parts(program["size"], directory, [*parts, partial(run_both, program, directory, has_ended=is_killed)])


def begin_and_be_killed(program: Program, directory: Path) -> None:
    run_plain(Trained(program, directory / "tried", is_offloaded=False))
    Trained(program, directory / "ours", is_offloaded=True).begin(partial(os.kill, os.getpid(), signal.SIGKILL))


def run_plain(plain: Trained) -> None:
    """Raises Impossible: a Trainer of transformers cannot do it."""
    try:
        plain.run()
    except Exception as error:
        raise Impossible(f"{type(error).__name__}: {error}") from error


def run_both(program: Program, directory: Path, has_ended: bool = False) -> None:
    """Raises AssertionError where the offloaded Trainer does other than the plain one. `has_ended`: that has begun before."""
    plain, ours = (Trained(program, directory / name, name == "ours") for name in ("plain", "ours"))
    run_plain(plain)
    if program["end"] is None:
        ours.run()
    else:
        if not has_ended:
            end_within(ours.begin, program["end"][0], directory / "answer", REFUSALS)
        ours.go_on()
        if ours.begun >= plain.trainer.state.global_step and program["patience"]:
            raise Impossible("a Trainer that has stopped early trains on when it begins again")
    meet()
    with ours.trainer.manager:
        compare(ours, plain)


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with a part less."""
    for name in ("actions", "after"):
        for number in range(len(program[name])):
            yield {**program, name: program[name][:number] + program[name][number + 1 :]}
    for name in program["arguments"]:
        yield {**program, "arguments": {n: v for n, v in program["arguments"].items() if n != name}}
    simpler = {name: value for name, value in PLAIN.items() if program[name] != value}
    for name in simpler if not program["sharded"] else simpler.keys() - {"size", "from a file"}:
        yield {**program, name: simpler[name]}
    yield from smaller_options(program)


TRAINERS = Kind("trainers", __doc__ or "", draw, run_case, smaller)


if __name__ == "__main__":
    sys.exit(run(TRAINERS, sys.argv[1:]))

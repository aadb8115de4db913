"""Loops that call accelerate, whose ingredients libraries.py draws."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from safetensors.torch import load_file

from fuzz.library_parts import LibraryLoop, loader_of, loss_of
from fuzz.program_passes import Action, Side

ARGUMENTS: dict[str, list[Any]] = {
    "order": ["offload first", "prepare first"],
    "accumulation": [1, 1, 2, 3],
    "how": ["accumulate", "accumulate", "no_sync", "together", "plain"],
    "mixed_precision": ["no", "no", "bf16"],
    "step_scheduler_with_optimizer": [True, False],
    "schedule": ["steps", "cosine", "one cycle", "warmup", "lambda"],
    "prepare schedule": [True, False],
    "clip": [None, None, "norm", "value"],
    "lines": [7, 8, 12],
    "epochs": [1, 2, 3],
    "shuffled": [True, False],
    "seedable": [True, False],
    "evaluation": [None, "epoch", "step"],
    "zero": ["after", "before", "in place"],
}
EVENTS = ("batch", "after backward", "before step", "after step", "epoch end")


class AccelerateLoop(LibraryLoop):
    """A loop that calls accelerate."""

    accelerator: Any
    model: Any
    optimizer: Any
    schedule: Any

    def make(self) -> None:
        """Make all, as a script does that starts."""
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        given = self.arguments
        accumulation = given["accumulation"] if given["how"] in ("accumulate", "no_sync") else 1
        self.accelerator = accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulation,
            mixed_precision=given["mixed_precision"],
            step_scheduler_with_optimizer=given["step_scheduler_with_optimizer"],
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=given["seedable"]),
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        self.loader = loader_of(given["lines"], seed=5 if given["shuffled"] else None)
        self.to_evaluate = accelerator.prepare(loader_of(5, 2))
        model = self.make_model()
        optimizer = self.make_optimizer(model.parameters())
        options: dict[str, Any] = {}
        if self.is_offloaded:
            options = self.make_manager(model, optimizer, resume="auto", rng=True)
        if self.is_offloaded and given["order"] == "offload first":
            model, optimizer = self.manager.offload(model, optimizer, **options)
        schedule = self.make_schedule(optimizer)
        self.model, self.optimizer, self.loader = accelerator.prepare(model, optimizer, self.loader)
        self.schedule = accelerator.prepare(schedule) if given["prepare schedule"] else schedule
        if self.is_offloaded and given["order"] == "prepare first":
            self.manager.offload(self.model, self.optimizer, **options)
        if self.is_offloaded:
            self.manager.register(schedule=schedule)
            self.begun = self.manager.step
        else:
            self.seed()

    def run(self) -> None:
        self.make()
        if self.begun == 0:
            self.seed()
        self.train()
        self.found = {
            "model": self.accelerator.get_state_dict(self.model),
            "optimizer": self.optimizer.state_dict()["state"],
            "schedule": self.schedule.state_dict(),
        }

    def train(self) -> None:
        accumulation = self.arguments["accumulation"]
        steps = -(-len(self.loader) // accumulation)  # of an epoch
        first, skipped = divmod(self.begun, steps)
        self.step = self.begun
        for epoch in range(first, self.arguments["epochs"]):
            loader, left = self.loader, skipped if epoch == first else 0
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(epoch)
            if left:
                loader = self.accelerator.skip_first_batches(loader, left * accumulation)
            self.train_epoch(loader)
            if self.arguments["evaluation"] == "epoch":
                self.evaluate()
            self.event("epoch end")

    def train_epoch(self, loader: Any) -> None:
        if self.arguments["how"] in ("accumulate", "no_sync"):
            for number, batch in enumerate(loader):
                self.train_batch(batch, number)
        else:
            batches = iter(loader)
            while group := list(islice(batches, self.arguments["accumulation"])):
                self.train_group(group)

    def train_batch(self, batch: torch.Tensor, number: int) -> None:
        """Do a micro-batch, whose step accelerate leaves out, or the loop."""
        accelerator, accumulation = self.accelerator, self.arguments["accumulation"]
        if self.arguments["how"] == "accumulate":
            with accelerator.accumulate(self.model):
                self.pass_of(batch)
                self.end_step(accelerator.sync_gradients)
        elif (number + 1) % accumulation and not accelerator.gradient_state.end_of_dataloader:
            with accelerator.no_sync(self.model), self.open_step():
                self.pass_of(batch)
        else:
            self.pass_of(batch)
            self.end_step(True)

    def train_group(self, group: Iterable[torch.Tensor]) -> None:
        """Do a step of several micro-batches."""
        batches = list(group)
        if self.arguments["how"] == "together" and self.manager is not None:
            self.event("batch")
            self.zero_before()
            losses = self.manager.accumulate_batches(lambda batch: self.loss(batch) / len(batches), batches)
            self.results += [(self.step + 1, -1, "loss", loss) for loss in losses]
        else:
            for number, batch in enumerate(batches):
                with self.open_step() if number + 1 < len(batches) else torch.enable_grad():
                    self.pass_of(batch, len(batches), "batch" if number == 0 else "other batch")
        self.end_step(True)

    def open_step(self) -> Any:
        """Return a context for a backward after which another one follows to the same step."""
        return self.manager.accumulate() if self.manager is not None else torch.enable_grad()

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        with self.accelerator.autocast():
            return loss_of(self.model, batch)

    def pass_of(self, batch: torch.Tensor, parts: int = 1, event: str = "batch") -> None:
        self.event(event)
        self.zero_before()
        loss = self.loss(batch) / parts
        self.accelerator.backward(loss)
        self.results.append((self.step + 1, -1, "loss", loss.detach()))
        self.event("after backward")

    def zero_before(self) -> None:
        if self.arguments["zero"] == "before" and self.arguments["accumulation"] == 1:
            self.optimizer.zero_grad()

    def end_step(self, is_last: bool) -> None:
        given = self.arguments
        if is_last:
            self.event("before step")
            if given["clip"] == "norm":
                norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.05)
                self.results.append((self.step + 1, -1, "norm", norm))
            elif given["clip"] == "value":
                self.accelerator.clip_grad_value_(self.model.parameters(), 1e-3)
        self.optimizer.step()
        if given["prepare schedule"] or is_last:
            self.schedule.step()
        if given["zero"] != "before" or given["accumulation"] > 1:
            self.optimizer.zero_grad(**({"set_to_none": False} if given["zero"] == "in place" else {}))
        if is_last:
            self.step += 1
            self.event("after step")
            if given["evaluation"] == "step":
                self.evaluate()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.random.fork_rng(), torch.no_grad():
            for batch in self.to_evaluate:
                losses = self.accelerator.gather_for_metrics(self.loss(batch).repeat(len(batch)))
                self.results.append((self.step, -1, "evaluation", losses.clone()))
        self.model.train()

    def event(self, name: str) -> None:
        step = self.step + (name in ("batch", "after backward", "before step"))
        self.act(name, step, lambda: self.side(self.model, self.optimizer), ACTIONS_OF_ACCELERATE)

    def side(self, model: Any, optimizer: Any) -> Side:
        side = super().side(model, optimizer)
        side.kept["loop"] = self
        return side


def save_state(side: Side) -> Any:
    loop = side.kept["loop"]
    side.kept["saved"] = side.directory / f"state-{loop.step}"
    loop.accelerator.save_state(str(side.kept["saved"]))
    loop.accelerator.wait_for_everyone()  # only the first rank writes
    found = {path.name: load_file(path) for path in side.kept["saved"].glob("*.safetensors")}
    return [sorted(each.items()) for each in found.values()], torch.load(side.kept["saved"] / "optimizer.bin")["state"]


def load_state(side: Side) -> Any:
    if "saved" in side.kept:
        side.kept["loop"].accelerator.load_state(str(side.kept["saved"]))


def save_model(side: Side) -> Any:
    target, accelerator = side.directory / f"model-{side.kept['loop'].step}", side.kept["loop"].accelerator
    accelerator.save_model(side.model, str(target), max_shard_size=side.chance.choice(["20KB", "5GB"]))
    accelerator.wait_for_everyone()
    return sorted(item for path in target.glob("*.safetensors") for item in load_file(path).items())


def whole_state(side: Side) -> Any:
    return {name: value.clone() for name, value in side.kept["loop"].accelerator.get_state_dict(side.model).items()}


def unwrapped(side: Side) -> Any:
    model = side.kept["loop"].accelerator.unwrap_model(side.model, keep_fp32_wrapper=True)
    return [parameter.detach().clone() for parameter in model.parameters()]


ACTIONS_OF_ACCELERATE: dict[str, Action] = {
    "save state": save_state,
    "load state": load_state,
    "save model": save_model,
    "whole state": whole_state,
    "unwrapped": unwrapped,
}

"""Trains in plain torch, all in memory: the reference of a swapped run, bit for bit.

Does not import swapper (see gpt.py). With `masters`, the optimizer updates fp32 copies of the parameters of a bf16 or
fp16 model: gradients are upcast, the copies are updated, the parameters are rounded from them. As a script, in a process
that never imports swapper, it continues from a snapshot:

    python plain.py '{"snapshot": ..., "config": {...}, "dtype": "bfloat16", ...}'

and prints JSON: the losses of the next `steps` steps, and the seconds of each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


def make_optimizer(parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
    """Make the optimizer of the demo, the example and the benchmark."""
    return torch.optim.AdamW(parameters, lr=learning_rate, fused=True)


def make_optimizers(
    named_parameters: Iterable[tuple[str, nn.Parameter]], learning_rate: float, kind: str
) -> list[torch.optim.Optimizer]:
    """Make one optimizer, if `kind` is "adamw", or with "muon" two: Muon for the matrices of the layers, AdamW for the rest.

    Args:
        named_parameters: of the model.
        learning_rate: of each.
        kind: "adamw" or "muon".
    """
    named = list(named_parameters)
    matrices = [parameter for name, parameter in named if kind == "muon" and updated_by_muon(name, parameter)]
    others = [parameter for name, parameter in named if kind != "muon" or not updated_by_muon(name, parameter)]
    muon: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=learning_rate)] if matrices else []
    return [*muon, make_optimizer(others, learning_rate)]


def updated_by_muon(name: str, parameter: nn.Parameter) -> bool:
    """Return True for a matrix of a layer: not for embeddings and the head, by Muon's own advice."""
    return name.startswith("layers.") and parameter.dim() == 2


class PlainTraining:
    """One model and its optimizers.

    Args:
        model: in its compute dtype.
        learning_rate: for AdamW.
        masters: keep fp32 copies of the parameters for the optimizer.
        optimizers: see `make_optimizers`.
        saved: a snapshot to continue from, as loaded by torch.load: "model", "optimizer" and, with masters, "master".
    """

    def __init__(
        self,
        model: nn.Module,
        learning_rate: float,
        *,
        masters: bool,
        saved: Mapping[str, Any] | None = None,
        optimizers: str = "adamw",
    ) -> None:
        self.model = model
        if saved is not None:
            model.load_state_dict(saved["model"])
        self._masters: dict[str, nn.Parameter] = {}
        if masters:
            for name, parameter in model.named_parameters():
                value = saved["master"][name] if saved is not None else parameter.detach()
                self._masters[name] = nn.Parameter(value.to(torch.float32, copy=True))
        updated = self._masters.items() if masters else model.named_parameters()
        self.optimizers = make_optimizers(updated, learning_rate, optimizers)
        if saved is not None:
            states = saved["optimizer"] if isinstance(saved["optimizer"], list) else [saved["optimizer"]]
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict(state)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor, micro_batches: int = 1) -> float:
        """Run forward and backward of each micro-batch, and one update. Returns the loss, from before the update.

        Args:
            tokens, targets: int64, (batch, context).
            micro_batches: in how many parts the batch is cut.
        """
        total = 0.0
        for some, theirs in zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            loss: torch.Tensor = self.model(some, theirs) / micro_batches
            loss.backward()
            total += loss.item()
        for name, master in self._masters.items():
            gradient = self.model.get_parameter(name).grad
            master.grad = None if gradient is None else gradient.float()
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                self.model.get_parameter(name).copy_(master)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model.zero_grad()
        return total


def resume(task: dict[str, Any]) -> dict[str, list[float]]:
    # Run by path, so this folder is on the path and these are the files in it, without the package.
    from corpus import Corpus
    from gpt import Gpt, GptConfig

    torch.set_num_threads(task["threads"])
    config = GptConfig(**task["config"])
    with torch.device("meta"):
        model = Gpt(config)
    model = model.to(getattr(torch, task["dtype"])).to_empty(device="cpu")
    saved = torch.load(task["snapshot"], mmap=True)
    training = PlainTraining(model, task["learning_rate"], masters=task["masters"], saved=saved)
    corpus = Corpus(config.vocabulary)
    losses, times_s = [], []
    for number in range(task["first_batch"], task["first_batch"] + task["steps"]):
        tokens, targets = corpus.batch(number, task["batch"], config.context)
        began_s = time.perf_counter()
        losses.append(training.step(tokens, targets))
        times_s.append(time.perf_counter() - began_s)
    if "swapper" in sys.modules:
        raise RuntimeError("this process must not use swapper")
    return {"losses": losses, "times_s": times_s}


if __name__ == "__main__":
    print(json.dumps(resume(json.loads(sys.argv[1]))))

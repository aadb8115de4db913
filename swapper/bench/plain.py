"""Trains in plain torch: a small GPT, on real text that every machine has, for the demo, examples and benchmarks.

Does not import swapper, so that the demo can load it in a process of its own that never does. The model has pre-norm layers
in a ModuleList, learned positions, causal attention, a GELU MLP, an output projection that is not tied.

The text is the source of Python's own standard library, as bytes, and needs no download. Files come in the order of their
paths and batches from a seed and their number, so that a run, and its continuation in another process, see the same data.

With `masters`, the optimizer updates fp32 copies of the parameters of a bf16 or
fp16 model: gradients are upcast, the copies are updated, the parameters are rounded from them. As a script, in a process
that never imports swapper, it continues from a snapshot:

    python plain.py '{"snapshot": ..., "config": {...}, "dtype": "bfloat16", ...}'

and prints JSON: the losses of the next `steps` steps, and the seconds of each.
"""

from __future__ import annotations

import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

HEAD_WIDTH = 64  # as in GPT-2


@dataclass(frozen=True)
class GptConfig:
    """Sizes of a GPT. `width` is a multiple of 64, the width of one attention head."""

    vocabulary: int
    context: int
    layers: int
    width: int

    @property
    def parameters(self) -> int:
        per_layer = 12 * self.width**2 + 13 * self.width
        ends = self.width * (2 * self.vocabulary + self.context + 2)
        return self.layers * per_layer + ends

    @classmethod
    def for_parameters(cls, parameters: int, *, vocabulary: int, context: int) -> GptConfig:
        """Return the sizes whose count is nearest to `parameters`: at least four layers, in usual proportions.

        Args:
            parameters: how many.
            vocabulary: of tokens.
            context: tokens of a sequence.
        """

        def distance(config: GptConfig) -> float:
            count = abs(math.log(config.parameters / parameters))
            shape = abs(math.log(config.width / (HEAD_WIDTH * config.layers)))
            return count + 0.03 * shape

        configs = (
            cls(vocabulary, context, layers, HEAD_WIDTH * heads) for layers in range(4, 129) for heads in range(1, 257)
        )
        return min(configs, key=distance)


class Layer(nn.Module):
    """One transformer layer: attention and MLP, each behind a norm and around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        split = self.qkv(self.norm_attention(x)).view(batch, context, 3, self.heads, HEAD_WIDTH)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, context, width))
        out: torch.Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x))))
        return out


class Gpt(nn.Module):
    """Token ids (batch, context) to logits (batch, context, vocabulary); with targets, to the mean loss."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(Layer(config.width) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self.initialise)

    @staticmethod
    @torch.no_grad()
    def initialise(module: nn.Module) -> None:
        """Initialize one module's own parameters."""
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_gpt(config: GptConfig, dtype: torch.dtype) -> Gpt:
    """Make the model in `dtype` directly: converting it later would hold it twice."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Gpt(config)
    finally:
        torch.set_default_dtype(before)


VALIDATION_EVERY = 16  # one file in this many is held out
LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}


class Corpus:
    """The text as token ids, cut into training and validation by whole files.

    Args:
        vocabulary: 256 gives one token a byte; more gives one token a pair of bytes, folded into the vocabulary.
        limit_bytes: maximum bytes of text.
    """

    def __init__(self, vocabulary: int = 256, limit_bytes: int = 4_000_000) -> None:
        if vocabulary < 256:
            raise ValueError(f"a vocabulary of {vocabulary} is too small for bytes; it must be at least 256")
        parts: dict[bool, list[bytes]] = {False: [], True: []}
        taken_bytes = 0
        for number, path in enumerate(_sources()):
            text = path.read_bytes()
            parts[number % VALIDATION_EVERY == 1].append(text)
            taken_bytes += len(text)
            if taken_bytes >= limit_bytes and parts[True]:
                break
        self.train = _tokens(b"".join(parts[False]), vocabulary)
        self.validation = _tokens(b"".join(parts[True]), vocabulary)

    def batch(
        self, number: int, size: int, context: int, *, validation: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return batch `number`, the same each time: tokens and targets, int64, each (size, context).

        Args:
            number: of the batch.
            size, context: of the result.
            validation: of the text that is kept for it. Default: False.
        """
        tokens = self.validation if validation else self.train
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(len(tokens) - context - 1, (size,), generator=generator, device="cpu").tolist()
        rows = torch.stack([tokens[start : start + context + 1] for start in starts]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _sources() -> list[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for directory, below, files in os.walk(library):
        below[:] = [name for name in below if name not in LEFT_OUT]  # site-packages has more files than all the rest
        found += [Path(directory, name) for name in files if name.endswith(".py")]
    if not found:
        raise FileNotFoundError(f"{library} holds no Python sources to train on")
    return sorted(found)


def _tokens(text: bytes, vocabulary: int) -> torch.Tensor:
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if vocabulary > 256:
        pairs = tokens[: len(tokens) // 2 * 2].view(-1, 2).int()
        tokens = ((pairs[:, 0] * 256 + pairs[:, 1]) % vocabulary).to(torch.uint16)
    return tokens


def make_optimizer(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
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

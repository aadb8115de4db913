"""Defines layers of the models of programs.py: what people build models of, each from (batch, length, WIDTH) to the same shape.

A layer's name in a program is `kind`, or `wrapper+kind`, with any number of wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

VOCABULARY = 192
WIDTH = 96


class Layer(nn.Module):
    """A module with a function in place of a forward.

    Args:
        run: given this module and the value, returns the layer's result.
        parts: modules, parameters, and buffers, by name.
    """

    def __init__(self, run: Callable[[Any, torch.Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, value: torch.Tensor) -> Any:
        return self.run(self, value)


class Scaled(torch.autograd.Function):
    """A product with a matrix and a scale, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value, weight, scale)
        return value @ weight * scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (gradient,), (value, weight, scale) = gradients, ctx.saved_tensors
        of_weight = value.flatten(0, -2).T @ (gradient * scale).flatten(0, -2)
        return (gradient * scale) @ weight.T, of_weight, (gradient * (value @ weight)).sum().reshape(scale.shape)


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*(shape or (WIDTH, WIDTH))) * WIDTH**-0.5)


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


def feed_forward() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.ReLU(inplace=True), nn.Linear(3 * WIDTH, WIDTH)
    )


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def over_length(module: nn.Module) -> nn.Module:
    return Layer(lambda self, value: self.module(value.transpose(1, 2)).transpose(1, 2), module=module)


def lazily() -> nn.Module:
    module = nn.LazyLinear(WIDTH)
    module(torch.zeros(1, WIDTH))
    return module


def count(self: Any, value: torch.Tensor) -> torch.Tensor:
    """Change buffers: in place, and by another tensor."""
    if self.training:
        with torch.no_grad():
            self.steps += 1
            self.mean = self.mean * 0.9 + value.detach().float().mean((0, 1)) * 0.1
    return self.linear(value - self.mean.to(value.dtype))


def choose_expert(self: Any, value: torch.Tensor) -> torch.Tensor:
    scores = self.router(value.mean((0, 1)))
    return sum(self.experts[n](value) * scores[n].sigmoid() for n in scores.topk(2).indices.tolist())


def choose_by_name(self: Any, value: torch.Tensor) -> torch.Tensor:
    return self.ways["up" if value.detach().sum() > 0 else "down"](value)


def by_views(self: Any, value: torch.Tensor) -> torch.Tensor:
    query, key = self.both.chunk(2)
    return F.linear(torch.tanh(F.linear(value, query, self.bias[0])), key.t(), self.bias[1])


def with_children_s_weights(self: Any, value: torch.Tensor) -> torch.Tensor:
    return F.linear(value, self.one.weight * self.scale + self.other.weight.t(), self.one.bias)


def in_turn(self: Any, value: torch.Tensor) -> torch.Tensor:
    for number, weight in enumerate(self.weights):
        value = value @ weight + self.named[f"bias{number}"]
    return value


def with_target(self: Any, value: torch.Tensor) -> torch.Tensor:
    """A branch without gradients (BYOL), whose weights are also trained in the other one."""
    with torch.no_grad():
        target = self.linear(value)
    return self.linear(value) - target.detach() * 0.5


def functionally(self: Any, value: torch.Tensor) -> torch.Tensor:
    doubled = {name: parameter * 1.5 for name, parameter in self.linear.named_parameters()}
    return torch.func.functional_call(self.linear, doubled, (value,))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "feed forward": feed_forward,
    "norm alone": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: over_length(nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), nn.BatchNorm1d(WIDTH))),
    "convolution": lambda: over_length(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4)),
    "channels last": lambda: Layer(
        lambda self, value: self.conv(value.transpose(1, 2).unsqueeze(2)).squeeze(2).transpose(1, 2),
        conv=nn.Conv2d(WIDTH, WIDTH, (1, 3), padding=(0, 1)).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    ),
    "dropout": lambda: nn.Sequential(linear(), nn.Dropout(0.2)),
    "attention": lambda: Layer(
        lambda self, value: self.attention(value, value, value)[0],
        attention=nn.MultiheadAttention(WIDTH, 4, batch_first=True),
    ),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True),
    "lstm": lambda: Layer(lambda self, value: self.lstm(value)[0], lstm=nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "gru": lambda: Layer(
        lambda self, value: self.gru(value)[0],
        gru=nn.GRU(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True),
    ),
    "experts": lambda: Layer(
        choose_expert, router=nn.Linear(WIDTH, 4), experts=nn.ModuleList(linear() for _ in range(4))
    ),
    "by name": lambda: Layer(choose_by_name, ways=nn.ModuleDict({"up": linear(), "down": feed_forward()})),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(linear()),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(linear()),
    "own function": lambda: Layer(
        lambda self, value: Scaled.apply(value, self.weight, self.scale),
        weight=matrix(),
        scale=nn.Parameter(torch.tensor(0.7)),
    ),
    "odd shapes": lambda: Layer(
        lambda self, value: value * self.scale + self.one + self.odd.square().sum() * 1e-3,
        scale=nn.Parameter(torch.tensor(0.9)),
        one=nn.Parameter(torch.zeros(1)),
        odd=matrix(37, 53),
    ),
    "empty": lambda: Layer(lambda self, value: value + self.empty.sum(), empty=nn.Parameter(torch.empty(0, 5))),
    "strided": lambda: Layer(
        lambda self, value: value @ self.turned + self.cut[:, 0],
        turned=nn.Parameter((torch.randn(WIDTH, WIDTH) * 0.1).t()),
        cut=nn.Parameter(torch.randn(WIDTH, 4)[:, 1:3]),
    ),
    "views": lambda: Layer(by_views, both=matrix(2 * WIDTH, WIDTH), bias=matrix(2, WIDTH)),
    "children's weights": lambda: Layer(
        with_children_s_weights, one=linear(), other=linear(bias=False), scale=nn.Parameter(torch.ones(1))
    ),
    "lists of parameters": lambda: Layer(
        in_turn,
        weights=nn.ParameterList([matrix(), matrix()]),
        named=nn.ParameterDict({"bias0": matrix(WIDTH), "bias1": matrix(WIDTH)}),
    ),
    "buffers": lambda: Layer(count, linear=linear(), steps=torch.tensor(0), mean=torch.zeros(WIDTH)),
    "lazy": lazily,
    "frozen": lambda: frozen(feed_forward()),
    "partly frozen": lambda: nn.Sequential(frozen(linear()), linear()),
    "low rank": lambda: Layer(
        lambda self, value: self.base(value) + self.up(self.down(value)),
        base=frozen(linear()),
        down=nn.Linear(WIDTH, 4, bias=False),
        up=nn.Linear(4, WIDTH, bias=False),
    ),
    "unused": lambda: Layer(lambda self, value: self.linear(value), linear=linear(), other=linear()),
    "target": lambda: Layer(with_target, linear=linear()),
    "functional": lambda: Layer(functionally, linear=linear()),
    "activation": lambda: nn.PReLU(),
    "bilinear": lambda: Layer(
        lambda self, value: self.bilinear(value[..., :8], value[..., 8:16]), bilinear=nn.Bilinear(8, 8, WIDTH)
    ),
    "max norm": lambda: Layer(
        lambda self, value: self.table((value.detach()[..., 0] * 9).long().clamp(0, 9)),
        table=nn.Embedding(64, WIDTH, max_norm=1.0),
    ),
    "in double": lambda: Layer(
        lambda self, value: self.linear(value.to(self.linear.weight.dtype)).to(value.dtype),
        linear=linear(dtype=torch.double),
    ),
}

# --- wrappers ---------------------------------------------------------------------------------------------------------


def in_bf16(layer: nn.Module) -> nn.Module:
    return Layer(lambda self, value: self.layer(value.bfloat16()).to(value.dtype), layer=layer.bfloat16())


def in_tuple(layer: nn.Module) -> nn.Module:
    inner = Layer(lambda self, value: (None, {"hidden": [self.layer(value)]}, value.detach()), layer=layer)
    return Layer(lambda self, value: self.inner(value)[1]["hidden"][0], inner=inner)


def changed_in_place(layer: nn.Module) -> nn.Module:
    return Layer(lambda self, value: self.layer(value).mul_(0.5).add_(value), layer=layer)


def with_module_hooks(layer: nn.Module) -> nn.Module:
    layer.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 1.1,))
    layer.register_forward_hook(lambda module, arguments, output: output + 0.1)
    layer.register_full_backward_hook(
        lambda module, inputs, outputs: tuple(g if g is None else g * 0.9 for g in inputs)
    )
    layer.register_full_backward_pre_hook(lambda module, outputs: tuple(g * 0.8 for g in outputs))
    return layer


def with_parameter_hooks(layer: nn.Module) -> nn.Module:
    for parameter in (each for each in layer.parameters() if each.requires_grad):
        parameter.register_hook(lambda gradient: gradient * 0.5)
    return layer


def half_by_chance(layer: nn.Module) -> nn.Module:
    """Layerdrop."""
    return Layer(lambda self, value: self.layer(value) if torch.rand(()) < 0.6 else value, layer=layer)


def compiled(layer: nn.Module) -> nn.Module:
    layer.compile(backend="eager")
    return layer


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint": lambda layer: Layer(
        lambda self, value: checkpoint(self.layer, value, use_reentrant=False), layer=layer
    ),
    "reentrant": lambda layer: Layer(
        lambda self, value: checkpoint(self.layer, value, use_reentrant=True), layer=layer
    ),
    "in two": lambda layer: Layer(
        lambda self, value: checkpoint_sequential(self.layers, 2, value, use_reentrant=False),
        layers=nn.Sequential(linear(), nn.Tanh(), layer),
    ),
    "twice": lambda layer: Layer(lambda self, value: self.layer(self.layer(value) * 0.5), layer=layer),
    "bf16": in_bf16,
    "tuple": in_tuple,
    "in place": changed_in_place,
    "hooks": with_module_hooks,
    "parameter hooks": with_parameter_hooks,
    "dropped": half_by_chance,
    "compiled": compiled,
}


class Model(nn.Module):
    """A language model of layers.

    Args:
        names: of the layers; "again" is the layer before it, the same object.
        tied: the head uses the embedding's weight.
    """

    def __init__(self, names: Sequence[str], tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList()
        for name in names:
            self.layers.append(self.layers[-1] if name == "again" and len(self.layers) else make_layer(name))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(F.normalize(hidden, dim=-1) * self.scale)


def make_layer(name: str) -> nn.Module:
    *wrappers, kind = name.split("+")
    layer = LAYERS.get(kind, linear)()
    for wrapper in reversed(wrappers):
        layer = WRAPPERS[wrapper](layer)
    return layer

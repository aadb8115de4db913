"""The smallest budget that `swapper.load` names runs a forward, whatever the model's code takes of its modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e.architectures import MODELS, Size
from e2e.twins import named_budget
from torch import nn

import swapper
from swapper.modules.groups import taken_parameters


class WindowAttention(nn.Module):
    """As torchvision's Swin: takes its children's weights, and calls neither; a table of biases by relative position."""

    def __init__(self, dim: int, window: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.02)
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", (apart[..., 0] * (2 * window - 1) + apart[..., 1]).flatten())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, count, dim = x.shape
        bias = self.relative_position_bias_table[self.index].view(count, count, -1).permute(2, 0, 1)
        x = F.linear(torch.roll(x, 1, 1), self.qkv.weight, self.qkv.bias)
        query, key, value = x.view(batch, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = (query @ key.transpose(-1, -2) / 8 + bias).softmax(-1) @ value
        return F.linear(x.transpose(1, 2).reshape(batch, count, dim), self.proj.weight, self.proj.bias)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(dim), WindowAttention(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def swin(depths: tuple[int, ...], dim: int = 64) -> nn.Module:
    stages: list[nn.Module] = []
    for number, depth in enumerate(depths):
        stages.append(nn.Sequential(*(Block(dim << number) for _ in range(depth))))
        stages.append(nn.Linear(dim << number, dim << (number + 1), bias=False))
    return nn.Sequential(nn.Sequential(*stages), nn.LayerNorm(dim << len(depths)))


def patches(model: Any) -> torch.Tensor:
    return model(torch.randn(2, 16, 64)).sum()


def attention(model: Any) -> torch.Tensor:
    return model(torch.randn(2, 16, 256)).sum()


def swin_of_transformers() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    options = {"image_size": 128, "embed_dim": 32, "depths": [1, 1, 2, 1], "num_heads": [2, 2, 4, 4], "window_size": 4}
    return transformers.SwinModel(transformers.SwinConfig(**options))


def image(model: Any) -> torch.Tensor:
    return model(torch.randn(1, 3, 128, 128)).last_hidden_state.sum()


SIZE = Size(width=128)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.Tensor]]] = {
    **{name: (lambda make=make: make(SIZE), loss) for name, (make, loss) in MODELS.items()},
    "Swin": (lambda: swin((1, 1, 2, 1)), patches),
    "Swin, deeper": (lambda: swin((2, 2, 3)), patches),
    "Swin of transformers": (swin_of_transformers, image),
    "MultiheadAttention": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, batch_first=True), 3, enable_nested_tensor=False),
        attention,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_smallest_budget_runs_a_forward(tmp_path: Path, name: str) -> None:
    make, loss_of = CASES[name]
    torch.manual_seed(0)
    plain = make().eval()
    torch.save(plain.state_dict(), tmp_path / "model.pt")

    def empty() -> nn.Module:
        with swapper.without_weights():
            return make().eval()

    with pytest.raises(swapper.BudgetError) as refused:
        swapper.load(empty(), tmp_path / "model.pt", host_memory=1)
    model = swapper.load(empty(), tmp_path / "model.pt", host_memory=named_budget(refused.value))
    with swapper.loaded(model), torch.no_grad():
        for _ in range(2):
            torch.manual_seed(1)
            expected = loss_of(plain)
            torch.manual_seed(1)
            assert torch.equal(loss_of(model), expected)


class Scales:
    """A hook that is an object, and one that is a method."""

    def __call__(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * module.weight.norm()

    def before(self, module: Any, args: Any) -> Any:
        return tuple(x if x.dtype == torch.long else x * module.weight.norm() for x in args)


def of_child(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + module.head.weight.norm()


def looks_at_outputs(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


class Large(nn.Module):
    """Embedding and head are larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(2048, 128), nn.Linear(128, 128), nn.Linear(128, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.middle(self.embedding(x)))
        return found


def hooked(hook: str, model: nn.Module) -> nn.Module:
    for module in (model.embedding, model.head) if hook != "of a child" else (model,):
        assert isinstance(module, nn.Module)
        if hook == "before":
            module.register_forward_pre_hook(Scales().before)
        elif hook == "a method":
            module.register_forward_hook(Scales().__call__)
        elif hook == "an object":
            module.register_forward_hook(Scales())
        elif hook == "parameters":
            module.register_forward_hook(lambda module, args, output: output * next(module.parameters()).norm())
        else:
            module.register_forward_hook(of_child if hook == "of a child" else looks_at_outputs)
    return model


@pytest.mark.parametrize("hook", ["before", "a method", "an object", "parameters", "of a child", "of outputs"])
def test_the_smallest_budget_has_room_for_weights_that_hooks_use_as_a_whole(tmp_path: Path, hook: str) -> None:
    torch.manual_seed(0)
    plain = hooked(hook, Large()).requires_grad_(False)
    torch.save(plain.state_dict(), tmp_path / "model.pt")

    def empty() -> nn.Module:
        with swapper.without_weights():
            return Large()

    budgets = []
    for make in (lambda: hooked(hook, empty()), empty):
        with pytest.raises(swapper.BudgetError) as refused:
            swapper.load(make(), tmp_path / "model.pt", host_memory=1)
        budgets.append(named_budget(refused.value))
    assert (budgets[0] == budgets[1]) == (hook == "of outputs")
    model = swapper.load(hooked(hook, empty()), tmp_path / "model.pt", host_memory=budgets[0])
    with swapper.loaded(model), torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(torch.arange(6).view(1, 6)), plain(torch.arange(6).view(1, 6)))


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("budget", ["64MiB", None], ids=["all in memory", "smallest"])
def test_outputs_of_the_last_position_are_those_of_weights_without_gradients(
    tmp_path: Path, batch: int, budget: str | None
) -> None:
    """torch chooses a kernel for strided inputs by `requires_grad`, in fp32, also without gradients."""
    torch.manual_seed(0)
    plain = nn.Linear(256, 1024).requires_grad_(False)
    torch.save(plain.state_dict(), tmp_path / "model.pt")
    x = torch.randn(batch, 7, 256)[:, -1:, :]
    with swapper.without_weights():
        model = nn.Linear(256, 1024)
    if budget is None:
        with pytest.raises(swapper.BudgetError) as refused:
            swapper.load(model, tmp_path / "model.pt", host_memory=1)
    swapper.load(model, tmp_path / "model.pt", host_memory=budget or named_budget(refused.value))
    with swapper.loaded(model):
        assert torch.equal(model(x), plain(x))
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))


def test_what_a_module_takes_of_its_children_is_found_in_its_code() -> None:
    module = WindowAttention(64)
    expected = {id(p) for child in (module.qkv, module.proj) for p in child.parameters()}
    assert {id(p) for p in taken_parameters(module)} == expected
    heads = nn.MultiheadAttention(64, 4)
    assert {id(p) for p in taken_parameters(heads)} == {id(p) for p in heads.out_proj.parameters()}
    assert taken_parameters(nn.Sequential(nn.Linear(2, 2))) == taken_parameters(Block(64)) == []

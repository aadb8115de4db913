"""A replaced weight, bias, forward, class or hook of a module counts, before and after a load, as in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize

import swapper

ROWS, WIDTH, WIDE, NARROW = 2048, 256, 8192, 32
IDS = torch.tensor([[3, 1, 2047], [0, 3, 77]])
MODULES = {"table": (ROWS, WIDTH), "wide": (WIDE, WIDTH), "layer": (WIDTH, WIDTH), "small": (NARROW, WIDTH)}
"""By name, the shape of the weight: rows are looked up, a matrix is multiplied by parts, one streams, one stays."""
BUDGETS = {"by-parts": 6_000_000, "one-by-parts": 10_000_000, "streamed": 12_000_000, "in-memory": 64 << 20}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.wide = nn.Linear(WIDTH, WIDE)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.small = nn.Linear(WIDTH, NARROW)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.small(self.layer(F.gelu(self.wide(self.table(ids)))[..., -WIDTH:]))


class DoubledTable(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class DoubledMap(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight) * 2  # without the bias


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def values(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(5)) / 8, requires_grad=False)


def new_weight(model: nn.Module, name: str) -> None:
    model.get_submodule(name).weight = values(*MODULES[name])


def new_bias(model: nn.Module, name: str) -> None:
    model.get_submodule(name).bias = values(MODULES[name][0])


def new_data(model: nn.Module, name: str) -> None:
    model.get_submodule(name).weight.data = values(*MODULES[name]).data


def new_data_in_a_forward(model: nn.Module, name: str) -> None:
    def give(module: nn.Module, args: Any) -> None:
        module.weight.data = values(*MODULES[name]).data

    hook = model.get_submodule(name).register_forward_pre_hook(give)
    model(IDS)
    hook.remove()


def no_bias(model: nn.Module, name: str) -> None:
    model.get_submodule(name).bias = None


def assigned(model: nn.Module, name: str) -> None:
    model.load_state_dict({f"{name}.weight": values(*MODULES[name]).data}, strict=False, assign=True)


def of_instance(model: nn.Module, name: str) -> None:
    module = model.get_submodule(name)
    module.forward = MethodType(lambda self, x: type(self).forward(self, x) + 1, module)


def of_class(model: nn.Module, name: str) -> None:
    model.get_submodule(name).__class__ = DoubledTable if name == "table" else DoubledMap


def hooked(model: nn.Module, name: str) -> None:
    module = model.get_submodule(name)
    module.register_forward_pre_hook(lambda module, args: (args[0].flip(0),))
    module.register_forward_hook(lambda module, args, output: output + 1)


def parametrized(model: nn.Module, name: str) -> None:
    parametrize.register_parametrization(model.get_submodule(name), "weight", Twice())


def another_module(model: nn.Module, name: str) -> None:
    rows, columns = MODULES[name]
    new = nn.Embedding(rows, columns) if name == "table" else nn.Linear(columns, rows, bias=False)
    new.weight = values(rows, columns)
    setattr(model, name, new.eval())


def hand_made(model: nn.Module, name: str) -> None:
    """The weight is used by the functional form, with keywords, and a bias of one's own."""
    module = model.get_submodule(name)
    if name == "table":
        module.forward = lambda ids: F.embedding(input=ids, weight=module.weight, padding_idx=3)
    else:
        module.forward = lambda x: F.linear(input=x, weight=module.weight, bias=values(MODULES[name][0]))


CHANGES: list[Callable[[nn.Module, str], None]] = [
    new_weight, new_data, new_data_in_a_forward, new_bias, no_bias, assigned, of_instance, of_class, hooked, parametrized,
    another_module, hand_made,
]  # fmt: skip
WHOLE = {"after": [parametrized], "before": [parametrized, of_class]}
"""Changes after which a weight is used as a whole: not in every budget."""


def cases(when: str) -> list[Any]:
    return [
        pytest.param(change, name, budget, id=f"{change.__name__}-{name}-{budget}")
        for change in CHANGES
        for name in MODULES
        for budget in BUDGETS
        if not (name == "table" and change in (new_bias, no_bias))
        and not (change in WHOLE[when] and budget.endswith("by-parts"))
    ]


def made() -> nn.Module:
    torch.manual_seed(0)
    return Model().eval().requires_grad_(False)


def same(model: nn.Module, plain: nn.Module) -> bool:
    with torch.no_grad():
        return all(torch.equal(model(IDS), plain(IDS)) for _ in range(2))


def loaded(model: nn.Module, state: dict[str, torch.Tensor], directory: Any, budget: str) -> Any:
    torch.save(state, directory / "weights.pt")
    return swapper.loaded(swapper.load(model, directory / "weights.pt", host_memory=BUDGETS[budget]))


@pytest.mark.parametrize(("change", "name", "budget"), cases("after"))
def test_a_change_after_the_load_counts(tmp_path: Any, change: Any, name: str, budget: str) -> None:
    plain, model = made(), made()
    of_model = loaded(model, plain.state_dict(), tmp_path, budget)
    assert same(model, plain)
    change(plain, name)
    change(model, name)
    assert same(model, plain)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    of_model.unload()


@pytest.mark.parametrize(("change", "name", "budget"), cases("before"))
def test_a_change_before_the_load_counts_and_stays(tmp_path: Any, change: Any, name: str, budget: str) -> None:
    plain, model = made(), made()
    change(plain, name)
    change(model, name)
    of_model = loaded(model, plain.state_dict(), tmp_path, budget)
    assert same(model, plain)
    of_model.unload()
    for ours, theirs in zip(model.modules(), plain.modules(), strict=True):
        assert type(ours).__qualname__ == type(theirs).__qualname__
        assert ours.__dict__.keys() == theirs.__dict__.keys()  # a forward of the user's own is there


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", MODULES)
def test_functional_call_counts(tmp_path: Any, name: str, budget: str) -> None:
    plain, model = made(), made()
    of_model = loaded(model, plain.state_dict(), tmp_path, budget)
    others = {f"{name}.weight": values(*MODULES[name])}
    for _ in range(2):
        assert torch.equal(functional_call(model, others, (IDS,)), functional_call(plain, others, (IDS,)))
        assert same(model, plain)
    of_model.unload()


@pytest.mark.parametrize("budget", BUDGETS)
def test_keywords_and_errors_are_torchs(tmp_path: Any, budget: str) -> None:
    plain, model = made(), made()
    of_model = loaded(model, plain.state_dict(), tmp_path, budget)
    x = torch.randn(2, WIDTH)
    assert torch.equal(model.table(input=IDS), plain.table(input=IDS))
    assert torch.equal(model.table(IDS.int()), plain.table(IDS.int()))
    assert torch.equal(model.wide(input=x), plain.wide(input=x))
    for ids in (IDS.float(), IDS.bool(), IDS + ROWS, IDS - ROWS):
        with pytest.raises((RuntimeError, IndexError)) as wanted:
            plain.table(ids)
        with pytest.raises(wanted.type, match="index out of range" if wanted.type is IndexError else "Long, Int"):
            model.table(ids)
    assert same(model, plain)
    of_model.unload()


def test_methods_of_the_users_own_stay(tmp_path: Any) -> None:
    plain, model = made(), made()
    own = lambda mode=True: model.wide  # noqa: E731  # as latent diffusion freezes its parts
    model.wide.train = own
    of_model = loaded(model, plain.state_dict(), tmp_path, "by-parts")
    assert model.wide.train() is model.wide and not model.wide.training
    with pytest.raises(swapper.StateError, match="cannot be trained"):
        model.train()
    model.layer.train = own
    of_model.unload()
    assert model.wide.train is own and model.layer.train is own and "train" not in model.__dict__

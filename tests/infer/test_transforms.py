"""The transforms of torch.func over a loaded model: what plain torch gives, or a refusal; and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.twins import assert_same
from torch import nn
from torch.func import functional_call, functionalize, grad, hessian, jacrev, jvp, linearize, vjp, vmap

import swapper

WIDTH = 256


def rows(seed: int = 3) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def pushed_with(model: nn.Module) -> Any:
    """The parameters are others than the file's."""
    others = {name: torch.full(p.shape, 0.01) for name, p in model.named_parameters()}
    return jvp(lambda given: functional_call(model, given, (rows(),)), (others,), (others,))


EXACT: dict[str, Callable[[Any], Any]] = {
    "jvp": lambda m: jvp(m, (rows(),), (rows(4),)),
    "vmap": lambda m: vmap(m)(rows()),
    "functionalize": lambda m: functionalize(m)(rows()),
    "other-parameters": pushed_with,
    "a-weight-in-vmap": lambda m: vmap(lambda x: m[0].weight @ x)(rows()),
    "of-a-weight": lambda m: grad(lambda w: w.square().sum())(m[5].weight),
    "vmap-over-a-weight": lambda m: vmap(lambda w: w.sum())(m[0].weight),
    "past-the-guard": lambda m: torch.tensor(m[1].weight),
}

REFUSED: dict[str, Callable[[Any], Any]] = {
    "grad": lambda m: grad(lambda x: m(x).sum())(rows()),
    "vjp": lambda m: vjp(m, rows()),
    "jacrev": lambda m: jacrev(m)(rows()[0]),
    "hessian": lambda m: hessian(lambda x: m(x).sum())(rows()[0]),
    "linearize": lambda m: linearize(m, rows()),
}


def both(directory: Path, budget: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).eval().requires_grad_(False)
    torch.save(plain.state_dict(), directory / "weights.pt")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).eval()
    return plain, swapper.load(model, directory / "weights.pt", host_memory=budget)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("budget", ["1300KiB", "64MiB"])
@pytest.mark.parametrize("run", EXACT.values(), ids=EXACT)
def test_is_exact(tmp_path: Path, run: Callable[[Any], Any], budget: str) -> None:
    plain, model = both(tmp_path, budget)
    assert_same(run(model), run(plain))
    assert torch.equal(model(rows()), plain(rows()))


@pytest.mark.parametrize("run", REFUSED.values(), ids=REFUSED)
def test_is_refused_by_name(tmp_path: Path, run: Callable[[Any], Any]) -> None:
    plain, model = both(tmp_path, "1300KiB")
    with pytest.raises(swapper.StateError, match=r"loaded for inference|is being traced"):
        run(model)
    assert torch.equal(model(rows()), plain(rows()))

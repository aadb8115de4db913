"""Tied parameters, names that a file has several times, and buffers that others hold: values are those of load_state_dict."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import swapper
from swapper.formats.sources import open_source
from swapper.train.layout.given_values import FrozenFiles

WIDTH = 512  # a matrix of 1 MiB streams
BUDGETS = ["2400KiB", "64MiB"]
State = dict[str, torch.Tensor]


def values(state: State, seed: int = 1) -> State:
    """Return other values for all names, also for those of one tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=generator).to(t.dtype) for name, t in state.items()}


# --- ties -----------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One matrix under three names, one of them in a module that has two; and a vector under two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.first.weight
        self.again = self.other
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.bias = self.first.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.again(self.other(self.first(x))))


NAMES = ["first.weight", "other.weight", "again.weight"]
SUBSETS = [subset for size in (1, 2, 3) for subset in combinations(NAMES, size)]


def one_file(state: State, path: Path) -> Path:
    save_file(state, path / "model.safetensors")
    return path / "model.safetensors"


def torchs(state: State, path: Path) -> Path:
    swapper.checkpoint.save(state, path / "model.pt")  # the zip of torch.save
    return path / "model.pt"


def shards(state: State, path: Path) -> Path:
    """Write every name to two shards; the index names the first, whose values do not count."""
    save_file(values(state, 2), path / "model-1.safetensors")
    save_file(state, path / "model-2.safetensors")
    weight_map = dict.fromkeys(state, "model-1.safetensors") | {next(iter(state)): "model-2.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("write", [one_file, torchs, shards])
@pytest.mark.parametrize("names", SUBSETS, ids=lambda names: "+".join(names).replace(".weight", ""))
def test_the_last_of_a_tied_tensors_names_counts(
    tmp_path: Path, names: tuple[str, ...], write: Callable[[State, Path], Path], where: str, budget: str
) -> None:
    plain = Tied().eval().requires_grad_(False)
    state = {n: v for n, v in values(plain.state_dict()).items() if n not in NAMES or n in names}
    plain.load_state_dict(state, strict=False)
    with torch.device(where):
        model = Tied().eval()
    swapper.load(model, write(state, tmp_path), host_memory=budget)
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        assert all(torch.equal(model(x), plain(x)) for _ in range(2))
    assert model.first.weight is model.other.weight and model.first.bias is model.last.bias
    swapper.loaded(model).unload()


def test_frozen_parameters_that_are_read_in_place_follow_that_order(tmp_path: Path) -> None:
    model = Tied()
    source = open_source(torchs(values(model.state_dict()), tmp_path))
    found = FrozenFiles(source, None).find(model, dict(model.named_parameters()))
    assert found["first.weight"].name == "again.weight" and found["first.bias"].name == "last.bias"


def test_training_begins_with_the_last_and_buffers_stay_shared(tmp_path: Path) -> None:
    class Both(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(WIDTH))
            self.first.register_buffer("same", self.scale)

    plain = Both()
    state = values(plain.state_dict())
    state["first.same"] = state["scale"]
    plain.load_state_dict(state)
    with torch.device("meta"):
        model = Both()
    with swapper.SwapManager(tmp_path / "run", host_memory="64MiB") as manager:
        optimizer = torch.optim.AdamW(model.parameters())
        model, _ = manager.offload(model, optimizer, init=torchs(state, tmp_path))
        ours = model.state_dict()
        assert all(torch.equal(ours[name], value) for name, value in plain.state_dict().items())
        assert model.scale is model.first.same


def test_each_of_the_names_must_fit(tmp_path: Path) -> None:
    state = {**Tied().state_dict(), "first.weight": torch.zeros(3, 3)}
    with pytest.raises(swapper.CheckpointError, match=r"first\.weight has the shape"):
        swapper.load(Tied(), torchs(state, tmp_path), host_memory="64MiB")


@pytest.mark.parametrize("budget", BUDGETS)
def test_parameters_with_the_same_memory_are_tied(tmp_path: Path, budget: str) -> None:
    def made() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).eval().requires_grad_(False)
        model[2].weight = nn.Parameter(model[0].weight.data, requires_grad=False)
        return model

    plain, model = made(), made()
    state = values(plain.state_dict())
    plain.load_state_dict(state)
    swapper.load(model, torchs(state, tmp_path), host_memory=budget)
    x = torch.randn(2, WIDTH)
    assert torch.equal(model(x), plain(x))
    swapper.loaded(model).unload()


# --- buffers --------------------------------------------------------------------------------------------------------------


class Holds(nn.Module):
    """Others hold its buffers: as attributes, in a list, as views, as a buffer that is in no checkpoint, in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("first_half", self.scale[: WIDTH // 2])
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("row", torch.ones(1).expand(WIDTH))
        self.register_buffer("unsaved", self.scale, persistent=False)
        self.layer.register_buffer("same", self.scale)
        self.held: Any = [self.scale, {"count": self.count}, (self.scale[3:7],)]
        self.view = self.scale.view(2, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.held[0] + self.held[1]["count"] + self.held[2][0].sum()
        x = self.layer(x) * self.scale + self.layer.same + self.unsaved * self.view.flatten() + held + self.row
        self.scale.mul_(1.5)  # each of its holders sees it
        return x[:, : WIDTH // 2] * self.first_half


def outputs(model: nn.Module) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, WIDTH)[None]
    with torch.no_grad():
        return [model(x) for _ in range(2)]


def same(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


@pytest.mark.parametrize("saved", [torch.float32, torch.float64])
@pytest.mark.parametrize("budget", BUDGETS)
def test_whatever_holds_a_buffer_has_its_values(tmp_path: Path, budget: str, saved: torch.dtype) -> None:
    plain, model = Holds().eval(), Holds().eval()
    state = values(plain.state_dict())
    state["row"] = torch.ones(WIDTH)  # torch does not write to it
    del plain.row
    plain.load_state_dict({name: value for name, value in state.items() if name != "row"})
    plain.row = state["row"].to(saved)
    in_file = {name: value.to(saved) if name == "row" else value for name, value in state.items()}
    swapper.load(model, torchs(in_file, tmp_path), host_memory=budget)
    assert same(outputs(model), outputs(plain))
    assert model.row.dtype == saved
    swapper.loaded(model).unload()
    assert model.held[0] is model.scale is model.layer.same and torch.equal(model.view.flatten(), plain.scale)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("unsaved", self.scale, persistent=False)
        self.layer.register_buffer("same", self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x) * self.scale + self.layer.same * self.unsaved
        self.scale.mul_(1.5)
        return x


@pytest.mark.parametrize("names", [("scale",), ("layer.same",), ("scale", "layer.same")])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_shared_buffer_stays_one(tmp_path: Path, where: str, names: tuple[str, ...]) -> None:
    plain = Shared().eval().requires_grad_(False)
    state = {
        n: v for n, v in values(plain.state_dict()).items() if n in names or n.startswith("layer.w") or "bias" in n
    }
    plain.load_state_dict(state, strict=False)
    with torch.device("meta" if where == "meta" else "cpu"):
        model = Shared().eval()
    swapper.load(model, torchs(state, tmp_path), host_memory="64MiB")
    assert same(outputs(model), outputs(plain))
    swapper.loaded(model).unload()
    assert model.scale is model.layer.same is model.unsaved and torch.equal(model.scale, plain.scale)


def attribute(model: nn.Module) -> None:
    model[1].tensor = model[0].weight.T


def in_a_list(model: nn.Module) -> None:
    model[1].tensors = {"rows": [model[0].weight.data[1]]}


def as_a_buffer(model: nn.Module) -> None:
    model[1].register_buffer("first", model[0].weight.detach()[:1], persistent=False)


def of_all(model: nn.Module) -> None:
    model.flat = torch.cat([p.data.flatten() for p in model.parameters()])
    at = 0
    for p in model.parameters():
        p.data = model.flat[at : at + p.numel()].view(p.shape)
        at += p.numel()


@pytest.mark.parametrize("hold", [attribute, in_a_list, as_a_buffer, of_all])
def test_what_shares_a_parameters_memory_is_refused_by_name(tmp_path: Path, hold: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).eval()
    source = torchs(model.state_dict(), tmp_path)
    hold(model)
    with pytest.raises(swapper.UnsupportedError, match=r"(1\.tensor|1\.tensors|1\.first|flat) shares the memory"):
        swapper.load(model, source, host_memory="64MiB")


def of_one_tensor(first: slice, second: slice, transposed: bool = False) -> nn.Sequential:
    """Two maps whose weights are rows of one tensor."""
    rows = torch.randn(96, 64)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for layer, part in zip(model, (first, second), strict=True):
        layer.weight.data = rows[part]
    if transposed:
        model[1].weight.data = rows[second].t()
    return model


@pytest.mark.parametrize(
    "model",
    [
        of_one_tensor(slice(64), slice(32, 96)),
        of_one_tensor(slice(64), slice(8, 16)),
        of_one_tensor(slice(64), slice(64), transposed=True),
    ],
)
def test_parameters_that_share_some_elements_are_refused(tmp_path: Path, model: nn.Sequential) -> None:
    """torch's load_state_dict gives the shared ones the last values for both."""
    torch.save({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "weights.pt")
    with pytest.raises(swapper.UnsupportedError, match=r"0\.weight and 1\.weight share memory.*clone"):
        swapper.load(model, tmp_path / "weights.pt", host_memory="4MiB")


def test_parameters_beside_each_other_in_one_tensor_are_loaded(tmp_path: Path) -> None:
    model = of_one_tensor(slice(64), slice(64, 96))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save(expected, tmp_path / "weights.pt")
    swapper.load(model, tmp_path / "weights.pt", host_memory="4MiB")
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    swapper.loaded(model).unload()

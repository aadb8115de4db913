"""Aliases of parameters and gradients, and `p.data = x`: as in plain torch, or refused by name; never another value.

The programs are in alias_programs.py. `python -m e2e.alias_programs 200 1` (in tests/) runs 200 random ones, from seed 1.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import PLACES, skip_on_device, without_device
from torch import nn

import swapper
from e2e import alias_programs as programs
from e2e.alias_programs import (
    ALIASES,
    GRADIENTS,
    OTHER_MEMORY,
    PARAMETERS,
    SIZES,
    WIDTH,
    Run,
    Scale,
    backward,
    make_model,
)  # fmt: skip
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]
CASES = [
    *itertools.product(GRADIENTS, ALIASES),
    *itertools.product(PARAMETERS, [alias for alias in ALIASES if alias != "itself"]),
    *itertools.product(OTHER_MEMORY, ["data"]),
]
WAYS = list(itertools.product(["step", "deferred", "backward"], ["host", "nvme"], SIZES))


@pytest.mark.parametrize(("program", "alias"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_program_with_aliases_is_followed_or_refused(twins: MakeTwins, program: Any, alias: str) -> None:
    if not programs.may_alias(alias):
        skip_on_device("memory of a device has no arrays")
    for update, gradients, size in random.Random(f"{program.__name__} {alias}").sample(WAYS, k=2):
        pair = twins(make_model(), update=update, gradients=gradients, room_bytes=1 << 19)
        programs.check(pair, program, alias, size, programs.may_refuse(program, alias, update, gradients, size))


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("seed", range(3))
def test_random_programs_with_aliases_are_followed_or_refused(tmp_path: Path, seed: int) -> None:
    programs.run_random(tmp_path, seed)


@pytest.mark.parametrize("update", ["step", "deferred"])
def test_an_assigned_parameter_is_in_every_state_dict_snapshot_and_master(twins: MakeTwins, update: str) -> None:
    pair = twins(make_model().bfloat16(), master=True, update=update, room_bytes=1 << 19)

    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        gather = pair.manager.gather if model is pair.swapped else programs.no_gather
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(4, WIDTH, dtype=torch.bfloat16)).square().mean()
            loss.backward()
            optimizer.step()
            with gather(model, write=True):
                for parameter in model.parameters():
                    parameter.data = parameter.data * 0.5
            if model is pair.plain:  # masters follow a gather
                for parameter, master in zip(optimizer.parameters, optimizer.masters, strict=True):
                    master.data.copy_(parameter.data)
            found += [loss.detach(), *(value.clone() for value in model.state_dict().values())]
        return found

    pair.both(run)
    path = pair.directory.parent / "snapshot.pt"
    pair.manager.snapshot(path).wait()
    for name, value in torch.load(path, weights_only=True)["model"].items():
        assert torch.equal(value, pair.plain.state_dict()[name]), name
    pair.both(run)
    pair.finish(paged=False)


def test_an_assigned_parameter_in_memory_is_in_the_snapshot(twins: MakeTwins) -> None:
    pair = twins(make_model(), params="host")
    backward(pair.swapped)
    pair.optimizer.step()
    for parameter in pair.swapped.parameters():
        parameter.data = torch.full(parameter.shape, 0.25)
    path = pair.directory.parent / "snapshot.pt"
    pair.manager.snapshot(path).wait()
    assert all((value == 0.25).all() for value in torch.load(path, weights_only=True)["model"].values())
    pair.close()


def test_assigning_in_a_gather_for_reading_is_refused(twins: MakeTwins) -> None:
    pair = twins(make_model(), room_bytes=1 << 19)
    weight = pair.swapped[2].weight
    with pytest.raises(swapper.StateError, match=r"2\.weight was changed inside gather\(write=False\)"):
        with pair.manager.gather(weight):
            weight.data = torch.ones(WIDTH, WIDTH)
    with pair.manager.gather(weight):  # once told, it is over
        assert (weight == 1).all()
    pair.close()


# --- arrays ---------------------------------------------------------------------------------------------------------------


@without_device("memory of a device has no arrays")
@pytest.mark.parametrize("size", SIZES)
def test_arrays_are_read_as_in_plain_torch(twins: MakeTwins, size: str) -> None:
    pair = twins(make_model(), room_bytes=1 << 19)
    at, name = SIZES[size]
    ours, theirs = (model[at].get_parameter(name) for model in (pair.swapped, pair.plain))
    for read in (
        lambda p: p.data.numpy(),
        lambda p: p.detach().numpy(),
        lambda p: p.data.cpu().numpy(),
        lambda p: p.detach().cpu().numpy(),
        lambda p: np.asarray(p.data),
        lambda p: p.data[0].numpy(),
    ):
        assert np.array_equal(read(ours), read(theirs))
    if size == "large":
        with pytest.raises(ValueError, match="read-only"):
            ours.data.numpy()[0] = 1
    pair.close()


# --- what shares a parameter's memory at `offload` ------------------------------------------------------------------------


class Shared(nn.Module):
    """Keeps views of its parameter in attributes, and uses them."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(numel, WIDTH) * 0.1 + 1)
        self.first = self.scale.data[0]
        self.parts = {"rows": [self.scale.data[1:], self.scale.detach().view(-1)]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale[0] + self.first + self.parts["rows"][0].mean()


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("rows", [2, WIDTH])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_attributes_that_are_views_of_a_parameter_follow_it(
    twins: MakeTwins, update: str, rows: int, place: Callable[[], dict[str, Any]]
) -> None:
    model = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), Scale())), Shared(rows))
    pair = twins(model, update=update, room_bytes=1 << 20, wait=True, **place())
    for shared in (pair.plain[-1], pair.swapped[-1]):  # deepcopy has copied what they share
        shared.first = shared.scale.data[0]
        shared.parts = {"rows": [shared.scale.data[1:], shared.scale.detach().view(-1)]}
    pair.offload()

    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        optimizer.zero_grad()
        loss = backward(model)
        optimizer.step()
        found = [loss, model[-1].first.clone(), model[-1].parts["rows"][1].clone()]
        model[-1].first.mul_(0.9)
        return found

    pair.train(run, steps=3)
    pair.finish(paged=False)


def test_what_else_shares_a_parameters_memory_is_refused_by_name(tmp_path: Path) -> None:
    def with_buffer(model: nn.Module) -> None:
        model[1].register_buffer("mean", model[1].scale.data[:7])

    def with_flat(model: nn.Module) -> torch.Tensor:
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(flat, model.parameters())
        return flat

    def with_flat_attribute(model: nn.Module) -> None:
        model.flat = with_flat(model)

    def with_bits(model: nn.Module) -> None:
        model[1].bits = model[1].scale.data.view(torch.int32)

    for make, pattern in (
        (with_buffer, r"buffer 1\.mean shares the memory of parameter 1\.scale"),
        (with_flat, r"parameters 0\.weight and 0\.bias are parts of one tensor that something outside of the model"),
        (with_flat_attribute, r"attribute flat \(torch.float32 .*shares memory with parameter"),
        (with_bits, r"attribute 1\.bits \(torch.int32 \[160\]\) shares memory with parameter 1\.scale"),
    ):
        model = make_model()
        kept = make(model)
        with swapper.SwapManager(tmp_path, host_memory="64MiB", resume="discard") as manager:
            with pytest.raises(swapper.UnsupportedError, match=pattern):
                manager.offload(model, torch.optim.AdamW(model.parameters()))
        del kept


def test_what_keeps_the_values_of_before_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    kept = model[1].scale.data
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        manager.offload(model, torch.optim.AdamW(model.parameters()))
    assert "something outside of the model refers to the memory of 1.scale" in caplog.text
    assert kept.shape == (WIDTH,)


# --- parameters that move ---------------------------------------------------------------------------------------------------


def trained_in_part(twins: MakeTwins, **options: Any) -> Twins:
    """A run whose first two layers are frozen."""
    model = make_model()
    model[:2].requires_grad_(False)
    pair = twins(model, room_bytes=1 << 19, **options)
    pair.both(step)
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    return pair


def step(model: Any, optimizer: Any) -> torch.Tensor:
    return Run(model, optimizer, programs.no_gather, 3, "scale", ALIASES["data"]).step()


def train_more(pair: Twins) -> None:
    for model, optimizer in ((pair.plain, pair.plain_optimizer), (pair.swapped, pair.optimizer)):
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters())})


def park(pair: Twins) -> None:
    assert pair.manager is not None
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    with pair.manager.parked():
        pass


@without_device("an alias of what a device needs has no memory to be cut off: see the next test")
@pytest.mark.parametrize("move", [train_more, park])
@pytest.mark.parametrize("params", ["nvme", "host"])
def test_no_alias_of_a_parameter_is_cut_off_where_it_moves(twins: MakeTwins, move: Any, params: str) -> None:
    pair = trained_in_part(twins, params=params)
    for alias in ("data", "detach", "view", "numpy"):
        kept = ALIASES[alias](pair.swapped[3].scale)
        with pytest.raises(swapper.StateError, match=r"3\.scale.*clone"):
            (pair.optimizer.add_param_group if move is train_more else lambda _: park(pair))(
                {"params": list(pair.swapped[0].parameters())}
            )
        del kept
    move(pair)
    for _ in range(2):
        pair.both(step)
    pair.finish(paged=False)


@pytest.mark.parametrize("move", [train_more, park])
@pytest.mark.parametrize(
    "place, size", [("in host memory", "large"), ("on a device", "large"), ("on a device", "small")]
)
def test_a_view_of_a_parameter_that_has_moved_raises(twins: MakeTwins, move: Any, place: str, size: str) -> None:
    """Its memory is gone: an access would end the process."""
    pair = trained_in_part(twins, **PLACES[place]())
    at, name = SIZES[size]
    view = pair.swapped[at].get_parameter(name).data
    move(pair)
    uses: list[Callable[[Any], Any]] = [
        *(torch.detach, torch.t, torch.clone, np.asarray, torch.Tensor.numpy),
        *(lambda view: view.data, lambda view: view[0], lambda view: view.view(-1)),
    ]
    for use in uses:
        with pytest.raises((swapper.StateError, swapper.ColdParameterError)):
            torch.as_tensor(use(view)).clone()

"""A parameter has a storage of its own, as in plain torch: what counts from its beginning counts from the parameter's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from torch import nn

import swapper
from e2e.models import finish_step
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]
WIDTH = 160


class Strided(nn.Module):
    """Uses its weight by ways that count from the beginning of its storage."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        storage = weight.untyped_storage()
        self.seen = (weight.storage_offset(), self.bias.storage_offset(), storage.nbytes())
        corner = weight.as_strided((WIDTH, WIDTH), (1, WIDTH), 0)  # its transpose
        shifted = torch.as_strided(weight, (WIDTH, 7), (WIDTH, 1), 9)
        with pytest.raises(RuntimeError, match="out of bounds"):
            weight.as_strided((WIDTH,), (1,), WIDTH * WIDTH)
        raw = torch.empty(0).set_(storage, 3, (5,), (1,)).detach()
        return x @ weight + x @ corner + self.bias + (x @ shifted).sum() + raw.sum()


def step(model: Any, optimizer: Any) -> torch.Tensor:
    return finish_step(model(torch.randn(4, WIDTH)).square().mean(), optimizer)


@devices.without_device("parameters of a group are parts of one storage of the device")
@pytest.mark.parametrize("update", ["step", "backward", "deferred"])
def test_in_a_forward(twins: MakeTwins, update: str) -> None:
    pair = twins(nn.Sequential(*(Strided() for _ in range(12))), update=update)
    pair.train(step, steps=3)
    assert [m.seen for m in pair.swapped] == [m.seen for m in pair.plain] == [(0, 0, 4 * WIDTH * WIDTH)] * 12
    pair.finish()


def test_of_a_model_that_was_loaded(tmp_path: Path) -> None:
    plain = nn.Sequential(*(Strided() for _ in range(12)))
    torch.save(plain.state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        empty = nn.Sequential(*(Strided() for _ in range(12)))
    inputs = torch.randn(4, WIDTH)
    loaded = swapper.load(empty, tmp_path / "model.pt", host_memory="64MiB")
    with torch.no_grad():
        assert torch.equal(loaded(inputs), plain(inputs))
        assert [m.seen for m in loaded] == [m.seen for m in plain]
    swapper.loaded(loaded).unload()


PLACES: dict[str, Callable[[], dict[str, Any]]] = {
    "in host memory": dict,
    "on a device": lambda: {"device": devices.device_of_tests(), "device_memory": 1 << 20},  # not all of them
}


@pytest.mark.whole
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("when", ["pre-hook", "between"])
@pytest.mark.parametrize("form", ["same", "other"])
def test_a_parameter_that_is_set_to_other_memory_gets_its_values_or_is_named(
    twins: MakeTwins, when: str, form: str, place: str
) -> None:
    pair = twins(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12))), **PLACES[place]())

    def run(model: Any, _: Any) -> list[torch.Tensor]:
        @torch.no_grad()
        def exchange(*_: Any) -> None:
            values = torch.ones(WIDTH, WIDTH) if form == "same" else torch.ones(1, WIDTH).expand(WIDTH, WIDTH).double()
            model[3].weight.set_(values)

        if when == "pre-hook":
            model[3].register_forward_pre_hook(exchange)
        else:
            exchange()
        model(torch.randn(4, WIDTH)).sum().backward()
        return [model(torch.randn(4, WIDTH)).detach() for _ in range(2)]

    if form == "same":
        pair.both(run)
    else:
        with pytest.raises((RuntimeError, swapper.SwapperError)):
            run(pair.swapped, None)
    with contextlib.suppress(swapper.StateError):
        pair.close()


@pytest.mark.parametrize("place", PLACES)
def test_one_that_is_set_to_other_memory_while_it_is_gathered_for_reading_is_in_the_next_step(
    twins: MakeTwins, place: str
) -> None:
    pair = twins(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12))), **PLACES[place]())
    for number in (0, 5, 11):

        @torch.no_grad()
        def exchange(model: Any, _: Any, number: int = number) -> None:
            model[number].weight.set_(torch.ones(WIDTH, WIDTH) / WIDTH)

        pair.both(exchange)
        with contextlib.suppress(swapper.StateError):  # in host memory it is refused, and is there all the same
            with pair.manager.gather(pair.swapped[number].weight):
                pass
    pair.train(step, steps=2)
    pair.finish(paged=False)

"""Graphs over graphs: their nodes read parameters that no module has leased, wherever those are at that moment.

[Note: deferred writes] (paging/frames.py) is why deferred updates meet this most: what is owed is written when a backward brings
it back, so that frames of parameters are promised to other pages while the graph over the graph is still to come.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any
from unittest import mock

import devices
import pytest
import torch
from torch import nn

from e2e.models import LAYER_WIDTH, layers
from e2e.twins import Twins
from swapper import _C

pytestmark = devices.without_device("a device refuses a backward with create_graph=True outside of manager.gather")
MakeTwins = Callable[..., Twins]
WIDTH = 640
PLACES = [{"params": "host"}, {"params": "nvme"}, {"params": "nvme", "gradients": "nvme"}]


class HeldWrites:
    """The engine of a run. From `hold` to `end_all_held` writes to some places do not end, nor what waits for them.

    It ends them by itself when the pager waits for a read that comes after one of them.
    """

    def __init__(self, directories: Any, **options: Any) -> None:
        self._options = options
        self._engine = _C.Engine(**options)
        self._late: _C.Engine | None = None
        self._held: Collection[int] = ()
        self._tickets: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def hold(self, places: Collection[int]) -> None:
        """Hold writes to `places`, offsets in files."""
        self._held = places
        gate, self._other_end = os.pipe()
        self._late = _C.Engine(chaos={"until": gate}, **self._options)
        os.close(gate)

    def write(self, file: Any, offset: int, *arguments: Any, **options: Any) -> Any:
        if self._late is None or offset not in self._held:
            return self._engine.write(file, offset, *arguments, **options)
        self._tickets.append(self._late.write(file, offset, *arguments, **options))
        return self._tickets[-1]

    def read(self, file: Any, offset: int, *arguments: Any, after: Any = None, **options: Any) -> Any:
        read = self._engine.read(file, offset, *arguments, after=after, **options)
        if self._depends(after):
            self._tickets.append(read)
        return read

    def _depends(self, ticket: Any) -> bool:
        return any(ticket is held for held in self._tickets)

    def before_wait(self, ticket: Any) -> None:
        if self._depends(ticket):
            self.end_all_held()

    def end_all_held(self) -> None:
        """Everything that is under way ends. Nobody is told."""
        if self._late is not None:
            os.close(self._other_end)
            self._late.close()
            self._late = None
            self._engine.drain()
        self._tickets.clear()


@pytest.mark.parametrize("by", ["input", "parameters"])
def test_a_graph_over_a_graph_finds_parameters_whose_frames_are_promised(twins: MakeTwins, by: str) -> None:
    engines: list[HeldWrites] = []

    def open_engine(directories: Any, **options: Any) -> HeldWrites:
        engines.append(HeldWrites(directories, **options))
        return engines[-1]

    model = nn.Sequential(*(part for _ in range(5) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    with mock.patch("swapper.modules.resources.open_engine", open_engine):
        pair = twins(model, update="deferred", room_bytes=1 << 20)
    assert pair.manager is not None
    pager, engine = pair.manager.current.run.pager, engines[-1]
    pager._write_back._enough = 0  # however fast the drive is
    first = [page for page in pager._pages if page.section.plan.family == "param" and page.section.plan.group < 2]
    wait_for_read = pager._wait_for_read

    def let_go_and_wait(page: Any, ticket: Any) -> None:
        engine.before_wait(ticket)
        wait_for_read(page, ticket)

    pager._wait_for_read = let_go_and_wait
    promised = []

    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        swapped = model is pair.swapped
        value = torch.randn(8, WIDTH, requires_grad=True)
        result = model(value)
        if swapped:
            engine.hold([page.file_offset for page in first])
        of = [value] if by == "input" else list(model.parameters())
        gradients = torch.autograd.grad(result.sum(), of, create_graph=True)
        if swapped:
            promised.append(any(page.next_owner is not None for page in first))
            engine.end_all_held()
        loss = result.square().mean() + sum(gradient.square().sum() for gradient in gradients)
        loss.backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), *(gradient.detach() for gradient in gradients), *found]

    while not any(promised) and len(promised) < 20:
        pair.train(run, steps=1)
    assert any(promised)
    pair.train(run, steps=1)
    pair.finish()


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("places", PLACES, ids=lambda places: "-".join(places.values()))
def test_a_penalty_on_gradients_that_parameters_have_is_bit_equal(
    twins: MakeTwins, places: dict[str, str], update: str, accumulates: bool
) -> None:
    """`backward(create_graph=True)` leaves gradients with a graph; one is there already where a backward came before."""
    pair = twins(layers(), update=update, room_bytes=1 << 20, **places)
    assert pair.manager is not None

    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        value = torch.randn(4, LAYER_WIDTH)
        with pair.manager.accumulate() if model is pair.swapped else nullcontext():
            if accumulates:
                model(value).square().mean().backward()
            model(value).tanh().mean().backward(create_graph=True)
        gradients = [parameter.grad for parameter in model.parameters()]
        optimizer.zero_grad()
        loss = model(value).square().mean() + sum(gradient.square().sum() for gradient in gradients)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), *(gradient.detach() for gradient in gradients)]

    pair.train(run, steps=3)
    pair.finish(paged=places["params"] == "nvme")

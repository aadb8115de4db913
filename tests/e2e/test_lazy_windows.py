"""Pages that only the device uses are not mapped into their windows, whose addresses give their bytes all the same.

[Note: lazy windows], swapper/paging/frames.py. The simulation of the pager (tests/sim) has the rules; this counts, on real memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from e2e.device_twins import MIB, MakeTwins, on_device
from e2e.models import Net, train_step
from e2e.twins import Twins
from swapper.paging.residency import Residency
from swapper.paging.section import NO_FRAME, Page

__all__ = ["on_device"]

IN_MEMORY = (Residency.CLEAN, Residency.DIRTY, Residency.WRITING)


class CountingWindow:
    """A window, and the offsets that are mapped in it."""

    def __init__(self, window: Any) -> None:
        self._window = window
        self.mapped: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._window, name)

    def map(self, offset: int, *others: Any) -> Any:
        self.mapped[offset] += 1
        return self._window.map(offset, *others)


def all_pages(pair: Twins) -> list[Page]:
    assert pair.manager is not None
    run = pair.manager.current.run
    return [page for section in (*run.sections, *run._grad_sections) for page in section.pages]


def mapped_in_a_step(pair: Twins, steps: int = 3) -> Iterator[tuple[Page, float]]:
    """Yield each page, and how often it is mapped in a step."""
    sections = dict.fromkeys(page.section for page in all_pages(pair))
    for section in sections:
        section.window = CountingWindow(section.window)
    pair.train(train_step, steps=steps)
    for section in sections:
        counting: Any = section.window
        section.window = counting._window
        for page in section.pages:
            yield page, counting.mapped[page.offset] / steps


def twins_on(on_device: MakeTwins, update_on: str, **options: Any) -> Twins:
    given = {"device_memory": 4 * MIB, "update_on": update_on, "budget": 11 * MIB, "gradients": "nvme", **options}
    return on_device(Net(depth=10).bfloat16(), master=True, **given)


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_pages_that_only_the_device_uses_are_not_mapped(on_device: MakeTwins, update: str) -> None:
    pair = twins_on(on_device, "device", update=update)
    pair.train(train_step, steps=2)
    with_counters = {
        page
        for page in all_pages(pair)
        for slot in page.section.plan.slots
        if slot.spec.kind == "step" and slot.offset < page.offset + page.nbytes and slot.end > page.offset
    }
    found = list(mapped_in_a_step(pair))
    assert with_counters and len(with_counters) < len(found) / 2
    assert {page for page, times in found if times} <= with_counters
    pair.finish(paged=False)


def test_for_an_update_on_the_cpu_parameters_are_mapped_for_that_and_not_for_copies(on_device: MakeTwins) -> None:
    pair = twins_on(on_device, "cpu")
    pair.train(train_step, steps=2)
    found = list(mapped_in_a_step(pair))
    params = [times for page, times in found if page.section.plan.family == "param"]
    assert params and max(params) <= 2  # shown, and then to be written to
    assert all(times for page, times in found if page.section.plan.family == "state")
    pair.finish(paged=False)


@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_addresses_of_pages_that_are_not_mapped_give_their_bytes(on_device: MakeTwins, update_on: str) -> None:
    pair = twins_on(on_device, update_on)
    for _ in range(3):
        pair.train(train_step, steps=1)
        run = pair.manager.current.run
        run.pager.flush()
        hidden = [page for page in all_pages(pair) if page.residency in IN_MEMORY and not page.shown]
        assert {page.section.plan.family for page in hidden} >= {"param"}
        for page in hidden:
            frame = run._resources.host_side.of(page)
            assert torch.equal(page.section.memory[page.offset : page.offset + page.nbytes], frame)
        assert not any(page.shown for page in hidden)  # it was answered, page by page, and nothing was mapped
    pair.finish(paged=False)


def test_what_is_written_past_the_guard_where_nothing_is_mapped_reaches_the_device(on_device: MakeTwins) -> None:
    pair = twins_on(on_device, "device")
    run = pair.manager.current.run
    for image in run.placed.processor._images:
        image.stays = False  # one that stays is updated on the device
    pair.train(train_step, steps=2)
    name, plain = "head.weight", pair.plain.head.weight
    place = run.placed.places[name, "param"]
    pages = place.section.pages_of(place.slot.offset, place.slot.end)
    assert any(page.frame is not NO_FRAME and not page.shown for page in pages)
    with torch.no_grad():
        place.section.tensor(place.slot).mul_(2)
        plain.mul_(2)
        with pair.manager.gather(pair.swapped.head):
            assert torch.equal(pair.swapped.head.weight, plain)
    pair.close()

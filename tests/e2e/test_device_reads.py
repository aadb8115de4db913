"""A step with a device reads from the drive, and sends to the device, what was planned, whenever groups are updated.

Copies go on during updates, and who comes first is another in each step. The pager is to read nothing twice for that. The drive is
one that is done with everything at once: so what is counted does not depend on how fast it is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from e2e.device_twins import MIB, MakeTwins, on_device
from e2e.models import Net, train_step
from e2e.twins import Twins

__all__ = ["on_device"]


class PromptDrive:
    """A store whose transfers are done when they are asked for."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, *arguments: Any, **options: Any) -> Any:
        ticket = self._store.read(*arguments, **options)
        ticket.wait()
        return ticket

    def write(self, *arguments: Any) -> Any:
        ticket = self._store.write(*arguments)
        ticket.wait()
        return ticket


def bytes_of_steps(pair: Twins, steps: int) -> Counter[str]:
    """Return what a step reads and sends up, on average."""
    counters = pair.manager.counters

    def moved() -> Counter[str]:
        return Counter({"read": sum(counters.read_bytes.values()), "sent": counters.uploaded_bytes})

    before = moved()
    pair.train(train_step, steps=steps)
    return Counter({name: nbytes // steps for name, nbytes in (moved() - before).items()})


@pytest.mark.parametrize("update_on, device_memory", [("cpu", MIB), ("device", 4 * MIB)])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_a_step_reads_what_was_planned_and_sends_nothing_twice(
    on_device: MakeTwins, update: str, update_on: str, device_memory: int
) -> None:
    model = Net(depth=10).bfloat16()
    options = {"update": update, "update_on": update_on, "device_memory": device_memory}
    pair = on_device(model, order="by chance 1", master=True, budget=11 * MIB, **options)
    run = pair.manager.current.run
    run.pager._frames._store = PromptDrive(run.pager._frames._store)
    pair.train(train_step, steps=3)  # and what is expected has settled
    moved = bytes_of_steps(pair, steps=4)
    assert moved["read"] <= 1.02 * run.plan.traffic.total_read_bytes
    if update_on == "cpu":  # else slices go there too
        resident_set, groups = run.plan.on_device.resident_set, run.plan.inventory.groups
        uses = [(1 if group.index in resident_set else 2, p.nbytes) for group in groups for _, p in group.parameters]
        assert moved["sent"] <= sum(count * nbytes for count, nbytes in uses)
    pair.finish(paged=False)

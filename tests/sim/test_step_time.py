"""Steps of the product's own code on a device with virtual time, of the sizes and rates of a Llama of 1.24 G on an H200.

What such a device measured is in docs/decisions/a-step-on-a-device.md, next to what this gave for the code of that time:
within 5 %. So these figures say what an order of calls costs, and not only that it is an order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sim.timed_device import run_steps

BACKWARD: dict[str, Any] = {"update": "backward"}
LITTLE_MEMORY: dict[str, Any] = {"bytes_an_element": 5.5}
"""For parameters, gradients and slices of updates, and not for state that goes up early."""
CODED: dict[str, Any] = {"state_codec": "8bit"}
CLIPPED: dict[str, Any] = {"clips": True, "bytes_an_element": 9}
"""For a third of the state."""
CODED_AND_CLIPPED: dict[str, Any] = {**CODED, "clips": True, "bytes_an_element": 7}


@pytest.mark.parametrize(
    "batches, options, most",
    [
        (4, {}, 1.01),
        (4, LITTLE_MEMORY, 1.14),
        (4, {"update": "deferred"}, 1.01),
        (4, BACKWARD, 1.01),
        (1, BACKWARD, 1.03),
        (4, {**CODED, **BACKWARD}, 1.01),
        (1, {**CODED, **BACKWARD}, 1.01),
        (4, CLIPPED, 1.07),
        (1, CLIPPED, 1.26),
        (4, CODED_AND_CLIPPED, 1.02),
        (1, CODED_AND_CLIPPED, 1.06),
        (4, {**LITTLE_MEMORY, **BACKWARD}, 1.05),
        (4, {"optimizer_state": "device"}, 1.001),
    ],
    ids=lambda value: "-".join(map(str, value.values())) or "step" if isinstance(value, dict) else None,
)
def test_a_step_takes_at_most_so_many_times_as_long_as_plain_torchs(
    tmp_path: Path, batches: int, options: dict[str, Any], most: float
) -> None:
    plain = run_steps(tmp_path, batches, plain=True)
    assert run_steps(tmp_path, batches, **options).seconds <= most * plain.seconds


@pytest.mark.parametrize("update", ["backward", "deferred"])
def test_the_host_waits_for_nothing_where_state_is_in_host_memory(tmp_path: Path, update: str) -> None:
    step = run_steps(tmp_path, 4, update=update)
    assert step.waits == 0
    numel = 1.236e9
    assert step.up_bytes == pytest.approx(12 * numel, rel=0.01), "state, and no parameters"
    assert step.down_bytes == pytest.approx(12 * numel, rel=0.01)


def test_nothing_of_what_stays_on_the_device_is_copied(tmp_path: Path) -> None:
    step = run_steps(tmp_path, 4, optimizer_state="device")
    assert step.waits == 0 and step.up_bytes == 0
    assert step.down_bytes < 1e6  # step counters

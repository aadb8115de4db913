"""The pager keeps its promises in every order of events that a seed can bring.

A failing seed is its own reproduction: `pytest tests/sim -k "wander and 17-"`. More seeds: SWAPPER_SIM_SEEDS=5000.
"""

from __future__ import annotations

import os

import pytest
from programs import train, wander

SEEDS = range(int(os.environ.get("SWAPPER_SIM_SEEDS", "60")))


@pytest.mark.parametrize("threads", [False, True], ids=["one thread", "threads"])
@pytest.mark.parametrize("fault_rate", [0.0, 0.05], ids=["sound drive", "failing drive"])
@pytest.mark.parametrize("program", [train, wander])
@pytest.mark.parametrize("seed", SEEDS)
def test_frames_leases_and_contents_hold_in_every_order_of_events(program, fault_rate, threads, seed):
    program(seed, fault_rate, threads)


@pytest.mark.parametrize("program", [train, wander])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_written_past_the_guard_is_kept_on_a_failing_drive(program, seed):
    program(seed, 0.05, threads=seed % 2 == 1, stray_rate=0.4)

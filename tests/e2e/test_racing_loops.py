"""Loops on a drive that is late or early, in a short form. The long one: tools/test_crashes."""

from __future__ import annotations

from pathlib import Path

import devices
import pytest

from e2e.racing_loops import CELLS, draw_loop, loop_of_cell

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True"),
    pytest.mark.usefixtures("twins"),  # of which these are some
]


@pytest.mark.parametrize("seed", range(12))
def test_a_loop_that_is_drawn_is_bit_equal(tmp_path: Path, seed: int) -> None:
    draw_loop(seed).train(tmp_path)


@pytest.mark.parametrize(("update", "graph", "retains", "checkpointing"), CELLS)
def test_passes_are_bit_equal(
    tmp_path: Path, update: str, graph: bool, retains: bool, checkpointing: bool | None
) -> None:
    if graph:
        devices.skip_on_device("a graph over a graph is refused there outside of gather: test_device_double_backward")
    loop_of_cell(0, update, graph, retains, checkpointing).train(tmp_path)

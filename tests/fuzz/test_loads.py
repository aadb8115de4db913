"""The fuzzer of loaded models in a short form. The long form: tools/fuzz loads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuzz import cases
from fuzz.cases import Kind
from fuzz.loads import CALLS, LOADS, PLAIN, Loads

pytestmark = pytest.mark.usefixtures("prepared")
PROGRAM = {"seed": 1, **PLAIN, "layers": ["linear", "lazy", "gru"], "calls": [["forward", 1], ["read all", 2]]}


def test_some_programs_give_what_a_model_in_memory_gives(run_some: Callable[[Kind, int], None]) -> None:
    run_some(LOADS, 6)


def test_the_smallest_budget_is_named_once() -> None:
    """Whose bytes all weights fit, but not the pages that they are in."""
    program = {**PROGRAM, "layers": ["experts"], "tied": True, "room": 0, "calls": [["forward", 1]]}
    assert cases.watched(LOADS, program) is None


def change_a_weight(loads: Loads) -> None:
    """Of the model in memory, which what was loaded must not be like any more."""
    with torch.no_grad():
        loads.plain.layers[0].weight.mul_(2)


BAD: dict[str, tuple[str, Callable[[Loads], object]]] = {
    "other weights": ("state_dict has other values", change_a_weight),
    "an error of Python's": ("KeyError", lambda loads: {}["key"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_the_fuzzer_notices(kind: str, check_noticed: Callable[..., None]) -> None:
    check_noticed(LOADS, PROGRAM, CALLS, "read all", *BAD[kind])

"""Every tensor that swapper makes names its device: torch's default device is the user's, and may be "meta"."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch.utils._device

SOURCES = sorted((Path(__file__).parents[2] / "swapper").rglob("*.py"))
FACTORIES = {factory.__name__ for factory in torch.utils._device._device_constructors()}


def unnamed(source: str) -> list[int]:
    """Return the lines of calls of torch's factories without `device=`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if _is_factory(call.func) and not any(k.arg in ("device", None) for k in call.keywords)
    ]


def _is_factory(function: ast.expr) -> bool:
    is_of_torch = (
        isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "torch"
    )
    return is_of_torch and function.attr in FACTORIES


def test_calls_without_a_device_are_found():
    assert unnamed(
        "torch.empty(2)\ntorch.zeros(2, device=d)\ntorch.full((), 1, **options)\nother.empty(2)\ntorch.tensor(1)"
    ) == [1, 5]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_allocation_names_its_device(path):
    assert unnamed(path.read_text()) == []

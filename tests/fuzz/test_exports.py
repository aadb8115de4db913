"""The fuzzer of exports in a short form. The long form: tools/fuzz exports."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fuzz.cases import Kind
from fuzz.exports import EXPORTS, PLAIN, STEPS, Checkpoint

pytestmark = pytest.mark.usefixtures("prepared")
TENSORS = [["weight", "float32", "row", "plain", False], ["a.bias", "bfloat16", "matrix", "every second", False]]
PROGRAM = {"seed": 1, **PLAIN, "key": "model", "tensors": TENSORS, "steps": [["list", 1], ["load", 2], ["export", 3]]}


def test_some_programs_keep_every_bit(run_some: Callable[[Kind, int], None]) -> None:
    run_some(EXPORTS, 25)


BAD: dict[str, tuple[str, Callable[[Checkpoint], object]]] = {
    "other values": ("'weight' is another one", lambda checkpoint: checkpoint.tensors["weight"].add_(1)),
    "one tensor more": ("{'weight'} more", lambda checkpoint: checkpoint.tensors.pop("weight")),
    "an error of Python's": ("KeyError", lambda checkpoint: {}["key"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_the_fuzzer_notices(kind: str, check_noticed: Callable[..., None]) -> None:
    check_noticed(EXPORTS, PROGRAM, STEPS, "export", *BAD[kind])

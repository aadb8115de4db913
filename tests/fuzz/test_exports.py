"""The fuzzer of exports in a short form. The long form: tools/fuzz exports."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from fuzz import cases
from fuzz.exports import EXPORTS, PLAIN, STEPS, Checkpoint

pytestmark = pytest.mark.usefixtures("prepared")
TENSORS = [["weight", "float32", "row", "plain", False], ["a.bias", "bfloat16", "matrix", "every second", False]]
PROGRAM = {"seed": 1, **PLAIN, "key": "model", "tensors": TENSORS, "steps": [["list", 1], ["load", 2], ["export", 3]]}


def test_some_programs_keep_every_bit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cases", "25", "--minutes", "2", "--seed", os.environ["SWAPPER_TEST_SEED"]]
    result, said = cases.run(EXPORTS, arguments), capsys.readouterr().out
    assert result == 0, said
    assert "'clean'" in said, said


BAD: dict[str, tuple[str, Callable[[Checkpoint], object]]] = {
    "other values": ("'weight' is another one", lambda checkpoint: checkpoint.tensors["weight"].add_(1)),
    "one tensor more": ("{'weight'} more", lambda checkpoint: checkpoint.tensors.pop("weight")),
    "an error of Python's": ("KeyError", lambda checkpoint: {}["key"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_the_fuzzer_notices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, act = BAD[kind]
    to_format = STEPS["export"]

    def act_and_export(checkpoint: Checkpoint, chance: random.Random) -> None:
        act(checkpoint)
        to_format(checkpoint, chance)

    assert cases.watched(EXPORTS, PROGRAM) is None
    monkeypatch.setitem(STEPS, "export", act_and_export)
    problem = cases.watched(EXPORTS, PROGRAM)
    assert problem is not None and said in problem, problem
    program, _ = cases.reduced(EXPORTS, PROGRAM, problem)
    assert len(program["steps"]) < len(PROGRAM["steps"])

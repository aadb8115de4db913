"""The fuzzer of KVCache in a short form. The long form: tools/fuzz caches."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from fuzz import cases
from fuzz.caches import CACHES, CALLS, PLAIN, Pair, Reading

pytestmark = pytest.mark.usefixtures("prepared")
PROGRAM = {"seed": 1, **PLAIN, "calls": [["forward", 1], ["read", 2], ["save", 3]]}


def test_some_programs_give_what_a_cache_in_memory_gives(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cases", "6", "--minutes", "2", "--seed", os.environ["SWAPPER_TEST_SEED"]]
    result, said = cases.run(CACHES, arguments), capsys.readouterr().out
    assert result == 0, said
    assert "'clean'" in said, said


BAD: dict[str, tuple[str, Callable[[Reading, Pair], object]]] = {
    "other keys": ("other values", lambda reading, pair: pair.paged.layers[0].keys.mul_(2)),
    "fewer tokens": ("AssertionError", lambda reading, pair: pair.paged.crop(-1)),
    "a file": ("left behind", lambda reading, pair: (reading.scratch / "file").touch()),
}


@pytest.mark.parametrize("kind", BAD)
def test_the_fuzzer_notices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, act = BAD[kind]
    read = CALLS["read"]

    def act_and_read(reading: Reading, pair: Pair, chance: random.Random) -> None:
        act(reading, pair)
        read(reading, pair, chance)

    assert cases.watched(CACHES, PROGRAM) is None
    monkeypatch.setitem(CALLS, "read", act_and_read)
    problem = cases.watched(CACHES, PROGRAM)
    assert problem is not None and said in problem, problem
    program, _ = cases.reduced(CACHES, PROGRAM, problem)
    assert len(program["calls"]) < len(PROGRAM["calls"])

"""The fuzzer of KVCache in a short form. The long form: tools/fuzz caches."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fuzz.caches import CACHES, CALLS, PLAIN, Pair, Reading
from fuzz.cases import Kind

pytestmark = pytest.mark.usefixtures("prepared")
PROGRAM = {"seed": 1, **PLAIN, "calls": [["forward", 1], ["read", 2], ["save", 3]]}


def test_some_programs_give_what_a_cache_in_memory_gives(run_some: Callable[[Kind, int], None]) -> None:
    run_some(CACHES, 6)


BAD: dict[str, tuple[str, Callable[[Reading, Pair], object]]] = {
    "other keys": ("other values", lambda reading, pair: pair.paged.layers[0].keys.mul_(2)),
    "fewer tokens": ("AssertionError", lambda reading, pair: pair.paged.crop(-1)),
    "a file": ("left behind", lambda reading, pair: (reading.scratch / "file").touch()),
}


@pytest.mark.parametrize("kind", BAD)
def test_the_fuzzer_notices(kind: str, check_noticed: Callable[..., None]) -> None:
    check_noticed(CACHES, PROGRAM, CALLS, "read", *BAD[kind])

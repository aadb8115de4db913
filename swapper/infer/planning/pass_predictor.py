"""Which groups the next passes are expected to use, from those that came before. Pure.

A model's pass is expected to be like its last one. Of models that share memory the one that came after this one before is expected
to come after it again, and so on round: two that take turns are read ahead of theirs.
"""

from __future__ import annotations

from collections.abc import Collection

from swapper.paging.planning.schedule import Access


class PassPredictor:
    """Args:
    whole: names of the units that are models; "" for the only one. Passes of others, parts of models, count if they come twice.
    """

    def __init__(self, whole: Collection[str]) -> None:
        self._whole = frozenset(whole)
        self._orders: dict[str, list[int]] = {}  # of the last pass of each
        self._after: dict[str, str] = {}
        self._last = ""
        self._last_order: list[int] = []

    def note(self, name: str, order: list[int]) -> list[int] | None:
        """A pass of `name` is over that used groups in `order`. Returns what is expected now; None: as before."""
        is_again = order == self._last_order
        self._last_order = order
        if name not in self._whole:
            return order if is_again else None
        self._orders[name] = order
        if self._last in self._orders:
            self._after[self._last] = name
        self._last = name
        expected: list[int] = []
        seen: set[str] = set()
        following = self._after.get(name, name)
        while following not in seen and following in self._orders:
            seen.add(following)
            expected += self._orders[following]
            following = self._after.get(following, following)
        return expected


def is_cyclic(cycle: list[Access], other: list[Access]) -> bool:
    """Whether both are one cycle, begun at another of its models."""
    if len(cycle) != len(other) or not cycle:
        return cycle == other
    return any(cycle == other[i:] + other[:i] for i in range(len(other)) if other[i] == cycle[0])

"""Spare memory as the pager sees it: room by chance, and taken back by chance."""

from __future__ import annotations

from random import Random

from simulated_engine import Arena

from swapper.paging.section import Page


class VictimCache:
    """Spare memory as the pager sees it: room by chance, and taken back by chance."""

    def __init__(self, arena: Arena, random: Random) -> None:
        self._arena = arena
        self._random = random
        self._kept: dict[int, bytes] = {}
        self.generosity = random.choice([0.0, 0.5, 1.0])
        self.loads = 0

    def keep(self, page: Page, address: int) -> bool:
        if page.section.transient or self._random.random() >= self.generosity:
            return False
        self._kept[page.index] = bytes(self._arena.at(address, page.nbytes))
        return True

    def load(self, page: Page, address: int) -> None:
        self._arena.at(address, page.nbytes)[:] = self._kept.pop(page.index)
        self.loads += 1

    def place_of(self, page: Page) -> tuple[object, int]:
        return self, page.index

    def at(self, index: int, nbytes: int) -> bytes:
        return self._kept[index]

    def content(self, page: Page) -> bytes | None:
        return self._kept.get(page.index)

    def choose(self) -> list[int]:
        """Returns pages whose memory is wanted back."""
        return [index for index in self._kept if self._random.random() < 0.3]

    def take_back(self, dropped: list[int]) -> None:
        """What was kept of these pages is gone."""
        for index in dropped:
            self._kept.pop(index, None)

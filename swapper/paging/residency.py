"""The states of a page and the moves between them. Any other move is a bug and raises at once.

The storages of saved activations (train/activations) make the same moves.
"""

from __future__ import annotations

from enum import Enum, auto

from swapper.errors import InvariantError


class Residency(Enum):
    """The state of one page, or of one saved storage."""

    COLD = auto()
    """Only in the store; no frame."""
    READING = auto()
    """Has a frame whose content is being read (or, for fresh data, is about to be made)."""
    CLEAN = auto()
    """In a frame, equal to the store."""
    DIRTY = auto()
    """In a frame, newer than the store."""
    WRITING = auto()
    """In a frame, being written to the store; readable meanwhile, not writable."""

    __hash__ = object.__hash__  # faster than an Enum's own, which is Python: each move looks two up


COLD, READING, CLEAN, DIRTY, WRITING = Residency
"""Names that take a tenth of the time of Residency.COLD in Python 3.11; the pager looks at some 25 states a page and step."""

LEGAL_MOVES: frozenset[tuple[Residency, Residency]] = frozenset(
    {
        (COLD, READING),  # a frame is claimed
        (READING, CLEAN),  # the read arrived
        (READING, DIRTY),  # claimed for fresh data, which is now being made
        (READING, COLD),  # the read failed, or the claim was given up
        (CLEAN, COLD),  # evicted
        (CLEAN, DIRTY),  # changed
        (DIRTY, WRITING),  # written back
        (WRITING, CLEAN),  # the write arrived
        (WRITING, DIRTY),  # the write failed
        (CLEAN, WRITING),  # consolidated for a snapshot
        (DIRTY, COLD),  # discarded: a step rolled back
    }
)


class Resident:
    """A page or storage with a `residency`, which only `move` changes."""

    __slots__ = ("residency",)

    def __init__(self, residency: Residency) -> None:
        self.residency = residency

    def move(self, new: Residency) -> None:
        if (self.residency, new) not in LEGAL_MOVES:
            raise InvariantError(f"{self}: {self.residency.name} -> {new.name} is not a legal move")
        self.residency = new

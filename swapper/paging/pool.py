"""The pool: page-sized slots of page-locked memory. It hands frames out and takes them back, no more.

Their memory is taken at start; or, where the first use is not to wait for all of it, while the first of them are in use already.
"""

from __future__ import annotations

from typing import Protocol

from swapper.errors import InvariantError


class Growth(Protocol):
    """What a pool needs of an arena (`swapper._C.Arena`) of which the system gives one part after the other."""

    @property
    def populated_bytes(self) -> int: ...
    def wait_populated(self, nbytes: int, /) -> None: ...


class Pool:
    """Owns the frames of one stretch of the arena.

    Args:
        base_address: address of the arena's first byte.
        arena_offset: where in the arena the frames begin, in bytes.
        frame_bytes: size of a frame.
        frame_count: how many there are.
        growth: the arena, if frames may be handed out only once it has their memory.
    """

    def __init__(
        self,
        base_address: int,
        arena_offset: int,
        frame_bytes: int,
        frame_count: int,
        growth: Growth | None = None,
    ) -> None:
        self._arena_offset = arena_offset
        self.frame_bytes = frame_bytes
        self.frame_count = frame_count
        self._free: list[int] = []
        self._is_free = [True] * frame_count
        self._missing = list(range(frame_count - 1, -1, -1))  # without memory yet; the next one last
        self._growth = growth
        self._first_address = base_address + arena_offset
        self._grow()

    @property
    def free_count(self) -> int:
        """Frames that nobody has, those without memory too."""
        return len(self._free) + len(self._missing)

    @property
    def is_growing(self) -> bool:
        """Some frames have no memory yet."""
        return bool(self._missing)

    def has_free(self) -> bool:
        """Whether `take` gives a frame now."""
        if self._missing:
            self._grow()
        return bool(self._free)

    def wait_for_growth(self) -> None:
        """Wait until one more frame has memory.

        Raises:
            IoError: the system refuses it.
        """
        if self._growth is not None and self._missing:
            self._growth.wait_populated(self.offset(self._missing[-1] + 1))

    def _grow(self) -> None:
        """Take note of the memory that has come."""
        populated_bytes = None if self._growth is None else self._growth.populated_bytes
        while self._missing and (populated_bytes is None or self.offset(self._missing[-1] + 1) <= populated_bytes):
            self._free.append(self._missing.pop())
        if self._growth is None:
            self._free.reverse()

    def take(self) -> int | None:
        """Return a free frame, or None."""
        if not self.has_free():
            return None
        frame = self._free.pop()
        self._is_free[frame] = False
        return frame

    def give(self, frame: int) -> None:
        if self._is_free[frame]:
            raise InvariantError(f"frame {frame} was given back twice")
        self._is_free[frame] = True
        self._free.append(frame)

    def offset(self, frame: int) -> int:
        """Where in the arena the frame begins, in bytes."""
        return self._arena_offset + frame * self.frame_bytes

    def address(self, frame: int) -> int:
        return self._first_address + frame * self.frame_bytes

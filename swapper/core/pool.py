"""The pool: page-sized slots of page-locked memory, all taken at start. It hands frames out and takes them back, no more."""

from __future__ import annotations

from swapper.errors import InvariantError


class Pool:
    """Owns the frames of one stretch of the arena.

    Args:
        base_address: address of the arena's first byte.
        arena_offset: where in the arena the frames begin, in bytes.
        frame_bytes: size of a frame.
        frame_count: how many there are.
    """

    def __init__(self, base_address: int, arena_offset: int, frame_bytes: int, frame_count: int) -> None:
        self._base_address = base_address
        self._arena_offset = arena_offset
        self.frame_bytes = frame_bytes
        self.frame_count = frame_count
        self._free = list(range(frame_count - 1, -1, -1))
        self._is_free = [True] * frame_count

    @property
    def free_count(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """Return a free frame, or None."""
        if not self._free:
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
        return self._base_address + self.offset(frame)

"""Host memory of a run: arenas, the part of each section, and the pool of page-sized, page-locked frames."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swapper import _C
from swapper.errors import InvariantError
from swapper.io.tensor_bytes import SECTOR_BYTES, round_up
from swapper.paging.layout import resident_bytes
from swapper.paging.section import Frame, NoWindow, Section
from swapper.tensors.torch_private import count_uses


@dataclass(frozen=True, slots=True)
class MappedFrame:
    """A frame that a window shows: bytes [arena_offset, arena_offset + nbytes) of the arena."""

    window: weakref.ref[Any]
    window_offset: int
    arena_offset: int
    nbytes: int


class HostMemory:
    """Owns the arenas of one run. After `close` what tensors still show is ordinary memory.

    Args:
        node: the NUMA node that they are taken from first; None: as the system decides.
    """

    def __init__(self, node: int | None = None) -> None:
        self._node = node
        self._arenas: list[_C.Arena] = []
        self._views: list[weakref.ref[_C.View]] = []  # of resident sections: each dies with the last tensor on it

    def attach(
        self,
        sections: Sequence[Section],
        pool_bytes: int,
        head_bytes: int | None = None,
        windows: bool = True,
        filled_once: bool = False,
    ) -> tuple[_C.Arena, int]:
        """Make an arena of the resident sections and then a pool, and a window for each other section.

        Args:
            pool_bytes: of the pool.
            head_bytes: of the pool, populated now; a thread populates the rest. None: all of it now.
            windows: False: paged sections get no windows; their frames are copied elsewhere.
            filled_once: each frame gets one page, which stays.

        Returns:
            The arena, and the offset of the pool in it in bytes.
        """
        kept_bytes = resident_bytes([section.plan.nbytes for section in sections if section.resident])
        nbytes = max(kept_bytes + pool_bytes, SECTOR_BYTES)
        first_bytes = None if head_bytes is None else kept_bytes + head_bytes
        arena = _C.Arena(nbytes, head_bytes=first_bytes, filled_once=filled_once, node=self._node)
        self._arenas.append(arena)
        cursor = 0
        for section in sections:
            nbytes = section.plan.nbytes
            if section.resident:
                view = arena.view(cursor, nbytes)
                section.attach(torch.frombuffer(view, dtype=torch.uint8), None, view)
                self._views.append(weakref.ref(view))
                cursor += round_up(nbytes, SECTOR_BYTES)
            elif not windows:
                section.attach(torch.empty(0, dtype=torch.uint8, device="cpu"), NoWindow())
            else:
                _attach_window(section, arena)
        arena.prefault_rest()  # last: windows would wait for the process's map of addresses, which it keeps busy
        return arena, kept_bytes

    def attach_windows(self, sections: Sequence[Section]) -> None:
        """Give more paged sections windows on the first arena, which has the pool."""
        for section in sections:
            _attach_window(section, self._arenas[0])

    def take(self, nbytes: int) -> tuple[_C.Arena, torch.Tensor]:
        """Return memory for transfers, an arena of its own: that, and uint8 of shape (nbytes,)."""
        arena = _C.Arena(nbytes, node=self._node)
        self._arenas.append(arena)
        view = arena.view(0, nbytes)
        self._views.append(weakref.ref(view))
        return arena, torch.frombuffer(view, dtype=torch.uint8)

    def describe(self) -> str:
        """Return "page-locked", or why it is not; and the node, if one was asked for."""
        granted = all(arena.node == self._node for arena in self._arenas)
        where = (
            "" if self._node is None else f", on node {self._node}" if granted else f", node {self._node} was refused"
        )
        for arena in self._arenas:
            if not arena.locked:
                return f"not page-locked ({arena.lock_reason}){where}"
        return f"page-locked{where}"

    def close(self, kept: Sequence[MappedFrame] = ()) -> None:
        """Give the memory back to the system. Transfers are over, and only `kept` windows are still read.

        Live tensors of resident sections, and `kept`, keep their addresses and bytes.

        Raises:
            IoError: the system has no memory for those. Then all memory stays until its last tensor is gone.
        """
        arenas, views = list(self._arenas), [view for ref in self._views if (view := ref()) is not None]
        self._arenas.clear()
        self._views.clear()
        for view in views:
            view.copy_out()
        for piece in kept:
            if (window := piece.window()) is not None:
                window.copy_out(piece.window_offset, piece.arena_offset, piece.nbytes)
        del views
        for arena in arenas:
            arena.retire()


def _attach_window(section: Section, arena: _C.Arena) -> None:
    nbytes = section.plan.nbytes
    window = arena.window(nbytes)
    memory = torch.frombuffer(window, dtype=torch.uint8)[:nbytes]
    section.attach(memory, window, uses=count_uses(memory))


class Pool:
    """Owns the free frames of one range of the arena: hands them out and takes them back.

    Args:
        base_address: address of the arena's first byte.
        arena_offset: of the first frame in the arena, in bytes.
        growth: the arena, if frames are handed out only once they are populated; None: all are.
        view: of the whole arena, if pages are used in their frames. [Note: lazy windows], frames.py
    """

    def __init__(
        self,
        base_address: int,
        arena_offset: int,
        frame_bytes: int,
        frame_count: int,
        growth: _C.Arena | None = None,
        view: _C.View | None = None,
    ) -> None:
        self._arena_offset = arena_offset
        self.frame_bytes = frame_bytes
        self.frame_count = frame_count
        self.view = view
        self._free: list[int] = []
        self._is_free = [True] * frame_count
        self._missing = list(range(frame_count - 1, -1, -1))  # not populated yet; the next one last
        self._growth = growth
        self._base_address = base_address
        self._grow()

    @property
    def free_count(self) -> int:
        """Frames that are not taken, populated or not."""
        return len(self._free) + len(self._missing)

    @property
    def is_growing(self) -> bool:
        """Whether some frames are not populated yet."""
        return bool(self._missing)

    def has_free(self) -> bool:
        """Return whether `take` gives a frame now."""
        if self._missing:
            self._grow()
        return bool(self._free)

    def wait_for_growth(self) -> None:
        """Wait until one more frame is populated. Raises IoError: the system has no memory for it."""
        if self._growth is not None and self._missing:
            self._growth.wait_populated(self._offset(self._missing[-1] + 1))

    def _grow(self) -> None:
        """Note the frames that were populated since."""
        populated_bytes = None if self._growth is None else self._growth.populated_bytes
        while self._missing and (populated_bytes is None or self._offset(self._missing[-1] + 1) <= populated_bytes):
            self._free.append(self._missing.pop())
        if self._growth is None:
            self._free.reverse()

    def take(self) -> Frame:
        if not self.has_free():
            raise InvariantError("no frame is free")
        number = self._free.pop()
        self._is_free[number] = False
        return Frame(number, self._offset(number), self._base_address + self._offset(number))

    def give(self, frame: Frame) -> None:
        if self._is_free[frame.number]:
            raise InvariantError(f"frame {frame.number} was given back twice")
        self._is_free[frame.number] = True
        self._free.append(frame.number)

    def zero(self, frame: Frame, nbytes: int) -> None:
        """Set the first `nbytes` bytes of the frame to zero."""
        ctypes.memset(frame.address, 0, nbytes)

    def _offset(self, number: int) -> int:
        return self._arena_offset + number * self.frame_bytes

"""Host memory: the arenas, and which part of them each section has."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swapper import _C
from swapper.io.alignment import SECTOR_BYTES, round_up
from swapper.paging.planning.budget import resident_bytes
from swapper.paging.section import NoWindow, Section


@dataclass(frozen=True, slots=True)
class Mapped:
    """A frame that a window shows: bytes [arena_offset, arena_offset + nbytes) of the arena."""

    window: weakref.ref[Any]
    window_offset: int
    arena_offset: int
    nbytes: int


class HostMemory:
    """Owns the arenas of one run. `close` gives all of it back; what tensors still show is ordinary memory from then on."""

    def __init__(self) -> None:
        self._arenas: list[_C.Arena] = []
        self._views: list[weakref.ref[_C.View]] = []  # of resident sections: each goes with the last tensor of its own

    def attach(
        self,
        sections: Sequence[Section],
        pool_bytes: int,
        head_bytes: int | None = None,
        windows: bool = True,
        filled_once: bool = False,
    ) -> tuple[_C.Arena, int]:
        """Make an arena: resident sections one after the other, then a pool. The other sections get a window each.

        Without `windows` they get none: what is in their frames goes on to somewhere else. Of the pool `head_bytes` are
        taken from the system now, and the rest by a thread from now on; None: all of it now. `filled_once`: each frame gets
        one page, which stays.

        Returns the arena and where in it the pool begins.
        """
        kept_bytes = resident_bytes([section.plan.nbytes for section in sections if section.resident])
        nbytes = max(kept_bytes + pool_bytes, SECTOR_BYTES)
        first_bytes = None if head_bytes is None else kept_bytes + head_bytes
        arena = _C.Arena(nbytes, head_bytes=first_bytes, filled_once=filled_once)
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
                section.attach(torch.empty(0, dtype=torch.uint8), NoWindow())
            else:
                window = arena.window(nbytes)
                section.attach(torch.frombuffer(window, dtype=torch.uint8)[:nbytes], window)
        arena.prefault_rest()  # last: windows would wait for the process's map of addresses, which it keeps busy
        return arena, kept_bytes

    def take(self, nbytes: int) -> torch.Tensor:
        """Return memory of its own, which is good for transfers: uint8 of shape (nbytes,)."""
        arena = _C.Arena(nbytes)
        self._arenas.append(arena)
        view = arena.view(0, nbytes)
        self._views.append(weakref.ref(view))
        return torch.frombuffer(view, dtype=torch.uint8)

    def describe(self) -> str:
        """Return "page-locked", or why it is not."""
        for arena in self._arenas:
            if not arena.locked:
                return f"not page-locked ({arena.lock_reason})"
        return "page-locked"

    def close(self, kept: Sequence[Mapped] = ()) -> None:
        """Give the memory back. Sections have none any more, transfers are over, and nobody reads through windows but `kept`.

        Tensors of resident sections that somebody still has, and `kept`, keep their addresses and bytes.

        Raises:
            IoError: the system has no memory for those. Then everything stays where it is, for as long as somebody has it.
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

"""Makes the tensors of `state_dict()`, model's and optimizer's, without memory: mapped from swap files, or aliases.

They show the state at the call. Later steps write to the mapped files, so before the state changes next they *expire*:
from then on an operation on their data raises an error instead of showing a mix of two steps. Code that bypasses that
check (`torch.tensor(t)`, torch's C++) finds the new values, as a plain state_dict, which aliases, would show them.
Until then they can be read, copied, and saved by torch.save, which writes plain tensors. Writing to them would change
nothing, and is refused. The result of clone(), `.to()`, numpy() or deepcopy has its own memory and stays.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from swapper.checkpoint.mapped_files import (
    BOTH,
    PRIVATE,
    FileMapping,
    FilePart,
    WatchedMemory,
    check_parts,
    guard_saves,
)
from swapper.errors import InvariantError, IoError, StateError
from swapper.io.tensor_bytes import SECTOR_BYTES
from swapper.paging.pager import Pager
from swapper.paging.section import EXTERNAL, Page
from swapper.runtime.process import after_fork_in_child, naming_limits
from swapper.tensors.guarded_tensor import TensorWatch, watch_of
from swapper.tensors.torch_private import without_data, without_torch_functions
from swapper.train.layout.slices import TensorLocation
from swapper.train.state.state_view import ShownState

COPIED_BYTES = 1 << 16
"""Bytes. Smaller tensors are copied, so that they need no mapping each: a choice."""

MAP_FIXED = 0x10  # of mmap(2)
MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]

_shown: weakref.WeakSet[MappedState] = weakref.WeakSet()
_mapped: weakref.WeakValueDictionary[str, FileMapping] = weakref.WeakValueDictionary()  # files by path, for all states


class ShownPlace(TensorWatch):
    """Watches a tensor that shows a part of the state until that changes, and its views.

    Attributes:
        place: the part's.
        files: what it is mapped from.
    """

    is_mapped = True
    moves_copy = True  # who takes it over may change it

    def __init__(self, state: MappedState, place: TensorLocation, files: Sequence[FilePart]) -> None:
        self.state = state
        self.place = place
        self.files = files

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        self.state.tensors[id(tensor)] = super().watch(tensor)
        return tensor

    def use(self, tensor: torch.Tensor) -> None:
        if self.state.expired:
            raise StateError(
                f"a tensor of {self.state.made_by} is used after {self.state.expired}: it showed an earlier state, and has no "
                "memory of its own to keep it. Call state_dict() again, or copy.deepcopy it while it holds, or use "
                "manager.snapshot(path)"
            )
        self.used(tensor)

    def used(self, tensor: torch.Tensor) -> None:
        check_parts(self.files, f"a tensor of {self.state.made_by}")

    def write(self, how: str) -> None:
        raise _only_shows(how, self.state.made_by)

    def text(self, tensor: torch.Tensor) -> str | None:
        is_over = self.state.expired
        return f"StateTensor(expired, shape={tuple(tensor.shape)}, dtype={tensor.dtype})" if is_over else None


class MappedState:
    """The content of one state_dict.

    Args:
        pager: all its content is in the store, or in resident sections.
        made_by: the function that made these tensors, for errors.

    Attributes:
        tensors: those that show it, by id.
        expired: why they have expired; "" until then.
    """

    def __init__(self, pager: Pager, made_by: str) -> None:
        self._pager = pager
        self.made_by = made_by
        self._mappings: dict[str, FileMapping] = {}
        self._places: dict[int, TensorLocation] = {}  # by address
        self.tensors: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.expired = ""
        _shown.add(self)

    def tensor(self, place: TensorLocation) -> torch.Tensor:
        """Return the tensor at `place`, with a storage of its own: torch.save writes whole storages."""
        guard_saves()
        spec = place.slot.spec
        pages = place.section.pages_of(place.slot.offset, place.slot.end)
        if spec.nbytes < COPIED_BYTES:
            return self._copy(place, pages)
        files: list[FilePart] = []
        if place.section.resident:
            flat = place.section.own_bytes(place.slot.offset, place.slot.end)
        elif len({(page.location, page.drive) for page in pages}) == 1 or all(p.location == EXTERNAL for p in pages):
            at = pages[0].stored_offset - pages[0].offset + place.slot.offset
            if at % spec.dtype.itemsize:  # an external file may have it at any offset
                return self._copy(place, pages)
            files = [self._part(pages[0], at + spec.nbytes)]
            flat = torch.frombuffer(files[0].memory, dtype=torch.uint8, count=spec.nbytes, offset=at)
        elif any(page.stored_offset % SECTOR_BYTES for page in pages):
            return self._copy(place, pages)
        else:
            memory = self._patchwork(pages)
            flat = torch.frombuffer(
                memory, dtype=torch.uint8, count=spec.nbytes, offset=place.slot.offset - pages[0].offset
            )
            files = self._parts(pages, memory)
        shown = flat.view(spec.dtype).view(spec.shape)
        self._places[shown.data_ptr()] = place
        return ShownPlace(self, place, files).watch(shown)

    def place_of(self, tensor: torch.Tensor) -> TensorLocation | None:
        """Return the location that `tensor` shows from its beginning."""
        return self._places.get(tensor.data_ptr())

    def expire(self, why: str) -> None:
        """Expire all tensors before the state changes; accesses past the check then find the sections' memory."""
        if self.expired:
            return
        self.expired = why
        with torch.no_grad(), without_torch_functions():
            for tensor in list(self.tensors.values()):
                watch: ShownPlace = tensor.swapper_watch  # type: ignore[attr-defined]
                tensor.data = _same_part(tensor, watch.place)
                watch.files = ()
        self._mappings.clear()

    def leave(self, pager: Pager) -> None:
        """Have expired tensors refer to the memory of this pager's sections no more: it closes."""
        if self.expired and self._pager is pager:
            with torch.no_grad(), without_torch_functions():
                for tensor in list(self.tensors.values()):
                    tensor.data = without_data(tensor)

    def _map(self, page: Page) -> FileMapping:
        path = self._path_of(page)
        if path not in self._mappings:
            self._mappings[path] = _mapping_of(path, page.location == EXTERNAL)
        return self._mappings[path]

    def _part(self, page: Page, end: int) -> FilePart:
        """Return the mapping of the file that has `page`, for bytes up to `end`."""
        mapping = self._map(page)
        part = FilePart(mapping, mapping, end, page.location == EXTERNAL)
        check_parts([part], self.made_by)
        return part

    def _parts(self, pages: Iterable[Page], memory: WatchedMemory) -> list[FilePart]:
        """Return the files of pages that are mapped side by side in `memory`."""
        ends: dict[str, FilePart] = {}
        for page in pages:
            path, end = self._path_of(page), page.stored_offset + page.nbytes
            if path not in ends or ends[path].end < end:
                ends[path] = FilePart(self._map(page), memory, end, page.location == EXTERNAL)
        return list(ends.values())

    def _path_of(self, page: Page) -> str:
        file = self._pager.file_of(page)
        if file is None:
            raise InvariantError(f"{page} was flushed and is in no file")
        return file.path

    def _patchwork(self, pages: Sequence[Page]) -> WatchedMemory:
        """Map pages of several files side by side."""
        patchwork = WatchedMemory.reserved(pages[-1].offset + pages[-1].nbytes - pages[0].offset)
        for page in pages:
            offset = page.offset - pages[0].offset
            _map_over(patchwork.address + offset, page.nbytes, self._path_of(page), page.stored_offset)
            patchwork.watch(offset, page.nbytes)
        return patchwork

    def _copy(self, place: TensorLocation, pages: Iterable[Page]) -> torch.Tensor:
        """Copy a small tensor, or one that cannot be mapped."""
        section, slot = place.section, place.slot
        if section.resident:
            return self.only_shown(section.tensor(slot).clone())
        copied = torch.empty(slot.spec.nbytes, dtype=torch.uint8, device="cpu")
        for page in pages:
            begin, end = max(page.offset, slot.offset), min(page.offset + page.nbytes, slot.end)
            at = page.stored_offset + begin - page.offset
            part = self._part(page, at + end - begin)
            mapped = torch.frombuffer(part.memory, dtype=torch.uint8, count=end - begin, offset=at)
            copied[begin - slot.offset : end - slot.offset] = mapped
            check_parts([part], self.made_by)
        return self.only_shown(copied.view(slot.spec.dtype).view(slot.spec.shape))

    def only_shown(self, copied: torch.Tensor) -> torch.Tensor:
        """Make a copy read-only, except single numbers: plain optimizers use a state_dict's step counters directly."""
        made_by = self.made_by
        if not copied.dim():
            return copied

        def refuse(_: torch.Tensor, how: str) -> None:
            raise _only_shows(how, made_by)

        return ShownState(copied, refuse, is_taken_over=True).tensor()


def _mapping_of(path: str, is_external: bool) -> FileMapping:
    """Return the file's mapping. Each keeps descriptors, so that groups with a state each share it."""
    found = _mapped.get(path)
    if found is None or not found.is_of_file():
        found = _mapped[path] = FileMapping(Path(path), is_external)
    return found


def _map_over(address: int, nbytes: int, path: str, offset: int) -> None:
    """Map bytes of a file at `address`, replacing the mapping there."""
    with naming_limits("open", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapped = _libc.mmap(address, nbytes, BOTH, PRIVATE | MAP_FIXED, descriptor, offset)
    finally:
        os.close(descriptor)
    if mapped == MAP_FAILED:
        error = ctypes.get_errno()
        raise IoError("map", path, offset, nbytes, error, "raise vm.max_map_count, or use manager.snapshot(path)")


def expire(shown: Iterable[MappedState], why: str) -> None:
    """Expire `shown` before the state changes."""
    for state in list(shown):
        state.expire(why)


def leave_expired(pager: Pager) -> None:
    """Have no expired tensor refer to the memory of this pager's sections: it closes."""
    for state in list(_shown):
        state.leave(pager)


def _same_part(tensor: torch.Tensor, place: TensorLocation) -> torch.Tensor:
    """Return `tensor`'s part of the section at `place`; its storage begins with that place's tensor."""
    flat = place.section.own_tensor(place.slot).view(-1).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def steady(value: Any, place: TensorLocation | None) -> Any:
    """Return `value`, to be stored at `place`; a copy if it shows another place, which may be overwritten first."""
    watch = watch_of(value)
    is_other = isinstance(watch, ShownPlace) and watch.state.place_of(value) != place
    return value.clone() if is_other else value


def _only_shows(how: str, made_by: str) -> StateError:
    return StateError(
        f"{how} would write to a tensor of {made_by}, which only shows the state: change a copy.deepcopy of the state_dict, "
        "and give it to load_state_dict"
    )


def _expire_in_child() -> None:
    for state in list(_shown):
        state.expired = state.expired or "a fork, in the child, which has not swapper's memory"


after_fork_in_child(_expire_in_child)

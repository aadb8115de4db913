"""Gives FSDP2's large buffers memory that is used again and again, instead of the heap's.

[Note: memory of FSDP2] FSDP2 allocates the output of each all-gather, the unsharded parameters, and the input of each
reduce-scatter, tens of MB, and frees them soon after. In the C library's heap, what lives longer begins in the places that they
leave: the next one does not fit, and the heap grows to several times what is in use. Larger ones are mapped each time, and
page faults took a fifth of a step. So they lie in one mapping as large as their peak (buffers.py). It is shared memory, which is
not the heap's and which a forked child does not copy. What does not fit is torch's own, as before.

gloo reduces a copy of a reduce-scatter's input: it clones it, runs an all-reduce, and copies this rank's part to the output. FSDP2
does not use the input again, so the same is done in place, with equal results.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist


class BufferMemory:
    """One mapping, divided among buffers as they come: each is at the first place that is large enough.

    A place is free when the storage of its buffer is gone.

    Args:
        nbytes: of the mapping; it takes memory as it is touched.
    """

    def __init__(self, nbytes: int) -> None:
        self._mapping = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
        self._mapping.madvise(mmap.MADV_DONTFORK)
        self._used: list[tuple[int, int, Callable[[], object]]] = []  # begin, end, owner; in order

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Return uninitialized memory, uint8 of shape (nbytes,); None for none, and if no free place is large enough."""
        if not nbytes:
            return None
        self._used = [one for one in self._used if one[2]() is not None]
        begin = index = 0
        for begin_of_next, end_of_next, _ in [*self._used, (len(self._mapping), 0, lambda: None)]:
            if begin + nbytes <= begin_of_next:
                owner = (ctypes.c_char * nbytes).from_buffer(self._mapping, begin)
                self._used.insert(index, (begin, round_up(begin + nbytes), weakref.ref(owner)))
                return torch.frombuffer(owner, dtype=torch.uint8)
            begin, index = end_of_next, index + 1
        return None


def round_up(nbytes: int) -> int:
    """Return `nbytes` in whole pages of the system."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class _AllGather:
    """FSDP2's own all-gather, with its output in `memory`."""

    def __init__(self, own: Any, memory: BufferMemory) -> None:
        self.own = own
        self._memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        found = self._memory.allocate(math.prod(size) * dtype.itemsize)
        if found is None:
            own: torch.Tensor = self.own.allocate(size, dtype=dtype, device=device)
            return own
        return found.view(dtype).view(size)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.own(*arguments, **named)


class _ReduceScatter(_AllGather):
    """FSDP2's own reduce-scatter, with its input in `memory`. Its output may become the parameters' gradient, and stay."""

    _has_input = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._has_input:
            output: torch.Tensor = self.own.allocate(size, dtype=dtype, device=device)
            return output
        self._has_input = True
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self._has_input = False
        if not is_gloo(group):
            return self.own(output_tensor, input_tensor, group, op, async_op)
        dist.all_reduce(input_tensor, op=op, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        return None


class _Unsharded:
    """Has the unsharded parameters of one FSDPParam in `memory` while they are gathered.

    FSDP2 frees them by resizing their storages, which autograd and views have too. So a storage gets the memory of a buffer, and
    its own, empty, back.
    """

    METHODS: ClassVar = {
        "init_all_gather_outputs": "_initialize",
        "alloc_all_gather_outputs": "_allocate",
        "free_unsharded_param": "_free",
    }

    def __init__(self, fsdp_param: Any, memory: BufferMemory) -> None:
        self._fsdp_param = fsdp_param
        self._memory = memory
        self._own: list[tuple[Any, Any]] = []  # storages, and what they had
        self._initialize_own, self._free_own = fsdp_param.init_all_gather_outputs, fsdp_param.free_unsharded_param
        for name, ours in self.METHODS.items():
            vars(fsdp_param)[name] = getattr(self, ours)

    def _initialize(self, *arguments: Any) -> None:
        is_first = not self._fsdp_param.all_gather_outputs
        self._initialize_own(*arguments)
        if is_first:
            self._free_own()  # nothing was written yet

    def _allocate(self) -> None:
        for tensor in self._fsdp_param.all_gather_outputs:
            storage: Any = tensor.untyped_storage()
            nbytes = tensor.numel() * tensor.itemsize
            if storage.size() == nbytes:
                continue
            found = self._memory.allocate(nbytes) if nbytes >= MIN_UNSHARDED_BYTES else None
            if found is None:
                storage.resize_(nbytes)
            else:
                own = found.untyped_storage()
                storage._swap_data_ptr_(own)
                self._own.append((storage, own))

    def _free(self) -> None:
        for storage, own in self._own:
            storage._swap_data_ptr_(own)
        self._own.clear()
        self._free_own()

    def end(self) -> None:
        """Give FSDP2 its methods back. What is gathered now moves to the heap."""
        for name in self.METHODS:
            vars(self._fsdp_param).pop(name, None)
        for storage, _ in self._own:
            storage._swap_data_ptr_(storage.clone())
        self._own.clear()


MIN_UNSHARDED_BYTES = 1 << 16
"""Smaller parameters are left to the heap, where they fit into gaps."""
_COLLECTIVES = {
    "_all_gather_comm": ("DefaultAllGather", _AllGather),
    "_reduce_scatter_comm": ("DefaultReduceScatter", _ReduceScatter),
}
"""Attributes of an FSDPParamGroup: the class that torch gives them, if it has them (since 2.9), and ours."""


def is_gloo(group: Any) -> bool:
    """Return whether the process group is gloo's."""
    return "gloo" in str(group.name())


def may_reuse(param_group: Any) -> bool:
    """Return whether the collectives of an FSDPParamGroup can be given memory: this torch's own, and of several ranks."""
    found = [(_own(param_group, name), kind) for name, (kind, _) in _COLLECTIVES.items()]
    is_torchs = all(type(one).__name__ == kind and hasattr(one, "allocate") for one, kind in found)
    return is_torchs and param_group._all_gather_process_group.size() > 1


def may_lend() -> bool:
    """Return whether this torch lets a storage have other memory: then unsharded parameters lie in ours too."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def give_memory(param_groups: Iterable[Any], nbytes: int) -> None:
    """Have the buffers of FSDPParamGroups use `nbytes` of memory together, until `take_memory`."""
    memory = BufferMemory(nbytes)
    for group in param_groups:
        if may_lend():
            for fsdp_param in group.fsdp_params:
                _Unsharded(fsdp_param, memory)
        for name, (_, ours) in _COLLECTIVES.items():
            setattr(group, name, ours(_own(group, name), memory))


def take_memory(param_groups: Iterable[Any]) -> None:
    """Give FSDP2 what it had before. The memory goes back to the system with the last buffer in it."""
    for group in param_groups:
        for fsdp_param in group.fsdp_params:
            ours = getattr(vars(fsdp_param).get("free_unsharded_param"), "__self__", None)
            if isinstance(ours, _Unsharded):
                ours.end()
        for name in _COLLECTIVES:
            if hasattr(group, name):
                setattr(group, name, _own(group, name))


def _own(param_group: Any, name: str) -> Any:
    found = getattr(param_group, name, None)
    return found.own if isinstance(found, _AllGather) else found

"""Computes the memory of FSDP2's buffers, which are outside the budget, and lends them some that is used again and again.

[Note: memory of FSDP2] FSDP2 allocates the input and output of each all-gather, the unsharded parameters, and the input and
output of each reduce-scatter, tens of MB, and frees them soon after. In the C library's heap, what lives longer begins in the
places that they leave: the next one does not fit, and the heap grows to several times what is in use. Larger ones are mapped each
time, and page faults took a fifth of a step. So they lie in one mapping as large as their peak. It is shared memory,
which is not the heap's and which a forked child does not copy. What does not fit is torch's own, as before.

gloo gathers into a copy of an all-gather's output, and reduces a copy of a reduce-scatter's input: it clones that, runs an
all-reduce, and copies this rank's part to the output. So each rank broadcasts its part of the output instead (in a third of the
time), and the input, which FSDP2 does not use again, is reduced in place and has the output: with equal results.

[Note: FSDP2's buffers] From torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and _fsdp_param_group.py. `unshard` gathers
into one flat buffer, of which the rank's own part is the input (with a param_dtype, a cast copy of the shards comes first), and
copies from there into the unsharded parameters. In forward that buffer stays until the next group's copy. In backward the next
group is gathered before this one's gradients are computed. These are copied into the reduce-scatter's input, which stays until the
next group's; its output is cast to the parameters' dtype. gloo reduces a copy of the input, unless swapper has it done in place.
The root's parameters stay gathered from forward to backward (`reshard_after_forward`), and its gradients until all others are
reduced. All of these but gradients and the last cast lie in memory of swapper's: that is kept, and so counts with its own peak.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from swapper.io.tensor_bytes import round_up
from swapper.train.sharded.shards import Shards, shard_count


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

    def allocate(self, nbytes: int, is_brief: bool = False) -> torch.Tensor | None:
        """Return uninitialized memory, uint8 of shape (nbytes,); None for none, and if no free place is large enough.

        Args:
            is_brief: it is freed before the next one is: take the last place, so that no gap is left among others.
        """
        if not nbytes:
            return None
        self._used = [one for one in self._used if one[2]() is not None]
        gaps, begin = [], 0
        for index, (begin_of_next, end_of_next, _) in enumerate([*self._used, (len(self._mapping), 0, None)]):
            if begin + nbytes <= begin_of_next:
                gaps.append((index, (begin_of_next - nbytes) // mmap.PAGESIZE * mmap.PAGESIZE if is_brief else begin))
            begin = end_of_next
        if not gaps:
            return None
        index, begin = gaps[-1 if is_brief else 0]
        owner = (ctypes.c_char * nbytes).from_buffer(self._mapping, begin)
        self._used.insert(index, (begin, round_up(begin + nbytes, mmap.PAGESIZE), weakref.ref(owner)))
        return torch.frombuffer(owner, dtype=torch.uint8)


class EmptyTensors(TorchFunctionMode):
    """As a context: what `torch.empty` returns on this thread lies in `memory`, if it has a place for that and for the all-gather.

    FSDP2's `unshard` casts the shards of a group with a param_dtype into one such tensor.

    Args:
        ranks: the all-gather's output is this many times as large.
    """

    def __init__(self, memory: BufferMemory, ranks: int) -> None:
        super().__init__()
        self._memory = memory
        self._ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty and isinstance(args[0], tuple) and kwargs and kwargs.keys() == {"dtype", "device"}:
            nbytes = math.prod(args[0]) * kwargs["dtype"].itemsize
            output = self._memory.allocate(self._ranks * nbytes, is_brief=True)
            found = None if output is None else self._memory.allocate(nbytes, is_brief=True)
            if found is not None:
                return found.view(kwargs["dtype"]).view(args[0])
        return func(*args, **(kwargs or {}))


class _Collective:
    """A collective of FSDP2's own with its large buffer in `memory`."""

    is_brief = False

    def __init__(self, own: Any, memory: BufferMemory) -> None:
        self.own = own
        self._memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        found = self._memory.allocate(math.prod(size) * dtype.itemsize, self.is_brief)
        if found is None:
            own: torch.Tensor = self.own.allocate(size, dtype=dtype, device=device)
            return own
        return found.view(dtype).view(size)


class _AllGather(_Collective):
    """Its output lies there."""

    is_brief = True

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        if async_op or not is_gloo(group) or output_tensor.nbytes < MIN_BROADCAST_BYTES:
            return self.own(output_tensor, input_tensor, group, async_op)
        parts = output_tensor.chunk(group.size())
        if parts[group.rank()].data_ptr() != input_tensor.data_ptr():
            parts[group.rank()].copy_(input_tensor)
        sent = [dist.broadcast(part, group=group, group_src=rank, async_op=True) for rank, part in enumerate(parts)]
        for work in sent:
            work.wait()
        return None


class _ReduceScatter(_Collective):
    """Its input lies there, and, if `reuses_input`, its output in that: not if the output becomes the gradient, and stays."""

    reuses_input = False
    _input: torch.Tensor | None = None

    def __init__(self, own: Any, memory: BufferMemory, group: Any) -> None:
        super().__init__(own, memory)
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._input is None:
            self._input = super().allocate(size, dtype=dtype, device=device)
            return self._input
        if self.reuses_input:
            part = self._part_of(self._input)
            return torch.from_numpy(part.view(torch.uint8).numpy()).view(dtype)  # FSDP2 counts from the storage's begin
        output: torch.Tensor = self.own.allocate(size, dtype=dtype, device=device)
        return output

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self._input = None
        if not is_gloo(group):
            return self.own(output_tensor, input_tensor, group, op, async_op)
        dist.all_reduce(input_tensor, op=op, group=group)
        if not self.reuses_input:
            output_tensor.copy_(self._part_of(input_tensor))
        return None

    def _part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = tensor.chunk(self._group.size())[self._group.rank()]
        return part


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


MIN_BROADCAST_BYTES = 1 << 20
"""Below this gloo's own all-gather is faster."""
MIN_UNSHARDED_BYTES = 1 << 16
"""Smaller parameters are left to the heap, where they fit into gaps."""
_COLLECTIVES = {"_all_gather_comm": "DefaultAllGather", "_reduce_scatter_comm": "DefaultReduceScatter"}
"""Attributes of an FSDPParamGroup: the class that torch gives them, if it has them (since 2.9)."""


def is_gloo(group: Any) -> bool:
    """Return whether the process group is gloo's."""
    return "gloo" in str(group.name())


def has_replicas(param_group: Any) -> bool:
    """Return whether others have the same shards (HSDP, `replicate`): until it is reduced over them too, an output may stay."""
    return hasattr(param_group.mesh_info, "replicate_mesh_size")


def may_reuse(param_group: Any) -> bool:
    """Return whether collectives of an FSDPParamGroup can be given memory: this torch's own, of several ranks on the CPU."""
    found = [(_own(param_group, name), kind) for name, kind in _COLLECTIVES.items()]
    is_torchs = all(type(one).__name__ == kind and hasattr(one, "allocate") for one, kind in found)
    return is_torchs and shard_count(param_group) > 1 and param_group.device.type == "cpu"


def may_lend() -> bool:
    """Return whether this torch lets a storage have other memory: then unsharded parameters lie in ours too."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def give_memory(param_groups: Iterable[Any], nbytes: int, kept: Container[Any] = ()) -> BufferMemory:
    """Have the buffers of FSDPParamGroups use `nbytes` of memory together, until `take_memory`. Return it.

    Args:
        kept: the groups for which outputs of reduce-scatters stay.
    """
    memory = BufferMemory(nbytes)
    for group in param_groups:
        if may_lend():
            for fsdp_param in group.fsdp_params:
                _Unsharded(fsdp_param, memory)
        reduce_group = group._reduce_scatter_process_group
        reduce = _ReduceScatter(_own(group, "_reduce_scatter_comm"), memory, reduce_group)
        reduce.reuses_input = is_gloo(reduce_group) and group not in kept
        group._all_gather_comm = _AllGather(_own(group, "_all_gather_comm"), memory)
        group._reduce_scatter_comm = reduce
    return memory


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
    return found.own if isinstance(found, _Collective) else found


@dataclass
class GroupBytes:
    """What one FSDPParamGroup takes while it is used, in bytes.

    Attributes:
        gathered: its parameters, unsharded; the all-gather's output is as large.
        cast: a rank's part of them in the gathered dtype, if that is another one.
        gradients: of the unsharded parameters.
        early: of these, what comes before the gradients of the groups within: of parameters that the model has after theirs.
        converted: the largest gradient, which is copied on its way to a reduce-scatter's input of another dtype.
        reduced: the reduce-scatter's input.
        output: the reduce-scatter's output, if it is not a part of the input.
        cast_output: a copy of that in the parameters' dtype, if that is another one.
        stays: gathered from forward to backward.
    """

    gathered: int = 0
    cast: int = 0
    gradients: int = 0
    early: int = 0
    converted: int = 0
    reduced: int = 0
    output: int = 0
    cast_output: int = 0
    stays: bool = False


def instants(groups: Sequence[GroupBytes], copies_input: bool) -> Iterator[tuple[int, int, int]]:
    """Yield the bytes of collectives' buffers, unsharded parameters and others, at the instants of a step that have most.

    See [Note: FSDP2's buffers].

    Args:
        groups: in the order of the forward; the first is the root's.
        copies_input: the backend reduces a copy, which counts as one of the others.
    """
    stay = 0
    before = 0  # gathered: output of the all-gather before
    for group in groups:  # forward
        yield group.gathered + before + group.cast, stay, 0
        yield group.gathered, stay + group.gathered, 0
        stay += group.gathered if group.stays else 0
        before = group.gathered
    root_gradients = groups[0].early if len(groups) > 1 else 0
    reduced = 0  # the input of the group before, in the order of the backward
    for index, group in reversed(list(enumerate(groups))):
        if index == 0:
            root_gradients = 0
        stay -= group.gathered if group.stays else 0
        next_one = groups[index - 1] if index > 0 and not groups[index - 1].stays else None
        ahead = next_one.gathered if next_one else 0
        unsharded = stay + group.gathered
        if not group.stays:
            yield group.gathered + reduced, unsharded, root_gradients
        yield ahead + reduced, unsharded, root_gradients + group.gradients
        copied = group.reduced if copies_input else 0
        yield ahead + group.reduced, stay, root_gradients + group.gradients + group.converted
        yield ahead + group.reduced, stay, root_gradients + group.output + max(copied, group.cast_output)
        reduced = group.reduced


def memory_bytes(shards: Shards) -> int | None:
    """Return how much memory FSDP2's buffers on this rank use again and again; None if they have memory of their own."""
    if not all(may_reuse(group) for group, _ in shards.by_group):
        return None
    in_pages = 3 * max(len(members) for _, members in shards.by_group) * mmap.PAGESIZE  # each buffer begins at a page
    return max(kept for kept, _ in _instants(shards)) + in_pages


def buffer_bytes(shards: Shards) -> int | None:
    """Return the peak of FSDP2's buffers in a step on this rank; None if they lie on an accelerator."""
    if any(group.device.type != "cpu" for group, _ in shards.by_group):
        return None
    kept_bytes = memory_bytes(shards)
    if kept_bytes is not None:
        return kept_bytes + max(others for _, others in _instants(shards))
    return max(sum(one) for one in _instants(shards))


def _instants(shards: Shards) -> Iterator[tuple[int, int]]:
    """Yield the bytes of buffers that lie in memory of ours, if any do, and of the others."""
    first = shards.by_group[0][0]
    copies = shard_count(first) > 1 and is_gloo(first._all_gather_process_group) and not may_reuse(first)
    within = {id(shard.parameter) for _, members in shards.by_group[1:] for shard in members}
    named = [id(parameter) for parameter in shards.model.parameters()]
    first_within = next((index for index, key in enumerate(named) if key in within), len(named))
    late = set(named[:first_within])
    for of_collectives, unsharded, others in instants([_bytes_of(group, late) for group, _ in shards.by_group], copies):
        yield (of_collectives + unsharded, others) if may_lend() else (of_collectives, unsharded + others)


def _bytes_of(group: Any, late: set[int]) -> GroupBytes:
    ranks, found = shard_count(group), GroupBytes(stays=not group._reshard_after_forward)
    shares_output = may_reuse(group) and is_gloo(group._reduce_scatter_process_group) and not has_replicas(group)
    for one in group.fsdp_params:
        part = one._sharded_param_data.numel()
        dtype = one.param_dtype or one.orig_dtype
        found.gathered += ranks * part * dtype.itemsize
        found.cast += part * dtype.itemsize if one.param_dtype is not None else 0
        if one.sharded_param.requires_grad:
            reduce_dtype = group.mp_policy.reduce_dtype or dtype
            gradient = one._orig_size.numel() * dtype.itemsize
            found.gradients += gradient
            found.early += 0 if id(one.sharded_param) in late else gradient
            found.converted = max(found.converted, gradient if reduce_dtype != dtype else 0)
            found.reduced += ranks * part * reduce_dtype.itemsize
            found.output += 0 if shares_output else part * reduce_dtype.itemsize
            found.cast_output += part * one.orig_dtype.itemsize if reduce_dtype != one.orig_dtype else 0
    return found

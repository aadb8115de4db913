"""Computes the memory of FSDP2's own buffers in a step: gathered parameters and reduced gradients, which are outside the budget.

[Note: FSDP2's buffers] From torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and _fsdp_param_group.py. `unshard` gathers
into one flat buffer, of which the rank's own part is the input (with a param_dtype, a cast copy of the shards comes first), and
copies from there into the unsharded parameters. In forward that buffer stays until the next group's copy. In backward the next
group is gathered before this one's gradients are computed. These are copied into the reduce-scatter's input, which stays until the
next group's; its output is cast to the parameters' dtype. gloo reduces a copy of the input, unless swapper has it done in place.
The root's parameters stay gathered from forward to backward (`reshard_after_forward`), and its gradients until all others are
reduced. All of these but gradients and the last cast lie in memory of swapper's (buffer_memory.py): that is kept, and so counts
with its own peak.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from swapper.train.sharded.buffer_memory import has_replicas, is_gloo, may_lend, may_reuse
from swapper.train.sharded.shards import Shards, shard_count


@dataclass(frozen=True)
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

    gathered: int
    cast: int
    gradients: int
    early: int
    converted: int
    reduced: int
    output: int
    cast_output: int
    stays: bool


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
    ranks = shard_count(group)
    shares_output = may_reuse(group) and is_gloo(group._reduce_scatter_process_group) and not has_replicas(group)
    gathered = cast = gradients = early = converted = reduced = output = cast_output = 0
    for one in group.fsdp_params:
        part = one._sharded_param_data.numel()
        dtype = one.param_dtype or one.orig_dtype
        gathered += ranks * part * dtype.itemsize
        cast += part * dtype.itemsize if one.param_dtype is not None else 0
        if one.sharded_param.requires_grad:
            reduce_dtype = group.mp_policy.reduce_dtype or dtype
            gradient = one._orig_size.numel() * dtype.itemsize
            gradients += gradient
            early += 0 if id(one.sharded_param) in late else gradient
            converted = max(converted, gradient if reduce_dtype != dtype else 0)
            reduced += ranks * part * reduce_dtype.itemsize
            output += 0 if shares_output else part * reduce_dtype.itemsize
            cast_output += part * one.orig_dtype.itemsize if reduce_dtype != one.orig_dtype else 0
    stays = not group._reshard_after_forward
    return GroupBytes(gathered, cast, gradients, early, converted, reduced, output, cast_output, stays)

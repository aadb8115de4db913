"""Computes the memory of FSDP2's own buffers in a step: gathered parameters and reduced gradients, which are outside the budget.

[Note: FSDP2's buffers] From torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and _fsdp_param_group.py. `unshard` gathers
into one flat buffer, of which the rank's own part is the input (with a param_dtype, a cast copy of the shards comes first), and
copies from there into the unsharded parameters. In forward that buffer stays until the next group's copy. In backward the next
group is gathered before this one's gradients are computed. These are copied into the reduce-scatter's input, which stays until the
next group's; its output is cast to the parameters' dtype. gloo reduces a copy of the input. The root's parameters stay gathered
from forward to backward (`reshard_after_forward`), and its gradients until all others are reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swapper.train.sharded.shards import Shards


@dataclass(frozen=True)
class GroupBytes:
    """What one FSDPParamGroup takes while it is used, in bytes.

    Attributes:
        gathered: its parameters, unsharded; the all-gather's output is as large.
        cast: a rank's part of them in the gathered dtype, if that is another one.
        gradients: of the unsharded parameters.
        reduced: the reduce-scatter's input.
        output: the reduce-scatter's output, with its copy in the parameters' dtype if that is another one.
        stays: gathered from forward to backward.
    """

    gathered: int
    cast: int
    gradients: int
    reduced: int
    output: int
    stays: bool


def peak_bytes(groups: Sequence[GroupBytes], copies_input: bool) -> int:
    """Return the largest sum of buffers at any instant of a step. See [Note: FSDP2's buffers].

    Args:
        groups: in the order of the forward; the first is the root's.
        copies_input: the backend reduces a copy.
    """
    peak = stay = 0
    before = None
    for group in groups:  # forward
        peak = max(
            peak, stay + group.gathered + group.cast + (before.gathered if before else 0), stay + 2 * group.gathered
        )
        stay += group.gathered if group.stays else 0
        before = group
    root_gradients = groups[0].gradients if len(groups) > 1 else 0
    reduced = 0  # the input of the group before, in the order of the backward
    for index, group in reversed(list(enumerate(groups))):
        if index == 0:
            root_gradients = 0
        stay -= group.gathered if group.stays else 0
        next_one = groups[index - 1] if index > 0 and not groups[index - 1].stays else None
        ahead = next_one.gathered if next_one else 0
        if not group.stays:
            peak = max(peak, stay + root_gradients + 2 * group.gathered + reduced)
        held = stay + root_gradients + ahead
        peak = max(peak, held + group.gathered + group.gradients + reduced)
        copied = group.reduced if copies_input else 0
        peak = max(peak, held + group.reduced + max(group.gradients, group.output + copied))
        reduced = group.reduced
    return peak


def buffer_bytes(shards: Shards) -> int:
    """Return the peak of FSDP2's buffers in a step on this rank."""
    groups = [_bytes_of(group) for group, _ in shards.by_group]
    first = shards.by_group[0][0]
    copies = "gloo" in str(first._all_gather_process_group.name())
    return peak_bytes(groups, copies)


def _bytes_of(group: Any) -> GroupBytes:
    ranks = group._all_gather_process_group.size()
    gathered = cast = gradients = reduced = output = 0
    for one in group.fsdp_params:
        part = one._sharded_param_data.numel()
        dtype = one.param_dtype or one.orig_dtype
        gathered += ranks * part * dtype.itemsize
        cast += part * dtype.itemsize if one.param_dtype is not None else 0
        if one.sharded_param.requires_grad:
            reduce_dtype = group.mp_policy.reduce_dtype or dtype
            gradients += one._orig_size.numel() * dtype.itemsize
            reduced += ranks * part * reduce_dtype.itemsize
            output += part * (
                reduce_dtype.itemsize + (one.orig_dtype.itemsize if reduce_dtype != one.orig_dtype else 0)
            )
    stays = not group._reshard_after_forward
    return GroupBytes(gathered, cast, gradients, reduced, output, stays)

"""Weights that a forward uses and no plan has room for.

Planned is what each module's own forward looks at. A forward may also take the weight of a child as a whole, of which single rows
were to be read (`x @ self.embedding.weight.T`), or the weights of several children at one time. Where the frames are too few for
that, weights that were to stay in memory are streamed from then on, as many as it takes: a pass reads more, and runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from swapper.errors import BudgetError
from swapper.infer.runtime.weights import GroupWeights
from swapper.io.alignment import round_up
from swapper.paging.planning.budget import ARENA_ALIGNMENT_BYTES
from swapper.runtime.sizes import format_bytes


def make_room(wanted: GroupWeights, groups: Sequence[GroupWeights], frame_count: int, page_bytes: int) -> None:
    """Have weights that were to stay leave, as many as `wanted` needs.

    Args:
        wanted: could not be leased: all frames are leased.
        groups: all of the model's.
        frame_count, page_bytes: of the pool.

    Raises:
        BudgetError: nothing is left that could leave; says how much more is needed.
    """
    needed = len(wanted.pages)
    freed = 0
    for group in sorted(groups, key=lambda group: len(group.kept_pages), reverse=True):
        if freed >= needed:
            return
        freed += group.stream_all()
    if freed:
        return
    in_use = sum(len(group.pages) for group in groups if group.is_leased)
    missing_bytes = round_up(max(needed + in_use - frame_count, 1) * page_bytes, ARENA_ALIGNMENT_BYTES)
    raise BudgetError(
        f"parameter {wanted.weights[0].name} is used as a whole, {format_bytes(needed * page_bytes)} of memory, while "
        f"{format_bytes(in_use * page_bytes)} of other weights are in use, and host_memory has room for "
        f"{format_bytes(frame_count * page_bytes)}: raise it by at least {format_bytes(missing_bytes)} ({missing_bytes} bytes)"
    )

"""Ranks of a sharded model, each a thread with its own executor of updates and its rows of each parameter.

They gather parameters and reduce gradients together, as FSDP2 has it, and a step is taken on all of them or on none. A fault is
raised on one of them. If that ends its forward or backward, the others' collectives fail, and all run it again; if it is of an
update in backward, the rank takes part to the end of it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from sim.simulated_step import Fault, Group, SimulatedRun

RANKS = 2
ROWS = (slice(0, 2), slice(2, None))
"""Of each parameter, by rank."""

T = TypeVar("T")


class Meeting:
    """All ranks come to it, each with something, and leave it with what all had. If one fails, no rank waits for it."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=60)
        self._brought: list[Any] = [None] * RANKS

    def exchange(self, rank: int, value: T) -> list[T]:
        self._brought[rank] = value
        self.barrier.wait()
        found = list(self._brought)
        self.barrier.wait()
        return found


class SimulatedRank(SimulatedRun):
    """One rank's loop. The batches, and so the gradients, are the same on all ranks: their mean is exact."""

    fails_at_step = True

    def __init__(
        self, seed: int, update: str, rank: int, collectives: Meeting, ends: Meeting, fault_at: int | None
    ) -> None:
        self._rank = rank
        self._collectives = collectives
        self._ends = ends
        super().__init__(seed, update, fault_at)
        self._chances = random.Random(f"{seed} {rank}")

    def _own(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter[ROWS[self._rank]]

    def _gather(self, group: Group) -> torch.Tensor:
        whole = torch.cat(self._collectives.exchange(self._rank, group.parameter.detach().clone()))
        assert torch.equal(whole, self.plain[group.index]), f"p{group.index} is of different steps on two ranks"
        return whole

    def _reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        found = self._collectives.exchange(self._rank, gradient)
        return self._own(torch.stack(found).mean(0)).clone()

    def _passes(self, batches: list[torch.Tensor], uses: list[tuple[int, bool]]) -> None:
        try:
            super()._passes(batches, uses)
        except Fault as fault:
            assert not (fault.is_of_update and self._policy.in_backward), "the others wait for this rank's shards"
            raise

    def _again(self, part: Callable[[], None]) -> bool:
        """Run a part of the loop; on all ranks once more if it fails on one."""
        if not self._fails_anywhere(part):
            return True
        self.executor.drop()
        return not self._fails_anywhere(part)

    def _fails_anywhere(self, part: Callable[[], None]) -> bool:
        has_failed = False
        try:
            part()
        except (Fault, threading.BrokenBarrierError):
            has_failed = True
            self._collectives.barrier.abort()
        has_failed = any(self._ends.exchange(self._rank, has_failed))
        if self._rank == 0:
            self._collectives.barrier.reset()
        self._ends.exchange(self._rank, None)
        return has_failed

    def _take(self, members: list[int]) -> None:
        fault = None
        try:
            super()._take(members)
        except Fault as error:
            fault = error
        if any(self._ends.exchange(self._rank, fault is not None)):
            raise fault or Fault


def run_ranks(seed: int, update: str, steps: int, fault_at: tuple[int, int] | None = None) -> list[SimulatedRank]:
    """Run the loop on all ranks; a fault is raised at the call of a number on a rank. Return the ranks, which did all steps."""
    collectives, ends = Meeting(), Meeting()
    errors: list[BaseException] = []
    ranks = [
        SimulatedRank(seed, update, rank, collectives, ends, fault_at[1] if fault_at and fault_at[0] == rank else None)
        for rank in range(RANKS)
    ]

    def run(rank: SimulatedRank) -> None:
        try:
            assert rank.run(steps), "the run could not go on"
        except BaseException as error:
            errors.append(error)
            collectives.barrier.abort()
            ends.barrier.abort()

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return ranks

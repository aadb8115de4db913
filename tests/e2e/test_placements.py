"""Wherever the user places parameters and state, by whichever backend they travel, the arithmetic is the same."""

from __future__ import annotations

from collections.abc import Callable

import devices
import pytest

from e2e.models import Net, train_step
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]
PLACES = ("host", "nvme", "auto")
PLENTY = 64 << 20


def test_auto_keeps_everything_in_memory_where_it_fits(twins: MakeTwins) -> None:
    pair = twins(Net(), params="auto", optimizer_state="auto", budget=PLENTY)
    pair.train(train_step, steps=3)
    assert pair.manager.counters.bytes_read == 0
    pair.finish(paged=False)


def test_a_pool_that_holds_everything_reads_nothing_back(twins: MakeTwins) -> None:
    pair = twins(Net(), budget=PLENTY)
    pair.train(train_step, steps=3)
    assert pair.manager.counters.bytes_read == 0
    assert pair.manager.counters.bytes_written > pair.written_at_start
    pair.finish(paged=False)


@pytest.mark.parametrize("backend", ["threads", "uring"])
def test_every_backend_is_bit_equal(twins: MakeTwins, backend: str) -> None:
    pair = twins(Net(), backend=backend)
    pair.train(train_step, steps=5)
    assert pair.manager.current.run.engine.backend == backend
    pair.finish()


@devices.without_device("its slices are as small as a small device asks for, and share more pages: test_device_reads")
def test_a_step_reads_and_writes_what_the_pool_cannot_hold_and_no_more(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=3)
    pair.manager.current.run.pager.flush()
    before = pair.manager.counters.snapshot()
    pair.train(train_step, steps=4)
    pair.manager.current.run.pager.flush()
    after = pair.manager.counters.snapshot()
    sections = pair.manager.current.run.sections
    params = sum(p.nbytes for s in sections if s.plan.family == "param" for p in s.pages)
    state = sum(p.nbytes for s in sections if s.plan.family == "state" for p in s.pages)
    small = sum(section.plan.nbytes for section in sections if section.resident)  # written by each commit
    written = (after["bytes_written"] - before["bytes_written"]) / 4 - small
    assert params + state <= written <= 1.03 * (params + state)  # once; a page that two slices share at most twice
    read = (after["bytes_read"] - before["bytes_read"]) / 4
    assert read <= 3 * params + state  # forward, backward and update; what stays in the pool is read less often
    pair.finish()

"""With deferred updates some parameters are written in backward, not in the forward that made them.

In between only the gradient slots have them, and every access finds them there. [Note: deferred writes], paging/frames.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from torch.optim import AdamW

from e2e.models import Net, finish_step, loss_of, tokens, train_step
from e2e.twins import Twins, penalty_of
from swapper.paging.section import Page

pytestmark = devices.without_device("no parameter waits in a gradient's slot: a device's updates come down to frames")
MakeTwins = Callable[..., Twins]


def make(twins: MakeTwins) -> Twins:
    model = Net(depth=8).bfloat16()
    pair = twins(model, partial(AdamW, lr=1e-2), master=True, update="deferred", room_bytes=1 << 20)
    pair.manager.current.run.pager._write_back._enough = 0  # however fast the drive is
    return pair


def deferred_writes(pair: Twins) -> list[Page]:
    return list(pair.manager.current.run.pager._frames.deferred_writes.values())


def test_a_forward_leaves_some_writes_to_its_backward(twins: MakeTwins) -> None:
    pair = make(twins)
    seen = []

    def run(model: Any, optimizer: Any) -> torch.Tensor:
        swapped = model is pair.swapped
        loss = loss_of(model, tokens())
        if swapped:
            seen.append(len(deferred_writes(pair)))
        loss.backward()
        if swapped:
            assert not deferred_writes(pair)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    pair.train(run, steps=5)
    assert seen[0] == 0 and all(seen[2:]), seen
    pair.finish()


def test_reads_of_a_parameter_with_a_deferred_write_past_its_guard_find_the_new_content(twins: MakeTwins) -> None:
    pair = make(twins)
    pair.train(train_step, steps=3)
    batch = tokens()
    losses = [loss_of(model, batch) for model in (pair.plain, pair.swapped)]
    pages = deferred_writes(pair)
    assert pages
    for page in pages:
        address = page.section.memory.data_ptr() + page.offset
        there = ctypes.string_at(address, page.nbytes)
        for slot in page.section.plan.slots:
            begin, end = max(slot.offset, page.offset), min(slot.end, page.offset + page.nbytes)
            expected = pair.plain.get_parameter(slot.spec.owner).detach().view(torch.uint8).flatten()
            if begin < end:
                part = bytes(expected[begin - slot.offset : end - slot.offset].tolist())
                assert there[begin - page.offset : end - page.offset] == part, slot.spec.owner
    for loss in losses:
        loss.backward()
    pair.finish(paged=False)


def test_gradients_that_come_without_a_lease_have_what_waits_in_their_place_written_first(twins: MakeTwins) -> None:
    """A penalty from before the step needs no parameters in its backward."""
    pair = make(twins)
    waited = []

    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        swapped = model is pair.swapped
        penalty = penalty_of(pair, model)
        finish_step(loss_of(model, tokens()), optimizer)
        loss = loss_of(model, tokens())
        before = deferred_writes(pair)
        penalty.backward()
        if swapped:
            waited.append(len(before) - len(deferred_writes(pair)))
        finish_step(loss, optimizer)
        return [penalty.detach(), loss.detach()]

    pair.train(run, steps=3)
    assert all(waited[1:]), waited
    pair.finish()


@pytest.mark.parametrize("what", ["snapshot", "evaluation", "state_dict", "gather"])
def test_who_looks_between_forward_and_backward_finds_all_of_it(twins: MakeTwins, tmp_path: Path, what: str) -> None:
    pair = make(twins)
    pair.train(train_step, steps=3)
    batch = tokens()
    losses = [loss_of(model, batch) for model in (pair.plain, pair.swapped)]
    assert deferred_writes(pair)
    assert torch.equal(*losses)
    if what == "snapshot":
        pair.manager.snapshot(tmp_path / "s.pt").wait()
        assert_is_plain(pair, torch.load(tmp_path / "s.pt")["model"])
        assert not deferred_writes(pair)
    elif what == "evaluation":
        with torch.no_grad():
            assert torch.equal(*(loss_of(model, batch) for model in (pair.plain, pair.swapped)))
    elif what == "state_dict":
        assert_is_plain(pair, pair.swapped.state_dict())
    elif what == "gather":
        with pair.manager.gather(pair.swapped.blocks[0]):
            assert_is_plain(pair, {f"blocks.0.{name}": p for name, p in pair.swapped.blocks[0].named_parameters()})
    for loss in losses:
        loss.backward()
    pair.finish(paged=False)


def assert_is_plain(pair: Twins, state: dict[str, torch.Tensor]) -> None:
    expected = pair.plain.state_dict()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name

"""An update on a device that fails, or a pass that ends in between: slices that are on their way down are waited for first.

Their pages are leased, and what arrives in them later would be in somebody else's frame, or over what was put back. Each of these
waits was taken out once, and its test failed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from e2e.device_twins import MIB, MakeTwins, on_device, step_again
from e2e.early import updated_early
from e2e.models import WIDTH, Net, loss_of, tokens, train_step
from e2e.twins import Twins

__all__ = ["on_device"]

OPTIONS = {"update_on": "device", "device_memory": 8 * MIB}


def fail_to_read(pair: Twins, number: int) -> None:
    """Have what one of the next slices needs not come, once; slices before it are on their way down by then."""
    pager, left = pair.manager.current.run.pager, iter(range(number))
    wait = pager.wait

    def fail_once(access: Any) -> None:
        wait(access)
        if access.key is not None and access.key[0] == "slice" and next(left, None) is None:
            del pager.wait
            pager.release(access)
            raise RuntimeError("a read that fails")

    pager.wait = fail_once


def on_their_way(pair: Twins) -> int:
    return len(pair.manager.current.run.placed.processor.downloads._in_flight)


@pytest.mark.parametrize("params, state", [("host", "nvme"), ("host", "host"), ("nvme", "nvme")])
def test_a_step_that_fails_is_undone_after_what_was_on_its_way(on_device: MakeTwins, params: str, state: str) -> None:
    pair = on_device(Net(), commit_every=1, params=params, optimizer_state=state, **OPTIONS)
    pair.train(train_step, steps=2)
    loss_of(pair.swapped, batch := tokens()).backward()
    fail_to_read(pair, 4)
    with pytest.raises(RuntimeError, match="a read that fails"):
        pair.optimizer.step()
    pair.check_pager()
    step_again(pair, batch)
    pair.finish(paged=False)


@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_a_deferred_update_that_fails_outside_of_a_pass_keeps_no_lease(on_device: MakeTwins, update_on: str) -> None:
    pair = on_device(Net(), update="deferred", gradients="nvme", **{**OPTIONS, "update_on": update_on})
    pair.train(train_step, steps=2)
    fail_to_read(pair, 3)
    with pytest.raises(RuntimeError, match="a read that fails"):
        pair.optimizer.state_dict()
    pair.check_pager()
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


def test_a_pass_that_is_given_up_between_backward_and_step_loses_no_update(on_device: MakeTwins) -> None:
    """A block that is not trained can be used there; Ctrl-C in it leaves its leases behind, and the step forgets them."""
    model = Net()
    model.blocks[1].requires_grad_(False)
    pair = on_device(model, update="backward", **OPTIONS)
    pair.train(train_step, steps=2)
    pair.both(lambda model, _: loss_of(model, tokens()).backward())
    assert updated_early(pair)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = pair.swapped.blocks[1].up.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        pair.swapped.blocks[1](torch.ones(1, WIDTH))
    handle.remove()
    assert pair.manager.current.run.model.passes.is_open and on_their_way(pair)
    pair.both(lambda _, optimizer: optimizer.step())
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    pair.train(train_step, steps=1)
    pair.finish(paged=False)

"""Pages are written even while they are being copied to a device. A step leaves its parameters changed and, ahead of the
next forward, in copies; where no commit is due in each step, their writes wait."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import ORDERS, HostDevice

import swapper
from e2e.device_twins import MIB, MakeTwins, on_device
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import Twins, assert_same
from swapper import _C
from swapper.paging.residency import Residency

__all__ = ["on_device"]

STREAMED = {
    "params": "nvme",
    "optimizer_state": "host",
    "device_memory": 64 * MIB,
    "budget": 64 * MIB,
    "update_on": "cpu",
}


def with_copies_ahead(on_device: MakeTwins, order: str, **options: Any) -> Twins:
    pair = on_device(order=order, **{**STREAMED, **options})
    for _ in range(2):
        pair.both(train_step)  # `train` waits for copies
    assert pair.manager.current.run.placed.processor._uploads._in_flight, "nothing is being copied"
    return pair


@pytest.mark.parametrize("order", ORDERS[:2])
def test_a_snapshot_has_what_is_being_copied(on_device: MakeTwins, tmp_path: Path, order: str) -> None:
    pair = with_copies_ahead(on_device, order, commit_every=None)
    pair.manager.snapshot(tmp_path / "snapshot.pt").wait()
    assert_same(dict(torch.load(tmp_path / "snapshot.pt")["model"]), dict(pair.plain.state_dict()))
    pair.close()


@pytest.mark.parametrize("order", ORDERS[:2])
def test_a_state_dict_has_what_is_being_copied(on_device: MakeTwins, order: str) -> None:
    pair = with_copies_ahead(on_device, order, commit_every=None)
    assert_same(copy.deepcopy(dict(pair.swapped.state_dict())), dict(pair.plain.state_dict()))
    pair.close()


@pytest.mark.parametrize("order", ORDERS[:2])
def test_a_commit_has_what_is_being_copied(on_device: MakeTwins, tmp_path: Path, order: str) -> None:
    """It is made when a later forward finds the writes done; what would be found after a kill then is another manager's."""
    pair = with_copies_ahead(on_device, order, commit_every=2)
    committer = pair.manager.current.run.committer
    for _ in range(5000):  # its files are synced meanwhile
        if committer.committed == 2:
            break
        loss_of(pair.swapped, tokens())
    assert committer.committed == 2
    shutil.copytree(pair.directory, tmp_path / "killed")
    pair.close()
    pair.directory = tmp_path / "killed"
    pair.resume(Net(), device=HostDevice(order))
    assert pair.manager.step == 2
    pair.finish(paged=False)


def test_a_change_of_a_forward_that_cannot_be_copied_back_is_not_on_the_device_either(on_device: MakeTwins) -> None:
    pair = on_device(**{**STREAMED, "optimizer_state": "nvme"})
    pair.both(train_step)
    weight = pair.swapped.blocks[1].up.weight
    run = pair.manager.current.run
    run.pager.flush()  # else a page that is being written cannot be sent away
    store = run._resources.store.swap_files
    sound, failing = store._engine, _C.Engine(chaos={"seed": 1, "eio": 1})

    def change(*of: Any) -> None:
        weight.mul_(2)
        run.placed.processor._uploads.finish()
        with run.pager._lock:
            for page in [page for page in run.pager._pages if page.residency is Residency.CLEAN and not page.leases]:
                run.pager._frames.evict(page)
        store._engine = failing

    hook = pair.swapped.blocks[1].up.register_forward_pre_hook(change)
    with torch.no_grad():
        before = weight.clone()
        with pytest.raises(swapper.IoError):
            loss_of(pair.swapped, tokens())
        store._engine = sound
        hook.remove()
        with pair.manager.gather(weight):
            assert torch.equal(weight, before)
    failing.close()
    pair.close()

"""Pickles of an offloaded model are plain; where none can be made, an error says what to do instead."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapper
from e2e.models import LAYER_WIDTH, Net, layers, layers_step, train_step
from e2e.twins import Twins, assert_same

READ = """
import sys
sys.modules["swapper"] = None  # as where it is not installed
import torch
model = torch.load(sys.argv[1], weights_only=False)
print(model(torch.ones(1, 256)).sum().item().hex())
"""


def test_a_model_saved_inside_gather_is_read_where_there_is_no_swapper(
    twins: Callable[..., Twins], tmp_path: Path
) -> None:
    pair = twins(layers(), room_bytes=16 << 20)
    pair.train(layers_step, steps=2)
    with pair.manager.gather(pair.swapped):
        torch.save(pair.swapped, tmp_path / "model.pt")
        duplicate = copy.deepcopy(pair.swapped)
    ones = torch.ones(1, LAYER_WIDTH)
    assert torch.equal(duplicate(ones), pair.plain(ones))
    command = [sys.executable, "-c", READ, str(tmp_path / "model.pt")]
    read = subprocess.run(command, env={"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    assert float.fromhex(read.stdout) == pair.plain(ones).sum().item()
    pair.finish(paged=False)


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("gathered", [True, False])
def test_what_is_saved_holds_nothing_that_plain_torch_would_not_save(
    twins: Callable[..., Twins], tmp_path: Path, gathered: bool, update: str
) -> None:
    """So torch.load, which allows no more than what is named to it, reads it. The user's own hooks stay in it."""
    pair = twins(layers(), room_bytes=16 << 20, update=update)
    pair.train(layers_step, steps=2)
    for model in (pair.plain, pair.swapped):
        model[0].register_forward_pre_hook(print, with_kwargs=True)
        model[0].register_forward_hook(print, always_call=True)
    with pair.manager.gather(pair.swapped) if gathered else nullcontext():
        torch.save(pair.swapped, tmp_path / "swapped.pt")
    torch.save(pair.plain, tmp_path / "plain.pt")
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, print]):
        swapped, plain = (torch.load(tmp_path / f"{name}.pt") for name in ("swapped", "plain"))
    assert_same(dict(swapped.state_dict()), dict(plain.state_dict()))
    tables = {name: table for name, table in vars(plain[0]).items() if "_hooks" in name}
    assert {name: [*vars(swapped[0])[name].values()] for name in tables} == {
        name: [*table.values()] for name, table in tables.items()
    }
    assert [*vars(swapped[0])] == [*vars(plain[0])]
    for model in (pair.plain, pair.swapped):
        for table in (model[0]._forward_pre_hooks, model[0]._forward_hooks):
            del table[next(key for key, hook in table.items() if hook is print)]
    pair.finish(paged=False)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, pickle.dumps, lambda thing: torch.save(thing, io.BytesIO())]
)
def test_an_offloaded_optimizer_is_not_copied_and_says_what_is(
    twins: Callable[..., Twins], duplicate: Callable[[Any], Any]
) -> None:
    pair = twins(Net(), room_bytes=16 << 20)
    pair.train(train_step, steps=3)
    with pytest.raises(swapper.UnsupportedError, match=r"optimizer\.state_dict\(\)"):
        duplicate(pair.optimizer)
    pair.finish(paged=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_manager_is_not_copied_and_keeps_its_lock(tmp_path: Path, duplicate: Callable[[Any], Any]) -> None:
    """A copy that is dropped would close the lock's descriptor: another run could begin in the directory."""
    with swapper.SwapManager(tmp_path, "8MiB") as manager:
        owner = layers()
        owner.manager = manager
        things = [manager, owner] if duplicate is not copy.copy else [manager]
        for thing in [*things, *manager._directory._locked]:
            with pytest.raises(swapper.UnsupportedError, match="cannot be copied or pickled"):
                duplicate(thing)
        gc.collect()
        with pytest.raises(swapper.DirectoryError, match="in use by another run"):
            swapper.SwapManager(tmp_path, "8MiB")

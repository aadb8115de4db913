"""What is pickled of an offloaded model is plain, and what cannot be pickled is refused by what to do instead."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import swapper
from e2e.models import LAYER_WIDTH, Net, layers, layers_step, train_step
from e2e.twins import Twins

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


@pytest.mark.large_table
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

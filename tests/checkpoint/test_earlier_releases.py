"""Files that release 0.1 wrote are read: snapshots, exact and encoded, and files of `checkpoint.save`.

They are in release_0_1: two steps of AdamW on a small model. losses.json has the losses of four steps of the exact run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import swapper
from swapper import checkpoint
from swapper.durability.verify import verify

FILES = Path(__file__).parent / "release_0_1"


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def batch(step: int) -> torch.Tensor:
    return torch.arange(16, dtype=torch.float32).view(2, 8).add(step).div(16)


def assert_equal(one: object, other: object) -> None:
    if isinstance(other, torch.Tensor):
        assert isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(other, dict):
        assert isinstance(one, dict) and one.keys() == other.keys()
        for key, value in other.items():
            assert_equal(one[key], value)
    elif isinstance(other, list | tuple):
        assert isinstance(one, list | tuple) and len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    else:
        assert one == other


@pytest.mark.parametrize("name", ["exact.pt", "8bit.pt", "saved.pt"])
def test_they_are_whole(name: str) -> None:
    assert all(not report.faults for report in verify(FILES / name))


def test_a_run_goes_on_from_a_snapshot_as_the_earlier_release_did(tmp_path: Path) -> None:
    state = torch.load(FILES / "exact.pt", weights_only=True, mmap=True)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    losses = json.loads((FILES / "losses.json").read_text())
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        for step in range(state["extra"]["step"] + 1, len(losses)):
            loss = model(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert loss.item() == pytest.approx(losses[step], rel=1e-5)  # other processors round otherwise


def test_encoded_state_is_decoded_to_the_values_that_the_earlier_release_gave() -> None:
    found = checkpoint.load(FILES / "8bit.pt")
    assert found["optimizer"]["state"][0]["exp_avg"].dtype == torch.float32
    assert_equal(found, torch.load(FILES / "8bit-decoded.pt", weights_only=True))


def test_a_saved_file_has_its_values() -> None:
    found = checkpoint.load(FILES / "saved.pt")
    assert found["step"] == 7
    assert_equal(found["weights"], torch.load(FILES / "saved.pt", weights_only=True)["weights"])
    assert found["weights"]["0.weight"].shape == (16, 8)

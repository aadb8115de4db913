"""`optimizer.state_dict()` shows the state without memory for it, torch.save takes it, and it never shows a mix of two steps."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapper
from e2e.processes import is_refused_in_a_fork
from e2e.twins import Twins, adamw, assert_same, assert_same_state

MakeTwins = Callable[..., Twins]
WIDTH = 256


def layers(width: int = WIDTH, count: int = 8) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(torch.randn(4, model[0].in_features)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def anonymous_bytes() -> int:
    """Memory of this process that no file has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def large_state(optimizer: Any) -> torch.Tensor:
    return optimizer.state_dict()["state"][0]["exp_avg"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer_state": "host"},
        {"commit_every": None, "room_bytes": 1 << 20},
        {"update": "deferred"},
        {"master": True},
    ],
    ids=str,
)
def test_plain_torch_goes_on_from_what_torch_save_made_of_it(
    twins: MakeTwins, tmp_path: Path, options: dict[str, Any]
) -> None:
    model = layers().to(torch.bfloat16) if options.get("master") else layers()
    dtype = next(model.parameters()).dtype

    def train(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, dtype=dtype)).square().mean().backward()
        optimizer.step()

    pair = twins(model, **options)
    pair.train(train, steps=3)
    shown = pair.optimizer.state_dict()
    assert_same_state(shown, pair.plain_optimizer.state_dict())
    torch.save(shown, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(type(value) is torch.Tensor for state in loaded["state"].values() for value in state.values())
    assert_same_state(loaded, pair.plain_optimizer.state_dict())
    nbytes = sum(value.nbytes for state in loaded["state"].values() for value in state.values())
    assert (tmp_path / "state.pt").stat().st_size < 1.1 * nbytes  # and no masters in it
    fresh = adamw(copy.deepcopy(model).parameters())
    fresh.load_state_dict(pair.optimizer.state_dict())
    for state in fresh.state.values():
        state["exp_avg"].mul_(2)  # a plain optimizer has tensors of its own
    assert_same_state(pair.optimizer.state_dict(), pair.plain_optimizer.state_dict())
    pair.optimizer.load_state_dict(loaded)
    pair.train(train, steps=2)
    pair.finish(paged=False)


def test_it_takes_no_memory_and_neither_does_saving_it(twins: MakeTwins, tmp_path: Path) -> None:
    pair = twins(layers(1024, 10))  # 84 MB of state
    pair.train(step, steps=1)
    state_bytes = sum(v.nbytes for state in pair.plain_optimizer.state.values() for v in state.values())
    before = anonymous_bytes()
    shown = pair.optimizer.state_dict()
    torch.save(shown, tmp_path / "state.pt")
    assert anonymous_bytes() - before < state_bytes / 5
    del shown
    pair.finish(paged=False)


def test_it_expires_with_the_next_step_and_so_do_its_views(twins: MakeTwins) -> None:
    pair = twins(layers())
    pair.train(step, steps=2)
    shown = large_state(pair.optimizer)
    view, kept = shown.view(-1)[10:20], copy.deepcopy(shown)
    alone = shown.clone()
    assert torch.equal(view, kept.view(-1)[10:20])
    pair.train(step, steps=1)
    assert (shown.shape, shown.dtype) == (kept.shape, kept.dtype)
    for use in (
        lambda: shown.sum(),
        lambda: view.tolist(),
        lambda: copy.deepcopy(shown),
        lambda: torch.save(shown, os.devnull),
    ):
        with pytest.raises(swapper.StateError, match=r"state_dict\(\) again"):
            use()
    assert "expired" in repr(shown)
    assert torch.equal(kept, alone) and type(kept) is type(alone) is torch.Tensor
    pair.finish()


def test_writing_to_it_is_refused(twins: MakeTwins) -> None:
    pair = twins(layers())
    pair.train(step, steps=2)
    shown = large_state(pair.optimizer)

    def assign() -> None:
        shown[0] = 1.0

    for write in (
        lambda: shown.add_(1),
        assign,
        lambda: torch.add(shown, 1, out=shown),
        lambda: shown.view(-1).zero_(),
    ):
        with pytest.raises(swapper.StateError, match="only shows"):
            write()
    torch.empty_like(kept := shown.clone()).copy_(shown)
    assert torch.equal(shown, kept)
    pair.finish()


def test_it_can_be_loaded_again_also_with_parameters_exchanged(twins: MakeTwins) -> None:
    pair = twins(layers())
    pair.train(step, steps=3)
    for permuted in (False, True):

        def reload(model: nn.Module, optimizer: Any, permuted: bool = permuted) -> None:
            state_dict = optimizer.state_dict()
            if optimizer is not pair.optimizer:
                state_dict = copy.deepcopy(state_dict)
            if permuted:
                state = state_dict["state"]
                state_dict = {**state_dict, "state": {**state, 0: state[2], 2: state[0]}}
            optimizer.load_state_dict(state_dict)

        pair.both(reload)
        pair.train(step, steps=2)
    pair.finish()


def test_tensors_whose_pages_lie_in_both_files_are_whole(twins: MakeTwins) -> None:
    pair = twins(layers())
    pair.train(step, steps=2)

    def some(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        model[2:5](torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        pair.both(some)
        pair.assert_same_state()
        pair.both(step)
        pair.assert_same_state()
    pair.finish()


@pytest.mark.parametrize("place", ["nvme", "host"])
def test_it_can_be_read_after_the_manager_is_closed_but_not_in_a_forked_child(twins: MakeTwins, place: str) -> None:
    pair = twins(layers(), optimizer_state=place)
    pair.train(step, steps=2)
    shown, expected = pair.optimizer.state_dict(), copy.deepcopy(pair.plain_optimizer.state_dict())
    tensor = shown["state"][0]["exp_avg"]
    assert is_refused_in_a_fork(tensor.sum)
    pair.close()
    assert_same(shown["state"], expected["state"])


@pytest.mark.whole
@pytest.mark.parametrize(
    "rename", [lambda number: -number, lambda number: f"module.{number}"], ids=["numbers", "names"]
)
def test_parameters_are_numbered_as_the_state_dict_says(twins: MakeTwins, rename: Callable[[int], Any]) -> None:
    """torch.distributed.checkpoint numbers them by name; torch's load_state_dict goes by the groups' order."""
    both = twins(layers(64, 2))
    step(both.plain, both.plain_optimizer)
    saved = copy.deepcopy(both.plain_optimizer.state_dict())
    saved["state"] = {rename(number): state for number, state in saved["state"].items()}
    for group in saved["param_groups"]:
        group["params"] = [rename(number) for number in group["params"]]
    both.optimizer.load_state_dict(copy.deepcopy(saved))
    assert_same_state(both.optimizer.state_dict(), both.plain_optimizer.state_dict())
    before = both.optimizer.state_dict()
    with pytest.raises(ValueError, match="'stranger', which is in none of its groups"):
        both.optimizer.load_state_dict({**saved, "state": {**saved["state"], "stranger": {}}})
    assert_same_state(both.optimizer.state_dict(), before)

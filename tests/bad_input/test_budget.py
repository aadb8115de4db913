"""A budget that is too small is refused at once, with the smallest that works: and that one does, and less does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.leaks import open_files
from e2e.models import Net, train_step
from e2e.twins import Twins, adamw, assert_same, named_budget, smallest_budget
from torch import nn

import swapper

MakeTwins = Callable[..., Twins]
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "nvme": (Net, {"params": "nvme", "optimizer_state": "nvme"}),
    "host": (Net, {"params": "host", "optimizer_state": "host"}),
    "state on nvme": (Net, {"params": "host", "optimizer_state": "nvme"}),
    "auto": (Net, {}),
    "deep": (lambda: Net(depth=8), {"params": "nvme", "optimizer_state": "nvme"}),
    "tied": (lambda: Net(tied=True), {"params": "nvme", "optimizer_state": "nvme"}),
    "masters": (
        lambda: Net().bfloat16(),
        {"params": "nvme", "optimizer_state": "nvme", "master_weights": torch.float32},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_smallest_that_is_named_works_and_a_bit_less_does_not(twins: MakeTwins, tmp_path: Path, case: str) -> None:
    make_model, options = CASES[case][0], dict(CASES[case][1])
    master = "master_weights" in options
    model = make_model()
    optimizer = adamw(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    smallest = smallest_budget(tmp_path, model, optimizer, **options)

    with swapper.SwapManager(tmp_path, host_memory=smallest - 4096) as manager:
        with pytest.raises(swapper.BudgetError) as caught:
            manager.offload(model, optimizer, **options)
        assert named_budget(caught.value) == smallest
        assert "raise host_memory" in str(caught.value)
        assert "stay in memory" in str(caught.value)
    assert_same(dict(model.state_dict()), before)  # a refused offload changes nothing
    train_step(model, optimizer)
    assert not list(tmp_path.rglob("*.swap"))

    options.pop("master_weights", None)
    pair = twins(
        make_model(), budget=smallest, master=master, **{"params": "auto", "optimizer_state": "auto", **options}
    )
    pair.train(train_step, steps=3)
    pair.finish(paged=False)


def test_what_is_held_stays_within_the_smallest_budget(twins: MakeTwins) -> None:
    before = open_files()  # of tests that ended there may be garbage
    pair = twins(Net())
    pair.train(train_step, steps=2)
    files = [file for file, target in open_files().items() if "swapper-arena" in target and file not in before]
    assert files
    assert sum(file.stat().st_size for file in files) <= pair.manager._options.host_bytes


@pytest.mark.whole
@pytest.mark.parametrize("size", ["0", 0, -5, "12 parsecs", "", None, 3.5, True])
def test_a_size_that_is_none_is_refused(tmp_path: Path, size: Any) -> None:
    with pytest.raises(swapper.ConfigError, match="host_memory"):
        swapper.SwapManager(tmp_path, host_memory=size)
    assert not list(tmp_path.iterdir())


@pytest.mark.whole
@pytest.mark.parametrize(
    ("options", "named"),
    [({"resume": "maybe"}, "resume"), ({"backend": "floppy"}, "backend"), ({"commits": "free"}, "commits")],
)
def test_an_option_that_is_not_known_is_refused(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(swapper.ConfigError, match=named):
        swapper.SwapManager(tmp_path, host_memory="32MiB", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.whole
@pytest.mark.parametrize(
    "options",
    [
        {"params": "moon"},
        {"optimizer_state": "disk"},
        {"params": "device"},
        {"master_weights": 16},
    ],
)
def test_an_option_of_offload_that_is_not_known_is_refused_and_the_manager_stays_usable(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = Net()
    optimizer = adamw(model.parameters())
    with swapper.SwapManager(tmp_path, host_memory="32MiB") as manager:
        with pytest.raises(swapper.ConfigError, match=next(iter(options))):
            manager.offload(model, optimizer, **options)
        model, optimizer = manager.offload(model, optimizer)
        assert train_step(model, optimizer).isfinite()

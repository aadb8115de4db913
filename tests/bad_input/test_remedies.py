"""An error says what to do about its own cause, and a budget that is too small by how much."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from e2e.models import Net, loss_of, tokens
from e2e.twins import adamw, smallest_budget

import swapper
from swapper.durability.commit import publish_commit
from swapper.durability.directory import COMMIT_NAME, SPARE_NAME
from swapper.errors import REMEDIES
from swapper.io.replacing import replacing


def no_directory(path: Path) -> None:
    path.rmdir()


def directory_of_that_name(path: Path) -> None:
    (path / COMMIT_NAME).mkdir()


def directories_of_the_other_names(path: Path) -> None:
    (path / SPARE_NAME).mkdir()
    (path / (COMMIT_NAME + ".partial")).mkdir()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("spoil", "number"),
    [
        (no_directory, errno.ENOENT),
        (directory_of_that_name, errno.EISDIR),
        (directories_of_the_other_names, errno.EISDIR),
    ],
)
def test_a_commit_that_cannot_be_published_says_what_to_do(
    tmp_path: Path, spoil: Callable[[Path], None], number: int
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    spoil(directory)
    with pytest.raises(swapper.IoError, match=REMEDIES[number]) as caught:
        publish_commit(directory, b"content", durable=False)
    assert caught.value.errno == number
    assert "room" not in str(caught.value)


def test_a_file_whose_directory_went_away_says_what_to_do(tmp_path: Path) -> None:
    directory = tmp_path / "there"
    directory.mkdir()
    with pytest.raises(swapper.IoError, match=REMEDIES[errno.ENOENT]):
        with replacing(directory / "x", overwrite=False) as temporary:
            temporary.unlink()
            directory.rmdir()


@pytest.mark.whole
@pytest.mark.parametrize("directory", ["", [""], ["", "there"]])
def test_an_empty_name_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: object) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    with pytest.raises(swapper.DirectoryError, match="names no directory"):
        swapper.SwapManager(directory)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def named_addition(error: swapper.BudgetError) -> int:
    assert error.missing_bytes is not None and f"({error.missing_bytes} bytes)" in str(error), error
    return error.missing_bytes


class WholeTable(Net):
    """One operation of its forward, which autograd records, uses what its children use one after the other."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch) + torch.cat([p.flatten() for p in self.parameters()]).sum()


@pytest.mark.parametrize("use", ["gather", "forward"])
def test_what_does_not_fit_at_one_time_names_the_bytes_that_it_takes(tmp_path: Path, use: str) -> None:
    """The number that the error names is enough."""
    places = {"params": "nvme", "optimizer_state": "nvme"}
    make = Net if use == "gather" else WholeTable
    model = make()
    budget = smallest_budget(tmp_path, model, adamw(model.parameters()), **places)
    refusals = 0
    while True:
        model = make()
        (tmp_path / str(refusals)).mkdir()
        with swapper.SwapManager(tmp_path / str(refusals), host_memory=budget) as manager:
            manager.offload(model, adamw(model.parameters()), **places)
            try:
                if use == "gather":
                    with manager.gather(model):
                        assert all(torch.isfinite(p).all() for p in model.parameters())
                else:
                    loss_of(model, tokens())
            except swapper.BudgetError as refused:
                addition = named_addition(refused)
                assert addition > 0
                budget += addition
                refusals += 1
            else:
                break
    assert refusals == 1

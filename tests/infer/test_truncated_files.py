"""A file that becomes shorter beneath tensors of state_dict() never ends the process."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
from safetensors.torch import save_file

import swapper
from infer.small import make, on_meta

BUDGET = "4.5MiB"  # most weights are read in each pass


def by_torch_save(path, state):
    torch.save(state, path)


def by_truncate(path, state):
    os.truncate(path, 0)


def by_leaving_a_page(path, state):
    os.truncate(path, 4096)


def by_shell(path, state):
    subprocess.run(["sh", "-c", f"> {path}"], check=True)


def by_cp(path, state):
    (path.parent / "short").write_bytes(b"x" * 100)
    subprocess.run(["cp", path.parent / "short", path], check=True)


def by_unlink(path, state):
    path.unlink()


def by_rename(path, state):
    (path.parent / "short").write_bytes(b"x" * 100)
    (path.parent / "short").replace(path)


SHRINKS = (by_torch_save, by_truncate, by_leaving_a_page, by_shell, by_cp)
LEAVES_THE_BYTES = (by_unlink, by_rename)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("shorten", SHRINKS, ids=lambda way: way.__name__)
def test_a_file_that_became_shorter_is_named(tmp_path, shorten, suffix):
    path = tmp_path / f"model.{suffix}"
    reference, model = make(), on_meta()
    (save_file if suffix == "safetensors" else torch.save)(reference.state_dict(), path)
    swapper.load(model, path, host_memory=BUDGET)
    state = model.state_dict()
    view = state["head.weight"][:3].t()
    if shorten is by_torch_save:
        with pytest.raises(swapper.errors.CheckpointError, match=r"swapper\.checkpoint\.save"):
            shorten(path, state)
    else:
        shorten(path, state)
    for act in (
        lambda: state["head.weight"].sum(),
        lambda: view.clone(),
        lambda: torch.stack([view]),
        lambda: repr(view),
    ):
        with pytest.raises(swapper.errors.CheckpointError, match="was truncated to"):
            act()
    for act in (lambda: model.state_dict(), lambda: model.head.weight.sum(), lambda: swapper.loaded(model).verify()):
        with pytest.raises(swapper.errors.SwapperError):
            act()
    assert state["head.weight"].shape == reference.head.weight.shape
    swapper.loaded(model).unload()


@pytest.mark.parametrize("replace", LEAVES_THE_BYTES, ids=lambda way: way.__name__)
def test_a_file_that_is_replaced_as_a_whole_keeps_its_bytes_for_state_dict(tmp_path, replace):
    path = tmp_path / "model.safetensors"
    reference, model = make(), on_meta()
    save_file(reference.state_dict(), path)
    swapper.load(model, path, host_memory=BUDGET)
    state = model.state_dict()
    replace(path, state)
    assert all(torch.equal(value, state[name]) for name, value in reference.state_dict().items())
    swapper.loaded(model).unload()


def test_what_torch_writes_of_state_dict_is_plain(tmp_path):
    path = tmp_path / "model.pt"
    reference, model = make(), on_meta()
    torch.save(reference.state_dict(), path)
    swapper.load(model, path, host_memory=BUDGET)
    state = model.state_dict()
    torch.save(state, tmp_path / "plain.pt")
    save_file(state, tmp_path / "plain.safetensors")
    swapper.checkpoint.save(state, path, overwrite=True)
    for saved in (torch.load(tmp_path / "plain.pt", weights_only=True), torch.load(path, weights_only=True)):
        assert all(
            type(saved[name]) is torch.Tensor and torch.equal(saved[name], v)
            for name, v in reference.state_dict().items()
        )
    other = make()
    other.load_state_dict(state, assign=True)
    assert torch.equal(other.head.weight, reference.head.weight)
    swapper.loaded(model).unload()

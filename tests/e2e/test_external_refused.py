"""Files that frozen parameters cannot be read from, at the offload or later, are refused with the reason, and nothing is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import swapper
from e2e.external_files import half_frozen, saved, trained
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import adamw, send_away, smallest_budget
from swapper import ExternalWeights
from swapper.tensors.guarded_tensor import watch_of
from swapper.train.state.mapped_state import ShownPlace


def refused(directory: Path, model: nn.Module, error: type[Exception], match: str, **options: Any) -> None:
    """Offload; assert that it is refused, that the model is as it was, and that nothing is left in the directory."""
    before = {name: p if p.is_meta else p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw([p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))])
    with swapper.SwapManager(directory, "16MiB") as manager:
        with pytest.raises(error, match=match):
            manager.offload(model, optimizer if any(p.requires_grad for p in model.parameters()) else None, **options)
        assert list(manager._directory.path.glob("*.swap")) == []
    assert {name for name, p in model.named_parameters() if p.is_meta} == {n for n, p in before.items() if p.is_meta}


def test_other_values_than_the_file_has_are_refused(tmp_path: Path) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    with torch.no_grad():
        model.blocks[2].down.weight.view(-1)[-1] += 1
    match = r"blocks.2.down.weight has other values in the model than in .*base.safetensors"
    refused(tmp_path, model, swapper.CheckpointError, match, params="nvme", external=ExternalWeights(path=path))


def test_a_file_that_lacks_some_is_refused(tmp_path: Path) -> None:
    model = half_frozen()
    saved(model, path := tmp_path / "base.safetensors")
    tensors = load_file(path)
    save_file({n: t for n, t in tensors.items() if not n.startswith("blocks.3")}, path)
    match = r"lacks 2 of the model's 19 frozen parameters: blocks.3.up.weight, blocks.3.down.weight. Map its names"
    refused(tmp_path, model, swapper.CheckpointError, match, external=ExternalWeights(path=path))
    refused(
        tmp_path,
        model,
        swapper.CheckpointError,
        "lacks 19",
        external=ExternalWeights(path=path, rename=lambda name: "x." + name),
    )


def test_another_shape_or_dtype_is_refused(tmp_path: Path) -> None:
    model = half_frozen()
    tensors = load_file(saved(model, path := tmp_path / "base.safetensors"))
    for wrong in (tensors["head.weight"].bfloat16(), tensors["head.weight"][:-1].clone()):
        save_file({**tensors, "head.weight": wrong}, path)
        match = (
            r"frozen parameter head.weight is of torch.float32 \[512, 128\], and 'head.weight' in .*base.safetensors of"
        )
        refused(tmp_path, model, swapper.CheckpointError, match, external=ExternalWeights(path=path))


def test_what_is_not_one_run_of_bytes_is_refused(tmp_path: Path) -> None:
    model = half_frozen()
    state = {**model.state_dict(), "head.weight": model.head.weight.detach().T.contiguous().T}
    torch.save(state, path := tmp_path / "base.pt")
    match = r"'head.weight', frozen parameter head.weight, is not one run of bytes in .*base.pt: make one file"
    refused(tmp_path, model, swapper.CheckpointError, match, external=ExternalWeights(path=path))


def test_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    path = saved(model := Net(), tmp_path / "base.safetensors")
    refused(
        tmp_path,
        model,
        swapper.ConfigError,
        "the model has none: call requires_grad_",
        external=ExternalWeights(path=path),
    )
    refused(
        tmp_path, half_frozen(), swapper.ConfigError, r"say external=swapper.ExternalWeights\(path", external=str(path)
    )
    refused(
        tmp_path,
        half_frozen(),
        swapper.IoError,
        "nothing.safetensors",
        external=ExternalWeights(path=tmp_path / "nothing.safetensors"),
    )


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    os.truncate(path, path.stat().st_size - 1)
    refused(tmp_path, model, swapper.CheckpointError, "base.safetensors", external=ExternalWeights(path=path))


def test_what_has_no_values_anywhere_is_refused(tmp_path: Path) -> None:
    path = saved(half_frozen(), tmp_path / "base.safetensors")
    with torch.device("meta"):
        model = half_frozen()
    refused(
        tmp_path,
        model,
        swapper.UnsupportedError,
        "norm.weight is on the meta device",
        external=ExternalWeights(path=path),
    )
    with swapper.without_weights():
        model = Net().requires_grad_(False)
    model.register_buffer("scale", torch.zeros(1, device="meta"))
    refused(
        tmp_path,
        model,
        swapper.UnsupportedError,
        "buffer scale is on the meta device, and external",
        external=ExternalWeights(path=path),
    )


@pytest.mark.parametrize("change", ["touched", "cut off", "removed"])
def test_a_file_that_changes_underneath_ends_the_run_at_its_next_use(tmp_path: Path, change: str) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    with swapper.SwapManager(tmp_path, "8MiB") as manager:
        model, optimizer = manager.offload(model, trained(model), params="nvme", external=ExternalWeights(path=path))
        train_step(model, optimizer)
        loss = loss_of(model, tokens())
        loss.backward()
        if change == "touched":
            os.utime(path, ns=(1, 1))
        elif change == "cut off":
            os.truncate(path, path.stat().st_size // 2)
        else:
            path.unlink()
        for use in (optimizer.step, lambda: model(tokens()), lambda: manager.snapshot(tmp_path / "x.pt")):
            with pytest.raises(swapper.CheckpointError, match=r"base.safetensors .*frozen parameters are read from it"):
                use()
        del loss
        assert manager.step == 1


@pytest.mark.parametrize("shown", ["the user's file", "a swap file"])
def test_tensors_of_state_dict_whose_file_becomes_shorter_are_errors_and_do_not_end_the_process(
    tmp_path: Path, shown: str
) -> None:
    is_external = shown == "the user's file"
    model = half_frozen() if is_external else Net(depth=8)
    external = ExternalWeights(path=saved(model, tmp_path / "base.safetensors")) if is_external else None
    with swapper.SwapManager(tmp_path, "8MiB", commits=swapper.CommitPolicy(every=None)) as manager:
        model, _ = manager.offload(model, trained(model), params="nvme", optimizer_state="nvme", external=external)
        send_away(manager)
        state = [value for value in model.state_dict().values() if isinstance(watch_of(value), ShownPlace)]
        files = {part.file.path for value in state for part in watch_of(value).files}
        assert files
        assert ({path.name for path in files} == {"base.safetensors"}) == is_external
        views = [value.view(-1)[5:] for value in state]
        for file in files:
            os.truncate(file, 4096)
        for value in (*state, *views):
            for use in (
                lambda value=value: value.sum(),
                lambda value=value: value.numpy(),
                lambda value=value: repr(value),
            ):
                with pytest.raises(swapper.CheckpointError, match="was truncated to"):
                    use()


@pytest.mark.parametrize("write", [torch.save, save_file], ids=["torch.save", "safetensors"])
def test_what_is_saved_onto_the_file_of_frozen_parameters_is_whole_and_ends_the_run(
    tmp_path: Path, write: Callable[..., None]
) -> None:
    model = half_frozen()
    expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
    path = saved(model, tmp_path / "base.file")
    with swapper.SwapManager(tmp_path / "run", "8MiB") as manager:
        model, _ = manager.offload(model, trained(model), params="nvme", external=ExternalWeights(path=path))
        write(dict(model.state_dict()), path)
        found = torch.load(path) if write is torch.save else load_file(path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        with pytest.raises(swapper.CheckpointError, match=r"base.file .*frozen parameters are read from it"):
            model(tokens())


def test_a_read_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off between the look at it and the read."""
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    monkeypatch.setattr("swapper.train.layout.given_values.FrozenFiles.check_unchanged", lambda self: None)
    optimizer = trained(model)
    budget = smallest_budget(tmp_path, model, optimizer, params="nvme", external=ExternalWeights(path=path))
    with swapper.SwapManager(tmp_path, budget, commits=swapper.CommitPolicy(every=None)) as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", external=ExternalWeights(path=path))
        send_away(manager)
        os.truncate(path, 4096)
        with pytest.raises(swapper.IoError, match=r"base.safetensors"):
            model(tokens())

"""ZeRO checkpoints, laid out as DeepSpeed lays them out: every parameter is put together from the ranks' parts."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import swapper
from checkpoint.equality import bytes_of
from swapper.checkpoint.exporting import export

SHAPES = [{"a.weight": (7, 5), "a.bias": (7,), "scalar": ()}, {"b.weight": (3, 4, 2)}]


class Scaler:
    """Stands for the objects of DeepSpeed's own that its files hold, which nobody here can import or should run."""


def parameters() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for group in SHAPES for name, shape in group.items()}


def write(directory: Path, stage: int, world: int) -> dict[str, torch.Tensor]:
    """Write a checkpoint of `stage` by `world` ranks; returns what must come out."""
    whole = parameters()
    groups = [[whole[name] for name in group] for group in SHAPES]
    parts: list[list[torch.Tensor]] = [[] for _ in range(world)]
    for group in groups:
        if stage == 3:
            for rank in range(world):
                parts[rank].append(torch.cat([_fraction(tensor, rank, world) for tensor in group]))
        else:
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            flat = torch.nn.functional.pad(flat, (0, -flat.numel() % (2 * world)))
            for rank, part in enumerate(flat.chunk(world)):
                parts[rank].append(part.clone())
    folder = directory / "global_step3"
    folder.mkdir(parents=True)
    (directory / "latest").write_text("global_step3\n")
    frozen = torch.arange(9.0).view(3, 3)
    model: dict[str, Any] = {
        "module": OrderedDict({"running": torch.ones(4), "a.weight": whole["a.weight"].bfloat16()}),
        "buffer_names": ["running"],
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in SHAPES],
        "shared_params": {"tied": "b.weight"},
        "frozen_param_shapes": OrderedDict(frozen=torch.Size((3, 3))),
        "ds_version": "0.19",
    }
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    for rank in range(world):
        state = {"zero_stage": stage, "partition_count": world, key: parts[rank], "loss_scaler": Scaler()}
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        fragment = _fraction(frozen, rank, world) if stage == 3 else frozen
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save({**model, "frozen_param_fragments": {"frozen": fragment}}, folder / name)
    return {**whole, "running": torch.ones(4), "tied": whole["b.weight"], "frozen": frozen}


def _fraction(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """What a rank has of a parameter in stage 3: the same number of elements each, zeros behind the last."""
    each = -(-tensor.numel() // world)
    return torch.nn.functional.pad(tensor.reshape(-1), (0, each * world - tensor.numel()))[rank * each :][:each].clone()


@pytest.mark.whole
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 11])
def test_parameters_are_put_together_from_the_ranks_parts(stage: int, world: int, tmp_path: Path) -> None:
    expected = write(tmp_path / "run", stage, world)
    export(tmp_path / "run", tmp_path / "x.pt", "torch")
    loaded = torch.load(tmp_path / "x.pt")
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].shape == tensor.shape
        assert bytes_of(loaded[name]) == bytes_of(tensor), name
    export(tmp_path / "run" / "global_step3", tmp_path / "hf", "huggingface")


def test_missing_and_damaged_ranks_are_named(tmp_path: Path) -> None:
    write(tmp_path / "run", 3, 3)
    folder = tmp_path / "run" / "global_step3"
    last = folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    saved = last.read_bytes()
    last.unlink()
    with pytest.raises(swapper.CheckpointError, match=r"2 files .* of 3"):
        export(tmp_path / "run", tmp_path / "x.pt", "torch")
    last.write_bytes(saved[: len(saved) // 2])
    with pytest.raises(swapper.CheckpointError, match="rank_2"):
        export(tmp_path / "run", tmp_path / "x.pt", "torch")
    torch.save(
        {"optimizer_state_dict": {"zero_stage": 3, "partition_count": 3, "fp32_flat_groups": [torch.ones(2)]}}, last
    )
    with pytest.raises(swapper.CheckpointError, match="are wanted"):
        export(tmp_path / "run", tmp_path / "x.pt", "torch")
    assert not (tmp_path / "x.pt").exists()

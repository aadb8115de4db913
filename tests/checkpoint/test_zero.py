"""ZeRO checkpoints, laid out as DeepSpeed lays them out: every parameter is put together from the ranks' parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
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
        count = world if stage == 3 else [world] * len(SHAPES)  # of each group
        state = {"zero_stage": stage, "partition_count": count, key: parts[rank], "loss_scaler": Scaler()}
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


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return what puts `value` at a place, in the files that have this place."""

    def act(content: Any) -> None:
        *path, last = keys
        for key in path:
            content = content[key] if isinstance(content, list) else content.get(key, {})
        if not isinstance(content, dict) or last in content:
            content[last] = value

    return act


FLAT = ("optimizer_state_dict", "single_partition_of_fp32_groups")
PARTS = ("optimizer_state_dict", "fp32_flat_groups")
WEIGHT = OrderedDict({"a.weight": torch.Size((7, 5))})
DAMAGES: dict[str, tuple[int, Callable[[dict[str, Any]], None], str]] = {  # stage, change of each file, what is said
    "a matrix for a flat group": (
        2,
        put(*FLAT, value=[torch.ones(2, 2), torch.ones(24)]),
        "the flat groups are not flat",
    ),
    "no groups": (2, put(*FLAT, value=None), "is no known ZeRO checkpoint"),
    "a shape below 0": (2, put("param_shapes", value=[{"a.bias": (-7,)}]), "a parameter's shape is impossible"),
    "one name twice": (3, put("param_shapes", value=[WEIGHT, WEIGHT]), "two parameters have the same name"),
    "no shapes": (3, put("param_shapes", value=[3]), "a value is not a dict"),
    "a number for a name": (2, put("buffer_names", value=[3]), "a value is not a str"),
    "elements of nobody": (1, put("param_shapes", value=[WEIGHT]), "group 0 has .* of which parameters take 35"),
    "elements that are missing": (3, put(*PARTS, value=[torch.ones(2)]), "of 2 are wanted"),
    "a frozen one that is turned": (
        2,
        put("frozen_param_fragments", value={"frozen": torch.arange(9.0).view(3, 3).t()}),
        "frozen is not contiguous",
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", DAMAGES)
def test_parts_that_do_not_make_up_the_parameters_are_refused(name: str, tmp_path: Path) -> None:
    stage, change, says = DAMAGES[name]
    write(tmp_path / "run", stage, 2)
    for path in (tmp_path / "run" / "global_step3").iterdir():
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)
    with pytest.raises(swapper.CheckpointError, match=says):
        export(tmp_path / "run", tmp_path / "x.pt", "torch")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_without_the_models_files_no_names_are_known(tmp_path: Path) -> None:
    write(tmp_path / "run", 3, 2)
    for path in tmp_path.rglob("*_model_states.pt"):
        path.unlink()
    with pytest.raises(swapper.CheckpointError, match="the names of the parameters are in it"):
        export(tmp_path / "run", tmp_path / "x.pt", "torch")

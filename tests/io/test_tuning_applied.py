"""The settings that `swapper tune` kept are in force wherever an engine is opened for that drive."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import swapper
from swapper import ConfigError
from swapper.cli import app
from swapper.io.drives import Tuning, find_tuning, keep_tuning, tuning_path
from swapper.io.engines import PAGES_DEPTH, open_engine, shared_engine
from swapper.runtime.sizes import format_bytes

TUNED = Tuning(piece_bytes=192 << 10, depth=7, backend="threads", read_bytes_per_s=1e9, write_bytes_per_s=1e9)
SETTINGS = (TUNED.piece_bytes, TUNED.depth, TUNED.backend)


@pytest.fixture(autouse=True)
def own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def settings_of(engine: Any) -> tuple[int, int, str]:
    return engine.piece_bytes, engine.depth, engine.backend


def of_a_training(directory: Path, **options: Any) -> tuple[int, int, str]:
    (directory / "run").mkdir()
    model = nn.Linear(64, 64)
    with swapper.SwapManager(directory / "run", host_memory="64MiB", **options) as manager:
        manager.offload(model, torch.optim.AdamW(model.parameters()))
        return settings_of(manager.current.run.engine)


def of_a_loaded_model(directory: Path) -> tuple[int, int, str]:
    save_file({"weight": torch.ones(256, 256), "bias": torch.ones(256)}, directory / "model.safetensors")
    model = swapper.load(nn.Linear(256, 256), directory / "model.safetensors", host_memory="64MiB")
    return settings_of(swapper.loaded(model)._streaming.engine)


def of_checkpoints(directory: Path) -> tuple[int, int, str]:
    return settings_of(shared_engine(directory / "x.pt"))


@pytest.mark.whole
@pytest.mark.parametrize("opened", [of_a_training, of_a_loaded_model, of_checkpoints])
def test_a_kept_tuning_changes_the_settings_of_every_engine(
    tmp_path: Path, opened: Callable[[Path], tuple[int, int, str]]
) -> None:
    before = opened(tmp_path)
    assert before != SETTINGS
    keep_tuning(tmp_path, TUNED)
    (tmp_path / "again").mkdir()
    assert opened(tmp_path / "again") == SETTINGS


def test_a_backend_that_the_user_chose_is_not_replaced(tmp_path: Path) -> None:
    keep_tuning(tmp_path, Tuning(192 << 10, 7, "aio", 1e9, 1e9))
    assert of_a_training(tmp_path, backend="threads")[2] == "threads"


def test_doctor_says_which_settings_are_in_force(tmp_path: Path) -> None:
    keep_tuning(tmp_path, TUNED)
    done = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    found = {finding["what"]: finding["found"] for finding in json.loads(done.stdout)}["Tuning"]
    assert f"in force: {format_bytes(TUNED.piece_bytes)} x {TUNED.depth} by {TUNED.backend}" in found


@pytest.mark.whole
@pytest.mark.parametrize(
    "wrong",
    [
        {"piece_bytes": 100}, {"piece_bytes": "1MiB"}, {"depth": 0}, {"depth": True}, {"depth": 1 << 40},
        {"backend": "chaos"}, {"backend": 3}, {"read_bytes_per_s": 0}, {"read_bytes_per_s": float("nan")}, {"other": 1},
    ],
)  # fmt: skip
def test_a_tuning_that_says_nonsense_is_not_used_and_said(
    tmp_path: Path, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = keep_tuning(tmp_path, TUNED)
    known = json.loads(path.read_text())
    for entry in known.values():
        entry.update(wrong)
    path.write_text(json.dumps(known))
    with caplog.at_level(logging.WARNING, logger="swapper"):
        assert find_tuning(tmp_path) is None
    assert str(tuning_path()) in caplog.text
    engine = open_engine([tmp_path])
    assert settings_of(engine)[:2] == (1 << 20, PAGES_DEPTH)
    engine.close()


def test_a_file_of_tunings_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("a file")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with pytest.raises(ConfigError, match=r"config/swapper/drives.json cannot be written"):
        keep_tuning(tmp_path, TUNED)

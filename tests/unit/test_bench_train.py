"""tools/bench_train prints the figures of any step, also of one that moves nothing."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_train"
MB = 10**6
SPEED = {"read_bytes_per_s": 500.0 * MB, "write_bytes_per_s": 500.0 * MB, "both_bytes_per_s": 800.0 * MB}


@pytest.fixture
def bench_train(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # none in the tools' folder
    monkeypatch.syspath_prepend(TOOL.parent)
    loader = SourceFileLoader("bench_train", str(TOOL))
    spec = importlib.util.spec_from_loader("bench_train", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_a_step_moves_what_the_documented_formula_says(bench_train: ModuleType) -> None:
    step_bytes = bench_train.step_bytes
    assert step_bytes(1, parameters_on_nvme=False, masters=True) == (12, 12)
    assert step_bytes(1, parameters_on_nvme=True, masters=True) == (16, 14)
    assert step_bytes(2, parameters_on_nvme=True, masters=True, muon=1) == (28, 24)
    assert step_bytes(1, parameters_on_nvme=False, masters=False) == (8, 8)
    assert step_bytes(1, parameters_on_nvme=True, masters=False) == (20, 12)
    assert step_bytes(1000, parameters_on_nvme=False, masters=True, state_codec="split") == (10125, 10125)
    assert step_bytes(1000, parameters_on_nvme=True, masters=True, state_codec="bf16") == (12125, 8125)
    assert step_bytes(1000, parameters_on_nvme=True, masters=True, state_codec="8bit") == (9187, 5187)
    assert step_bytes(1000, parameters_on_nvme=True, masters=False, state_codec="8bit") == (14187, 6187)


def measured(moved_bytes: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures of the swapped process and of the one in memory, where a step moves these bytes each way."""
    swapped = {
        "parameters": MB,
        "muon_parameters": 0,
        "budget_bytes": 100 * MB,
        "losses": [[2.0], [1.0]],
        "step_s": 0.2,
        "mean_step_s": 0.2,
        "cpu_s": 0.3,
        "parks": [],
        "last_step": "",
        "growth_bytes": 90 * MB,
        "drive": [SPEED, SPEED],
        "device_read_bytes_a_step": moved_bytes,
        "device_written_bytes_a_step": moved_bytes,
        "planned_read_bytes_a_step": moved_bytes,
        "planned_written_bytes_a_step": moved_bytes,
    }
    reference = {"losses": [[2.0], [1.0]], "compute_s": 0.1, "step_s": 0.1, "cpu_s": 0.2, "growth_bytes": 80 * MB}
    return swapped, reference


@pytest.mark.whole
@pytest.mark.parametrize("moved_bytes, said", [(0, "no byte was moved"), (12 * MB, "s more a GB")])
def test_a_step_is_shown_whatever_it_moves(
    bench_train: ModuleType, capsys: pytest.CaptureFixture[str], moved_bytes: float, said: str
) -> None:
    options = bench_train.parse_arguments(["--placement", "state"])
    bench_train.show(bench_train.combine(options, *measured(moved_bytes), {}))
    shown = " ".join(capsys.readouterr().out.split())
    assert said in shown
    assert f"{moved_bytes / MB:.0f} MB read" in shown and "equal to those in memory in 2 steps" in shown


def test_a_park_is_compared_with_the_time_of_its_bytes(bench_train: ModuleType) -> None:
    swapped, _ = measured(MB)
    ways = {
        "park": {"seconds": 0.6, "read_bytes": 0, "written_bytes": 250 * MB},
        "take back": {"seconds": 0.2, "read_bytes": 0, "written_bytes": 0},
    }
    swapped["parks"] = [ways, {**ways, "park": {**ways["park"], "seconds": 0.5}}, ways]
    assert bench_train.park_rows({"swapped": swapped}) == [
        ("Park", "0.60 s; 0 MB read, 250 MB written, which take 0.50 s: 1.20 times"),
        ("Take back", "0.20 s; 0 MB read, 0 MB written"),
    ]


def test_of_several_ranks_the_processors_of_all_are_shown(bench_train: ModuleType) -> None:
    swapped, reference = measured(MB)
    figures = {"ranks": 4, "processors": 2, "swapped": swapped, "reference": reference}
    [(_, text)] = bench_train.processors(figures)
    assert text.startswith("2 need 0.15 s for a step of all ranks") and text.endswith("0.10 s in memory")
    assert bench_train.processors({**figures, "ranks": None}) == []


def test_losses_are_compared_with_those_of_deepspeed(bench_train: ModuleType) -> None:
    peer = {"losses": [2.0, 1.0], "version": "0.19.8", "step_s": 3.0, "growth_bytes": 4e6}
    swapped = {"losses": [[2.0], [0.8], [0.5]], "step_s": 1.5, "growth_bytes": 2e6}
    [(name, text)] = bench_train.peer_rows(peer, swapped)
    assert name == "DeepSpeed 0.19.8"
    assert "2.00 times as long" in text and "differ by 25.0% at most in 2 steps" in text

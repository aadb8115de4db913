"""tools/bench_pager measures the pager that there is."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_pager"


def test_the_benchmark_of_the_control_plane_runs(monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # none beside the tool
    loader = SourceFileLoader("bench_pager", str(TOOL))
    spec = importlib.util.spec_from_loader("bench_pager", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    figures = module.measure(700)
    assert 600 < figures["pages"] <= 700
    assert figures["us_a_page"] > 0

"""Traces: what was recorded is what happened, in a form that the viewers take."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import swapper
from e2e.models import Net, train_step
from e2e.processes import run_python
from e2e.twins import Twins
from swapper.cli import app
from swapper.runtime.counters import LANES, TRACKS, Trace
from swapper.train.session.training_session import TrainingSession

MakeTwins = Callable[..., Twins]


def spans_of(path: Path) -> list[dict[str, Any]]:
    """Return the spans of a trace, its structure checked as the viewers need it."""
    content = json.loads(path.read_text())
    assert set(content) == {"displayTimeUnit", "traceEvents", "otherData"}
    events = [event for event in content["traceEvents"] if event["ph"] != "C"]  # those of memory are samples
    named = {event["tid"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) + sum(event["ph"] == "M" for event in events) == len(events)
    by_thread = defaultdict(list)
    for span in spans:
        assert {"name", "cat", "ts", "dur", "pid", "tid", "args"} <= span.keys()
        assert span["ts"] >= 0 and span["dur"] >= 0 and span["tid"] in named
        assert TRACKS[span["tid"] // LANES - 1] == span["cat"]
        by_thread[span["tid"]].append((span["ts"], span["ts"] + span["dur"]))
    for times in by_thread.values():
        times.sort()
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in itertools.pairwise(times)), "they overlap"
    return spans


def test_a_trace_has_every_transfer_phase_and_update_of_its_time(twins: MakeTwins, tmp_path: Path) -> None:
    pair = twins(Net(), wait=True)
    pair.offload()
    manager = pair.manager
    assert manager is not None
    pair.train(train_step, steps=2)
    manager.current.run.engine.drain()
    manager.current.run.pager.flush()
    before = manager.counters.snapshot()
    with manager.trace(tmp_path / "trace.json"):
        pair.train(train_step, steps=2)
        manager.current.run.engine.drain()
        manager.current.run.pager.wait_for_writes()
    after = manager.counters.snapshot()
    spans = spans_of(tmp_path / "trace.json")
    moved = {track: sum(s["args"]["nbytes"] for s in spans if s["cat"] == track) for track in ("reads", "writes")}
    assert moved["writes"] == after["bytes_written"] - before["bytes_written"] > 0
    assert 0 <= after["bytes_read"] - before["bytes_read"] - moved["reads"] <= manager.counters.pool_bytes
    phases = [span["name"] for span in spans if span["cat"] == "phases"]
    assert [name for name in phases if name != "between"] == ["forward", "backward", "step"] * 2
    updates = sum(span["dur"] for span in spans if span["cat"] == "updates")
    assert updates / 1e6 == pytest.approx(after["update_s"] - before["update_s"], abs=1e-3)
    leased = {span["name"] for span in spans if span["cat"] == "leases"}
    assert any("'param'" in name for name in leased) and any("'slice'" in name for name in leased)
    assert any("blocks.1" in span["name"] for span in spans if span["cat"] == "reads")
    assert manager.counters.trace is None
    pair.train(train_step, steps=1)  # nobody records any more
    pair.finish()


def test_memory_is_bounded_and_the_last_spans_stay(tmp_path: Path) -> None:
    trace = Trace(max_spans=10)
    for number in range(100):
        trace.add("waits", f"wait {number}", float(number), number + 1.0)
    trace.write(tmp_path / "trace.json")
    assert [span["name"] for span in spans_of(tmp_path / "trace.json")] == [
        f"wait {number}" for number in range(90, 100)
    ]
    assert trace.dropped == 90 and "90 earlier" in (tmp_path / "trace.json").read_text()


def test_what_overlaps_lies_in_lanes(tmp_path: Path) -> None:
    trace = Trace()
    began_s = trace._began_s
    for begin, end in [(0, 4), (1, 2), (2, 3), (3, 5), (4, 6)]:
        trace.add("reads", f"{begin}-{end}", began_s + begin, began_s + end)
    trace.write(tmp_path / "trace.json")
    lanes = {span["name"]: span["tid"] % LANES for span in spans_of(tmp_path / "trace.json")}
    assert lanes == {"0-4": 0, "1-2": 1, "2-3": 1, "3-5": 1, "4-6": 0}


def test_a_file_that_is_there_stays_and_a_second_trace_is_refused(twins: MakeTwins, tmp_path: Path) -> None:
    pair = twins(Net())
    assert pair.manager is not None
    (tmp_path / "mine").write_text("mine")
    with (
        pytest.raises(swapper.CheckpointError, match=r"choose another name, or remove it$"),
        pair.manager.trace(tmp_path / "mine"),
    ):
        pass
    assert (tmp_path / "mine").read_text() == "mine"
    with pair.manager.trace(tmp_path / "a"):
        with pytest.raises(swapper.StateError, match="take one of the two out"), pair.manager.trace(tmp_path / "b"):
            pass
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["a", "mine"]
    pair.close()


def test_a_run_that_ends_by_an_error_leaves_its_trace(
    twins: MakeTwins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWAPPER_TRACE", str(tmp_path / "trace.json"))
    pair = twins(Net())
    pair.train(train_step, steps=1)

    def fail(run: TrainingSession) -> None:
        raise swapper.IoError("write", "the drive", 0, 4096, 28)

    monkeypatch.setattr(TrainingSession, "finish", fail)
    with pytest.raises(swapper.IoError):
        pair.manager.close()
    assert "step" in {span["name"] for span in spans_of(tmp_path / "trace.json")}


SCRIPT = """
import sys, swapper
from e2e.models import Net, train_step
from e2e.twins import adamw
for name in sys.argv[1:3]:
    with swapper.SwapManager(name, host_memory="32MiB") as manager:
        model = Net()
        model, optimizer = manager.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        train_step(model, optimizer)
sys.exit(int(sys.argv[sys.argv.index("--code") + 1]))
"""


def test_the_command_runs_a_script_and_leaves_a_trace_of_each_manager(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    runs = [tmp_path / "first", tmp_path / "second"]
    for directory in runs:
        directory.mkdir()
    output = tmp_path / "out.json"
    arguments = ["trace", "-o", str(output), str(script), *map(str, runs), "--code", "3"]
    done = run_python("-m", "swapper.__main__", *arguments)
    assert done.returncode == 3, done.stderr
    assert "out-2.json, out.json" in done.stderr
    for name in ("out.json", "out-2.json"):
        assert {span["cat"] for span in spans_of(tmp_path / name)} >= {"phases", "updates", "leases", "writes"}
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2 and "exists" in again.stderr

"""`swapper report`: a page of a real trace, as a real browser shows it, and the figures in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from e2e.browser import labels_wrong, needs_browser, shown
from e2e.models import layers, layers_step
from e2e.twins import Twins
from swapper.cli import app
from swapper.cli.report import BINS, figures, page_of
from swapper.io.drives import Tuning, keep_tuning

MakeTwins = Callable[..., Twins]


@pytest.fixture
def traced(twins: MakeTwins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[dict[str, Any]]]:
    """A trace of three steps on a drive that was tuned, and what `stats` said of them."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    keep_tuning(tmp_path, Tuning(1 << 20, 8, "threads", 2e9, 1e9))
    pair = twins(layers())
    pair.train(layers_step, steps=1)
    manager, told = pair.manager, []
    assert manager is not None
    with manager.trace(tmp_path / "trace.json"):
        for _ in range(3):
            pair.both(layers_step)
            told.append(manager.stats().as_dict())
    pair.close()
    return tmp_path / "trace.json", told


def test_the_figures_are_those_of_the_steps(traced: tuple[Path, list[dict[str, Any]]]) -> None:
    path, told = traced
    found = figures(path)
    assert found["drive"] == {"read": 2e9, "write": 1e9}
    steps = {step["number"]: step for step in found["steps"]}
    assert set(steps) >= {2, 3, 4}
    assert [steps[number]["stats"] for number in (2, 3, 4)] == told
    for number in (3, 4):
        step = steps[number]
        for kind, name in (("reads", "read_bytes"), ("writes", "written_bytes")):
            moved = sum(step["drive"][kind]) * step["seconds"] / BINS
            in_trace = [json.loads(f'"{what}"') for _, what, *_ in step["tracks"][kind]]
            assert len(in_trace) > 0
            assert moved == pytest.approx(told[number - 2][name], rel=0.35), "transfers overlap the steps' borders"
        waited = sum(seconds for _, kind, seconds in step["waits"] if kind != "rank")
        assert waited == pytest.approx(told[number - 2]["read_wait_s"] + told[number - 2]["write_wait_s"]
                                       + told[number - 2]["frame_wait_s"], rel=0.05, abs=2e-3)  # fmt: skip
        assert all(
            re.fullmatch(r"\d+, (parameters|optimizer state|gradients)|a copy (to|from) .*", module)
            for module, kind, _ in step["waits"]
            if kind != "rank"
        )
        assert step["memory"]
        for _, kinds in step["memory"]:
            assert set(kinds) == {"resident", "param", "state", "grad", "free"}
            assert kinds["param"] + kinds["state"] > 0


@needs_browser
def test_a_browser_shows_the_page(traced: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    path, _ = traced
    done = CliRunner().invoke(app, ["report", str(path)])
    assert done.exit_code == 0, done.output
    page = path.with_suffix(".html")
    text = page.read_text()
    assert not re.findall(r"(?:src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", text), (
        "it needs nothing else"
    )
    document = shown(page)
    assert "data-error" not in document, document[-500:]
    assert re.search(r'<body[^>]* data-shown="\d+"', document)
    for heading in ("Timeline", "The drive", "Waits by module", "Memory by kind", "Phases"):
        assert f"<h2>{heading}</h2>" in document
    for track in ("phases", "updates", "leases", "reads", "writes"):
        assert f'data-track="{track}"' in document
    assert 'data-limit="reads"' in document and 'data-drive="writes"' in document and 'data-memory="state"' in document
    drawn = document.split('<div id="page">')[1].split("<script")[0]
    assert "NaN" not in drawn and "undefined" not in drawn
    assert document.count("<option") == len(figures(path)["steps"])


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_each_label_can_be_read(traced: tuple[Path, list[dict[str, Any]]], dark: bool) -> None:
    path, _ = traced
    assert CliRunner().invoke(app, ["report", str(path)]).exit_code == 0
    assert labels_wrong(path.with_suffix(".html"), dark) == []


def test_a_page_is_not_replaced_and_a_wrong_file_is_named(tmp_path: Path) -> None:
    def error(content: str) -> str:
        path = tmp_path / "x.json"
        path.write_text(content)
        done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["report", str(path)])
        assert done.exit_code == 1, done.output
        return done.output

    span = '{"ph": "X", "cat": "phases", "name": "forward", "ts": 0, "dur": 9, "tid": 1000, "args": {"step": 1}}'
    read = span.replace("phases", "reads").replace('"step": 1', '"nbytes": "9"')
    wrongs = ["nonsense", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}']
    for spans in (f"{span}, {read}", span.replace('{"step": 1}', "[1]"), span.replace('"ts": 0', '"ts": "0"')):
        wrongs.append(f'{{"traceEvents": [{spans}]}}')
    for other in ("[1]", '{"steps": 3}', '{"steps": [3]}'):
        wrongs.append(f'{{"traceEvents": [{span}], "otherData": {other}}}')
    for wrong in wrongs:
        assert "is no trace of swapper" in error(wrong), wrong
    assert "has no phase of a step" in error('{"traceEvents": []}')
    missing = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["report", str(tmp_path / "absent.json")])
    assert missing.exit_code == 1 and "cannot be read: No such file" in missing.output
    (tmp_path / "x.json").write_text('{"traceEvents": [' + span + "]}")
    (tmp_path / "x.html").write_text("mine")
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["report", str(tmp_path / "x.json")])
    assert done.exit_code == 2 and "x.html exists already: name a new file" in done.output
    assert (tmp_path / "x.html").read_text() == "mine"


def test_names_cannot_end_the_script() -> None:
    assert "</script><b>" not in page_of({"name": "</script><b>", "drive": None, "steps": []})

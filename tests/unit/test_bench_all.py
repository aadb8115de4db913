"""tools/bench_all measures its rows at one commit, keeps what is done when it is stopped, and the page shows its file."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "tools/bench_all", "tools/bench_rows.py", "tools/bench_pager", "tools/processes.py", "tools/docs_pictures", "README.md",
    "docs/benchmarks/index.md", "docs/benchmarks/figures.json", "docs/benchmarks/gpu.json", ".gitignore",
)  # fmt: skip
CHEAP = """
NEEDS["nothing"] = ("there is nothing", lambda: False)
READ |= {"bench_pager": {"us": lambda of: of[-1]["us_a_page"]}, "waiting": {"answer": lambda of: of["answer"]}, "failing": {}}
ROWS = (
    Row("pager", "A pager", "tools/bench_pager --pages 2000", 0.1, (Figure("us", "1,000,000 us a page", "{:.1f} us"),)),
    Row("waiting", "Two bars", "tools/waiting", 0.1, (Figure("answer", "43 at most", "{}"),
        Figure("answer / pager.us", "1,000,000 times", "{:.3f}", at_least=True), Figure("absent.us", "1 us"))),
    Row("failing", "Fails", "tools/failing", 0.1, (Figure("answer", "43 at most", "{}"),)),
    Row("absent", "Absent", "tools/waiting", 0.1, (Figure("answer", "43 at most", "{}"),), needs="nothing"),
)
CHARTS = (("Bars", (("pager", "pager.us", "pager.us"), ("absent", "absent.us", "absent.us"))),)
"""
WAITING = """#!/usr/bin/env python3
import json, pathlib, signal, sys
beside = pathlib.Path(__file__).parents[2]
if not (beside / "answer").exists():
    pathlib.Path("scratch").write_text("a file that it would remove at its end")
    with open(beside / "started", "w") as pipe:
        print(pathlib.Path.cwd(), file=pipe)
    signal.pause()
pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({"answer": 42}))
"""


def commit_all(checkout: Path) -> None:
    author = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for words in (("add", "-A"), (*author, "commit", "-q", "-m", "a commit")):
        subprocess.run(["git", *words], cwd=checkout, check=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with a table of cheap rows, one of which waits until it is stopped."""
    if not (ROOT / ".venv").is_dir():
        pytest.skip("tools/setup has made no .venv here")
    root = tmp_path / "checkout"
    for name in COPIED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "docs" / "assets").mkdir()
    (root / ".venv").symlink_to(ROOT / ".venv")
    with (root / "tools" / "bench_rows.py").open("a") as table:
        table.write(CHEAP)
    for name, text in (("waiting", WAITING), ("failing", "#!/bin/sh\necho 'no | luck'; exit 3\n")):
        (root / "tools" / name).write_text(text)
        (root / "tools" / name).chmod(0o755)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    (root / ".git" / "info" / "exclude").write_text(".venv\n")
    commit_all(root)
    return root


def bench_all(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, checkout / "tools" / "bench_all", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def rows(checkout: Path) -> dict[str, list[str]]:
    """Return bar, measured, status and commit of each row of the file, after a look whether the page shows them."""
    check = [sys.executable, checkout / "tools" / "docs_pictures", "--check"]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 0
    figures = json.loads((checkout / "docs" / "benchmarks" / "figures.json").read_text())
    page = (checkout / "docs" / "benchmarks" / "index.md").read_text()
    assert all(f"| {' | '.join(row)} |" in page for row in figures["rows"])
    assert figures["about"].replace(" ", "") in page.replace("\n", "").replace(" ", "")
    return {what: cells for what, _, *cells in figures["rows"]}


def test_rows_are_measured_at_one_commit_and_kept_when_it_is_stopped(checkout: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    command = [sys.executable, checkout / "tools" / "bench_all"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        scratch = Path((tmp_path / "started").read_text().strip())
        assert (scratch / "scratch").exists()
        running.send_signal(signal.SIGINT)
        told, _ = running.communicate(timeout=100)
    assert running.returncode == 130 and "1 of 3: pager" in told and "the same command continues" in told
    assert not scratch.exists() and not [*(checkout / "build").rglob("bench-all-*")]
    commit = subprocess.check_output(["git", "log", "-1", "--format=`%h`"], cwd=checkout, text=True).strip()
    found = rows(checkout)
    pager = found["A pager"]
    assert pager[1].endswith(" us") and pager[2:] == ["met", commit]
    assert found["Two bars"][1:] == ["not run at this commit", "not measured", "-"]
    assert found["Absent"][1:] == ["there is nothing", "not measured", "-"]

    (tmp_path / "answer").touch()
    ran = bench_all(checkout)
    assert ran.returncode == 1 and "1 of 2: waiting" in ran.stdout and "pager (" not in ran.stdout, ran.stderr
    found = rows(checkout)
    assert found["A pager"] == pager
    bars, measured, status, _ = found["Two bars"]
    assert bars == "43 at most; 1,000,000 times; 1 us" and status == "met; not met; not measured"
    assert measured.startswith("42; ") and measured.endswith("; -")
    assert found["Fails"][1:] == ["failed: exit code 3: no luck", "not measured", "-"]
    ran = bench_all(checkout)
    assert "1 of 1: failing" in ran.stdout  # what has failed is run again

    file = checkout / "docs" / "benchmarks" / "figures.json"
    before = file.read_text()
    with (checkout / "tools" / "processes.py").open("a") as module:
        module.write("# another line\n")
    refused = bench_all(checkout)
    assert refused.returncode == 2 and " M tools/processes.py" in refused.stderr and "docs/" not in refused.stderr
    assert file.read_text() == before
    commit_all(checkout)
    assert bench_all(checkout, "--rows", "waiting").returncode == 0
    found = rows(checkout)
    assert found["A pager"][1:] == ["not run at this commit", "not measured", "-"] and found["Two bars"][3] != commit


def test_the_table_names_tools_options_and_figures_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    table: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "bench_rows.py"))
    named = {row.name: row for row in table["ROWS"]}
    assert len(named) == len(table["ROWS"]) <= 27
    texts = [
        (text, row) for row in named.values() for figure in row.figures for text in (figure.value, figure.also) if text
    ]
    texts += [(text, None) for _, bars in table["CHARTS"] for _, *values in bars for text in values]
    for text, row in texts:
        for word in text.split(" / "):
            name, _, figure = word.rpartition(".")
            assert figure in table["READ"][(named[name] if name else row).tool], text
    for row in named.values():
        source = (ROOT / row.words[0]).read_text()
        assert [word for word in row.words if word.startswith("--") and f'"{word}"' not in source] == []
        assert row.needs in ("", *table["NEEDS"]) and all(isinstance(figure.is_met(0), bool) for figure in row.figures)

"""Every Python block of the README and of the guides runs as it is written, and the commands that pages name exist.

The blocks of a page run in order, in one namespace, in an empty directory. `<!-- python` to `-->` is a block that readers do not
see: what the page takes as given. `<!-- needs: MODULE -->` before a block skips it without that module. `<!-- printed -->` before
a block of text: the page's code prints it. Pages of docs/reference show fragments, which must parse (tests/unit/test_docs.py).
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from swapper.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INTERNAL = ("architecture.md", "internals.md", "decisions/", "benchmarks/", "reference/")
GUIDES = [page for page in sorted(DOCS.rglob("*.md")) if not str(page.relative_to(DOCS)).startswith(INTERNAL)]
RUN = [ROOT / "README.md", *GUIDES]
BLOCK = re.compile(
    r"(?:^<!-- (?P<condition>needs: \w+) -->\n+)?(?:^```python\n(?P<shown>.*?)^```|^<!-- python\n(?P<hidden>.*?)^-->)",
    re.MULTILINE | re.DOTALL,
)
PRINTED = re.compile(r"^<!-- printed -->\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
MAX_WORDS = 1200


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str | None]]:
    """Return the blocks, each behind as many empty lines as stand before it, so that a traceback names the page's line."""
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        kind = "shown" if match["shown"] is not None else "hidden"
        found.append(("\n" * text.count("\n", 0, match.start(kind)) + match[kind], match["condition"]))
    return found


def missing(condition: str | None) -> str | None:
    if condition is not None and importlib.util.find_spec(condition.removeprefix("needs: ")) is None:
        return condition
    return None


@pytest.mark.parametrize("page", [page for page in RUN if blocks(page)], ids=page_name)
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    namespace: dict[str, Any] = {"__name__": "__main__"}
    left_out = []
    try:
        for code, condition in blocks(page):
            if reason := missing(condition):
                left_out.append(reason)
            else:
                exec(compile(code, str(page), "exec"), namespace)
    finally:
        if manager := namespace.get("manager"):
            manager.close()
        namespace.clear()  # loaded models end with their last reference
        gc.collect()
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    printed = capsys.readouterr().out
    for text in PRINTED.findall(page.read_text()):
        assert text in printed
    if left_out and len(left_out) == len([code for code, condition in blocks(page) if condition]) == len(blocks(page)):
        pytest.skip("; ".join(left_out))


def imports(code: str) -> set[str]:
    """Return the names that code imports."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {(alias.asname or alias.name).split(".")[0] for node in nodes for alias in node.names}


@pytest.mark.parametrize("page", [page for page in RUN if blocks(page)], ids=page_name)
def test_what_a_page_shows_imports_what_it_uses(page: Path) -> None:
    """A reader does not see what a hidden block imports."""
    shown, hidden = ([match[kind] or "" for match in BLOCK.finditer(page.read_text())] for kind in ("shown", "hidden"))
    used = {node.id for code in shown for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    assert used & set().union(*map(imports, hidden)) - set().union(*map(imports, shown)) == set()


def test_the_script_of_the_guide_to_ranks_runs_again(tmp_path: Path) -> None:
    """It ends as it begins: a snapshot is never replaced."""
    scripts = [match["shown"] for match in BLOCK.finditer((DOCS / "guides" / "ranks.md").read_text()) if match["shown"]]
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", scripts[0]], cwd=tmp_path, env={**environment, "MASTER_PORT": "0"}, check=True
        )
    assert (tmp_path / "step-3").is_dir()


def commands(page: Path) -> list[str]:
    fences = re.findall(r"^```(?:sh|console)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(fences).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.startswith("swapper ")]


@pytest.mark.parametrize(
    "page", [page for page in [ROOT / "README.md", *DOCS.rglob("*.md")] if commands(page)], ids=page_name
)
def test_commands_that_a_page_shows_have_their_options(page: Path) -> None:
    """Placeholders in capitals, [optional] parts and alternatives a|b are as in a manual page."""
    group: Any = get_command(app)
    wrong = []
    for line in commands(page):
        words = shlex.split(re.sub(r"[\[\]]", " ", line))[1:]
        command = group.commands.get(words[0])
        known = {option for one in command.params for option in one.opts} | {"--help"} if command else set()
        unknown = [word for word in words[1:] if word.startswith("--") and word.split("=")[0] not in known]
        if command is None or (unknown and words[0] != "trace"):
            wrong.append(line)
    assert wrong == []


def short_pages() -> list[Path]:
    """Return README and the site's pages, without those of its reference and internals."""
    nav = yaml.safe_load((ROOT / "tools" / "mkdocs.yml").read_text())["nav"]
    sections = [pages for entry in nav for title, pages in entry.items() if title not in ("Reference", "Internals")]
    listed = [section if isinstance(section, list) else [{"": section}] for section in sections]
    return [ROOT / "README.md", *(DOCS / name for section in listed for entry in section for name in entry.values())]


@pytest.mark.parametrize("page", short_pages(), ids=page_name)
def test_a_page_can_be_read_in_five_minutes(page: Path) -> None:
    assert len(page.read_text().split()) <= MAX_WORDS

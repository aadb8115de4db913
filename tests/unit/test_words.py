"""The words of prose: plain English and the field's terms, in sources, docs and tools."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COVERED = ("swapper", "csrc", "docs", "tools", "examples", "README.md", "CHANGELOG.md")
LOGS = {"docs/benchmarks/notebook.md"}
"""Quotes earlier texts word for word."""
BANNED = re.compile(
    r"\b(anew|whoever|owed|by turns|at one time|so many|is told|comes? home|stays? away|shel(f|ves)"
    r"|lets? go of|(go|goes|gone|going) on from|ha(s|ve) not (the|its|their))\b",
    re.IGNORECASE,
)
"""Words of an earlier dialect that have a plain equivalent: again, anyone, deferred, alternating, at once, this many ..."""
OPENINGS = re.compile(r"(What|Which|Where|How|When|Who|Whose|Why|Whether)\b")
"""A module opens with what it does, not with a clause."""


def _files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", *COVERED], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so the files of the project are not known")
    return [name for name in listed.stdout.splitlines() if name not in LOGS and (ROOT / name).is_file()]


def _banned_lines(name: str) -> list[str]:
    lines = (ROOT / name).read_text(errors="replace").splitlines()
    return [f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if BANNED.search(line)]


def _opening(name: str) -> str:
    text = (ROOT / name).read_text()
    if name.endswith((".h", ".cpp")):
        return text.removeprefix("// ")
    return ast.get_docstring(ast.parse(text)) or ""


def test_prose_avoids_the_banned_words() -> None:
    found = [line for name in _files() for line in _banned_lines(name)]
    assert not found, "\n".join(found)


def test_modules_open_with_what_they_do() -> None:
    sources = [name for name in _files() if name.endswith((".py", ".h", ".cpp"))]
    found = [f"{name}: {_opening(name).splitlines()[0]}" for name in sources if OPENINGS.match(_opening(name))]
    assert not found, "\n".join(found)

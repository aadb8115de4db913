"""The words of prose: plain English and the field's terms, in sources, docs and tools."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COVERED = ("swapper", "csrc", "docs", "tools", "examples", "README.md", "CHANGELOG.md")
BANNED = re.compile(
    r"\b(anew|whoever|owed|by turns|at one time|so many|is told|comes? home|stays? away|shel(f|ves)"
    r"|lets? go of|(go|goes|gone|going) on from|ha(s|ve) not (the|its|their))\b",
    re.IGNORECASE,
)
"""Words of an earlier dialect that have a plain equivalent: again, anyone, deferred, alternating, at once, this many ..."""
PRIVATE = re.compile(
    r"\b(entrances?|shelf\w*|lent|heirs?|predecessors?|leavers?|rehearsals?|keepers?|convoys?|guests?|undoings?|widenings?|forsake\w*"
    r"|chill\w*|blueprints?|goes round|surely|put off|caught up|untold|even share|changeovers?|discover(y|ies)|shadows?|stretches"
    r"|bring home|bring back|let go|held back|even_share|put_off|caught_up|let_use|bring_home|bring_back|held_back|let_go|end_all"
    r"|goes_round|untold_error|offered_rank|(Shelf|Lent|Joined)Files?|GradientRoom|KeptState|KeptGradients|ParkedGradients|CutLinear"
    r"|DemandedGroup|(MOST|LEAST)_\w+)\b",
    re.IGNORECASE,
)
"""Words that swapper once used for what the literature calls otherwise: pages for users must not need them."""
FOR_USERS = ("README.md", "docs/index.md", "docs/get-started.md", "docs/compare.md", "docs/troubleshooting.md")
OPENINGS = re.compile(r"(What|Which|Where|How|When|Who|Whose|Why|Whether)\b")
"""A module opens with what it does, not with a clause."""


def _files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", *COVERED], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so the files of the project are not known")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


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


def test_pages_for_users_have_no_private_words() -> None:
    """Not in internals, the reference and decisions, which define what they use."""
    pages = [name for name in _files() if name in FOR_USERS or name.startswith(("docs/guides/", "docs/concepts/"))]
    assert len(pages) > 20, "the pages have moved: correct this test"
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in pages
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert not found, "\n".join(found)


def test_modules_open_with_what_they_do() -> None:
    sources = [name for name in _files() if name.endswith((".py", ".h", ".cpp"))]
    found = [f"{name}: {_opening(name).splitlines()[0]}" for name in sources if OPENINGS.match(_opening(name))]
    assert not found, "\n".join(found)

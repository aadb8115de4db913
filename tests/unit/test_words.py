"""The words of prose: plain English and the field's terms, in sources, docs and tools."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.whole  # with each commit

ROOT = Path(__file__).parents[2]
COVERED = ("swapper", "csrc", "docs", "tools", "examples", "README.md", "CHANGELOG.md")
BANNED = re.compile(
    r"\b(anew|whoever|owed|by turns|at one time|so many|is told|comes? home|stays? away|shel(f|ves)"
    r"|lets? go of|(go|goes|gone|going) on from|ha(s|ve) not (the|its|their))\b",
    re.IGNORECASE,
)
"""Words of an earlier dialect that have a plain equivalent: again, anyone, deferred, alternating, at once, this many ..."""
PRIVATE = re.compile(
    r"\b(entrances?|shelf\w*|lent|heirs?|predecessors?|leavers?|rehearsals?|keepers?|convoys?|guests?|undoings|widenings?|forsake\w*"
    r"|chill\w*|blueprints?|goes round|surely|put off|caught up|untold|even share|changeovers?|discover(y|ies)|shadows?|stretches"
    r"|bring home|bring back|let go|held back|even_share|put_off|caught_up|let_use|bring_home|bring_back|held_back|let_go|end_all"
    r"|goes_round|untold_error|offered_rank|(Shelf|Lent|Joined)Files?|GradientRoom|KeptState|KeptGradients|ParkedGradients|CutLinear"
    r"|DemandedGroup|(MOST|LEAST)_\w+)\b",
    re.IGNORECASE,
)
"""Words that swapper once used for what the literature calls otherwise."""
ORDINARY = {
    "csrc/memory/fault.cpp": "predecessor",  # of a signal's handler
    "csrc/memory/prefault.cpp": "guest",  # of a hypervisor
    "csrc/tests/test_scheduler.cpp": "most_shared",
    "tools/gpu": "rehearsal",  # of measurements, on a CPU
    "tests/device/test_gpu_check.py": "rehearsal",
}
"""Where such a word has its ordinary meaning, by the beginning of a file's name."""
PRIVATE_NAMES = re.compile(
    "Entrance|Heir|Reach|Keeper|Home|Content|Place|Undoing|Uses|Widening|Discovery|Shadow|Current|Opening|Changeover|Run|Backing"
    "|Image|Rehearsal|Convoy|Passes|Taking|Together|Room|Spare|Parts|bring|warm|chill|forsake|owe|offer|visit|deal|outdate|shut"
    "|jumped|discovery|homes|heir|leaver|keeper|guests"
)
"""Names of that dialect which are words of plain English too: of no class, function, parameter, attribute or variable."""
OPENINGS = re.compile(r"(What|Which|Where|How|When|Who|Whose|Why|Whether)\b")
"""A module opens with what it does, not with a clause."""


def _files(*others: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *COVERED, *others], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so the files of the project are not known")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file() and ROOT / name != Path(__file__)]


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


def _names_defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.attr if isinstance(node, ast.Attribute) else node.id]
    return [node.arg] if isinstance(node, ast.arg) else []


def test_there_are_no_private_words() -> None:
    found = []
    for name in _files("tests"):
        ordinary = {word for beginning, word in ORDINARY.items() if name.startswith(beginning)}
        for number, line in enumerate((ROOT / name).read_text(errors="replace").splitlines(), 1):
            if any(match.group().lower() not in ordinary for match in PRIVATE.finditer(line)):
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_nothing_has_a_private_name() -> None:
    """Names of swapper's own code, with or without an underscore in front."""
    found = [
        f"{name}:{node.lineno}: {defined}"
        for name in _files()
        if name.startswith("swapper/") and name.endswith(".py")
        for node in ast.walk(ast.parse((ROOT / name).read_text()))
        for defined in _names_defined(node)
        if PRIVATE_NAMES.fullmatch(defined.lstrip("_"))
    ]
    assert not found, "\n".join(found)


def test_modules_open_with_what_they_do() -> None:
    sources = [name for name in _files("tests") if name.endswith((".py", ".h", ".cpp"))]
    found = [f"{name}: {_opening(name).splitlines()[0]}" for name in sources if OPENINGS.match(_opening(name))]
    assert not found, "\n".join(found)

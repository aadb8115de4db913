"""Documentation points at what exists: links and their anchors, files, names of swapper, and examples that parse."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH = 120
"""Characters of a line of prose."""
CODE_WIDTH = 99
"""Characters of a line of code that the site shows in a window of 1400 pixels without scrolling."""
MAX_WORDS = 50_000
"""Of all pages of docs together."""
FOLDERS = ("swapper/", "csrc/", "tools/", "tests/", "examples/", "docs/", ".ci/")


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return set(plain)


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_to_pages_and_headings_that_exist(page: Path) -> None:
    text = re.sub(r"\s+", " ", without_blocks(page.read_text()))
    dead = []
    for target in re.findall(r"\]\(([^()\s]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            dead.append(target)
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """From the root, or from swapper/, as docs/architecture.md names them."""
    words = [word.split()[0] for word in re.findall(r"`([^`\n]+)`", without_blocks(page.read_text())) if word.split()]
    named = {word.rstrip("/:") for word in words if re.fullmatch(r"[\w./-]+", word) and "/" in word}
    files = {word for word in named if word.startswith(FOLDERS) or word.endswith((".py", ".h", ".cpp"))}
    assert sorted(word for word in files if not any((base / word).exists() for base in (ROOT, ROOT / "swapper"))) == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_python_examples_parse(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        compile(block, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_names_of_swapper_that_a_page_uses_exist(page: Path) -> None:
    names = set(re.findall(r"\bswapper((?:\.\w+)+)(?=[(`,;:\s)]|$)", page.read_text()))
    assert sorted(name for name in names if not exists("swapper" + name)) == []


def exists(name: str) -> bool:
    """Return True if `name`, with dots, is a module or an attribute of one."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[:number]))
            except ImportError:
                return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_tables_are_whole(page: Path) -> None:
    """A blank line inside a table ends it: its other rows would be shown as text."""
    lines = page.read_text().splitlines()
    broken = [
        f"{number}: {lines[number][:60]}"
        for number in range(2, len(lines))
        if lines[number].startswith("|") and not lines[number - 1].startswith("|") and not is_rule(lines, number + 1)
    ]
    assert broken == []


def is_rule(lines: list[str], number: int) -> bool:
    return number < len(lines) and re.fullmatch(r"\|[-:| ]+\|", lines[number]) is not None


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=page_name)
def test_lines_of_prose_are_not_too_long(page: Path) -> None:
    """Code, tables and pictures may be longer."""
    text = re.sub(
        r"^(```.*?^```|<!-- .*?-->)",
        lambda block: "\n" * block[0].count("\n"),
        page.read_text(),
        flags=re.MULTILINE | re.DOTALL,
    )
    lines = enumerate(text.splitlines(), 1)
    long = [number for number, line in lines if len(line) > WIDTH and not line.startswith(("|", "![", "    "))]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_link_whose_text_is_a_page_leads_there(page: Path) -> None:
    links = re.findall(r"\[([^\]\s]+\.md)\]\(([^()\s#]+)", page.read_text())
    assert [text for text, target in links if Path(text).name != Path(target).name] == []


SHOWN = [page for page in PAGES if page_name(page).startswith(("docs/guides/", "docs/concepts/", "docs/get-started"))]


@pytest.mark.parametrize("page", SHOWN, ids=page_name)
def test_lines_of_code_end_within_a_window_of_1400_pixels(page: Path) -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > CODE_WIDTH] == []


def test_all_pages_together_are_not_too_long() -> None:
    pages = (ROOT / "docs").rglob("*.md")
    assert sum(len(page.read_text().split()) for page in pages) <= MAX_WORDS


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_each_example_is_on_the_site(name: str) -> None:
    """For readers who have the wheel and no checkout: tools/docs_hooks.py puts the file there."""
    assert f"## {name}\n" in (text := (ROOT / "docs" / "examples.md").read_text())
    assert f"<!-- file: examples/{name} -->" in text

"""Completes the documentation site: the command line's own help, examples, decisions, lines that break where they should, pictures
that open, parameters that a docstring names together. mkdocs and griffe call it (tools/mkdocs.yml)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from typer.main import get_command

from swapper.cli import app

MARKER = "<!-- every command: tools/docs_hooks.py -->"
FILE = re.compile(r"^<!-- file: (\S+) -->$", re.MULTILINE)
"""Stands for a file of the repository, on a page for readers who have none."""
ROOT = Path(__file__).parents[1]


def on_config(config: Any) -> Any:
    """List the decisions in the navigation, so that a new one has its place."""
    pages = sorted(path.name for path in (Path(config["docs_dir"]) / "decisions").glob("*.md"))
    internals = next(part["Internals"] for part in config["nav"] if "Internals" in part)
    internals[-1]["Decisions"] = [f"decisions/{name}" for name in pages]
    return config


def on_page_markdown(markdown: str, **_: object) -> str:
    markdown = markdown.replace(MARKER, commands()) if MARKER in markdown else markdown
    return FILE.sub(lambda found: f"```python\n{(ROOT / found[1]).read_text()}```", markdown)


def on_page_content(html: str, **_: object) -> str:
    """Mark where code within a line may break in a narrow window, keep words with hyphens whole, and let pictures be opened."""

    def marked(code: re.Match[str]) -> str:
        words = [_whole(word) if "-" in word else _breakable(word) for word in code[1].split(" ")]
        return f"<code>{' '.join(words)}</code>"

    html = re.sub(r"<code>([^<\n]+)</code>", marked, html)
    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a class="picture" href="\1">\g<0></a>', html)


def _whole(word: str) -> str:
    return f'<span class="word">{word}</span>'


def _breakable(word: str) -> str:
    """Offer a break behind each mark that is within a name, and before each of its words."""
    return re.sub(r"(?<=\w)([_.=(,/])(?=\w|&quot;)|(?<=[a-z])(?=[A-Z])", r"\1<wbr>", word)


class NamesTogether(griffe.Extension):
    """Gives each parameter its own row, with its type and default, where a docstring says "a, b: ..." of several."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        for section in func.docstring.parsed if func.docstring else ():
            if isinstance(section, griffe.DocstringSectionParameters):
                section.value = [row for said in section.value for row in _rows(func, said)]


def _rows(function: griffe.Function, said: griffe.DocstringParameter) -> list[griffe.DocstringParameter]:
    rows, parameters = [], {parameter.name: parameter for parameter in function.parameters}
    for name in said.name.split(", "):
        known = parameters.get(name)
        annotation, default = (said.annotation, said.value) if known is None else (known.annotation, known.default)
        rows.append(griffe.DocstringParameter(name, description=said.description, annotation=annotation, value=default))
    return rows if len(rows) > 1 else [said]


def commands() -> str:
    """Return a section for each command of `swapper`, in Markdown."""
    group: Any = get_command(app)
    return "\n".join(_section(name, command) for name, command in group.commands.items())


def _section(name: str, command: Any) -> str:
    arguments = " ".join(one.name.upper() for one in command.params if one.param_type_name == "argument")
    rows = [_row(one) for one in command.params if not getattr(one, "hidden", False)]
    table = ["", "| option | default | meaning |", "|---|---|---|", *rows, ""] if rows else [""]
    usage = f"swapper {name} [OPTIONS] {arguments}".rstrip()
    return "\n".join([f"### swapper {name}", "", "```", usage, "```", "", (command.help or "").strip(), *table])


def _row(parameter: Any) -> str:
    names = [parameter.name.upper()] if parameter.param_type_name == "argument" else parameter.opts
    default = parameter.default
    shown = "" if default in (None, False, (), "") or callable(default) or default is ... else f"`{default}`"
    meaning = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    return f"| {', '.join(f'`{one}`' for one in names)} | {shown} | {meaning} |"

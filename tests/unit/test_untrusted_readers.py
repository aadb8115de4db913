"""No place but the bounded readers unpickles, loads by torch, or parses JSON."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.whole  # with each commit

PACKAGE = Path(__file__).parents[2] / "swapper"
READERS = {
    "formats/unpickling.py": {"pickle._Unpickler"},  # the bounded unpickler itself
    "formats/torch_file.py": {"torch.load"},  # of what the bounded unpickler has read
    "checkpoint/torch_load.py": {"torch.load"},  # `load`: as above
    "checkpoint/dcp_reader.py": {"pickle._Unpickler"},  # classes of torch's, of what the bounded unpickler has read
    "runtime/records.py": {"json.loads"},
    "io/drives.py": {"json.loads"},  # of the user's own settings
}
OF_OWN_CHILDREN = ("bench/", "cli/demo.py")
"""What reads the output and files of processes that it has started."""
MODULES = {"pickle", "torch", "json", "marshal", "shelve", "dill", "joblib", "numpy", "np", "copyreg", "_pickle"}
NAMES = {"load", "loads", "Unpickler", "_Unpickler", "JSONDecoder"}


def readers_in(source: str) -> set[str]:
    """Return what `source` has of functions that read bytes of an open format, by their names with the module's."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in MODULES and node.attr in NAMES:
                found.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name in NAMES}
    return found


def test_only_the_bounded_readers_read() -> None:
    found = {str(path.relative_to(PACKAGE)): readers_in(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    assert {path: names for path, names in found.items() if names and not path.startswith(OF_OWN_CHILDREN)} == READERS


def test_the_search_finds_them() -> None:
    assert readers_in("import torch\ndef f(x):\n    return torch.load(x)") == {"torch.load"}
    assert readers_in("from pickle import loads") == {"pickle.loads"}
    assert not readers_in("import json\njson.dumps(1)")

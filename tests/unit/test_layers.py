"""Who may import whom. The architecture is one-way; these rules keep it so.

Python: errors, config, headroom, counters, stats, trace, watchdog, interrupts, closing, drives, directory, ranks, beneath,
records and the data plane (_C), then io, core, device, modules, then train, infer and checkpoint side by side, then the plan, the
beginning, the request, the backing, the run, its changes (regroup), its steps, its opening, the manager (and with it
`import swapper`), then integrations and cli. C++: base, cuda, memory, io, bindings, tests.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON_LAYERS = [
    {
        "errors",
        "config",
        "headroom",
        "counters",
        "stats",
        "trace",
        "watchdog",
        "interrupts",
        "closing",
        "drives",
        "directory",
        "ranks",
        "beneath",
        "records",
        "_C",
    },
    {"io"},
    {"core"},
    {"device"},
    {"modules"},
    {"train", "infer", "checkpoint"},
    {"plan", "beginning"},
    {"request", "backing"},
    {"user_state", "run"},
    {"current", "regroup"},
    {"steps"},
    {"opening"},
    {"manager", "swapper"},
    {"integrations", "cli"},
]
CPP_LAYERS = [{"base"}, {"cuda"}, {"memory"}, {"io"}, {"bindings"}, {"tests"}]
STRANGERS = {("train", "infer"), ("infer", "train")}
"""Of one layer, and nothing to do with each other."""
NOT_FOR_CORE = {"torch.nn", "torch.distributed", "torch.cuda"}

SOURCES = sorted((ROOT / "swapper").rglob("*.py"))
CPP_SOURCES = sorted(path for suffix in ("*.h", "*.cpp") for path in (ROOT / "csrc").rglob(suffix))


def part_of(module: str) -> str:
    """Return the part of the package that a module (`swapper.paging.pager`) belongs to. What is defined in it counts as it."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and any(parts[1] in layer for layer in PYTHON_LAYERS) else "swapper"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, is_package: bool = False) -> set[str]:
    """Return every name that `source` imports, wherever in it, with dots; and every attribute of torch that it names."""
    package = module if is_package else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            found.add(f"torch.{node.attr}")
    return found


def is_below(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def layer(part: str, layers: list[set[str]]) -> int:
    return next(number for number, parts in enumerate(layers) if part in parts)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Return what `source` imports and must not, being the module of that name."""
    importer = part_of(module)
    wrong = []
    for name in sorted(imports(source, module, is_package)):
        if is_below(name, "swapper"):
            imported = part_of(name)
            is_above = layer(imported, PYTHON_LAYERS) > layer(importer, PYTHON_LAYERS)
            if is_above or (importer, imported) in STRANGERS:
                wrong.append(f"{module} imports {name}: {importer} must not know {imported}")
        if importer == "core" and any(is_below(name, stranger) for stranger in NOT_FOR_CORE):
            wrong.append(f"{module} uses {name}: core knows torch for dtypes and byte views only")
    return wrong


def cpp_violations(source: str, part: str) -> list[str]:
    included = re.findall(r'^\s*#\s*include\s+"([^"/]+)/', source, re.MULTILINE)
    return [other for other in included if layer(other, CPP_LAYERS) > layer(part, CPP_LAYERS)]


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_a_module_imports_only_from_its_own_layer_and_those_below(path):
    assert violations(path.read_text(), module_of(path), path.name == "__init__.py") == []


@pytest.mark.parametrize("path", CPP_SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_cpp_file_includes_only_from_its_own_layer_and_those_below(path):
    part = path.relative_to(ROOT / "csrc").parts[0].removesuffix(".cpp")
    assert cpp_violations(path.read_text(), part) == []


def test_no_two_parts_import_each_other():
    """Within a layer too: what depends on itself in a circle is one part, whatever its name."""
    uses: dict[str, set[str]] = {}
    for path in SOURCES:
        module = module_of(path)
        imported = imports(path.read_text(), module, path.name == "__init__.py")
        uses.setdefault(part_of(module), set()).update(part_of(name) for name in imported if is_below(name, "swapper"))
    circles = {(a, b) for a, used in uses.items() for b in used if a != b and a in uses.get(b, ())}
    assert circles - {("swapper", "manager"), ("manager", "swapper")} == set()


def test_every_part_of_the_package_has_its_layer():
    known = {part for parts in PYTHON_LAYERS for part in parts}
    parts = {path.relative_to(ROOT / "swapper").parts[0].removesuffix(".py") for path in SOURCES} - {"__init__"}
    assert parts <= known
    assert {"core", "train", "checkpoint", "manager", "cli"} <= parts, "the sources were not found"
    cpp_parts = {path.relative_to(ROOT / "csrc").parts[0].removesuffix(".cpp") for path in CPP_SOURCES}
    assert {"base", "memory", "io", "bindings"} <= cpp_parts <= {part for parts in CPP_LAYERS for part in parts}


# --- the rules notice what they are for ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module, source",
    [
        ("swapper.errors", "from swapper.core import pager"),
        ("swapper.io.handle.aio", "import swapper.paging.pager"),
        ("swapper.paging.pager", "from swapper.train.layout.slices import Slice"),
        ("swapper.paging.pager", "from ..train import slices"),
        ("swapper.paging.pager", "from swapper import SwapManager"),
        ("swapper.paging.pager", "import swapper"),
        ("swapper.paging.pager", "def late():\n    from swapper.formats.torch_zip.container import Record"),
        ("swapper.paging.pager", "from torch import nn"),
        ("swapper.paging.pager", "import torch.distributed as dist"),
        ("swapper.paging.pager", "import torch\n\ntorch.cuda.synchronize()"),
        ("swapper.train.parameters.train_hooks", "from swapper.infer.load import load"),
        ("swapper.infer.load", "from ..train.grads import HostGradients"),
        ("swapper.durability.snapshot", "from swapper.manager import SwapManager"),
        ("swapper.manager", "from swapper.cli import app"),
    ],
)
def test_an_import_against_the_rules_is_noticed(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    "module, source",
    [
        (
            "swapper.paging.store.swap_files",
            "from swapper import _C\nfrom swapper.errors import IoError\nimport torch\n\ntorch.uint8",
        ),
        ("swapper.paging.store.swap_files", "from .section import Page\nfrom ..io import handle"),
        ("swapper.train.parameters.train_hooks", "from torch import nn\nfrom swapper.paging.pager import Pager"),
        ("swapper.durability.recovery", "from swapper.paging.pool import Pool"),
        ("swapper.cli.demo", "import swapper\nfrom swapper import SwapManager"),
    ],
)
def test_an_import_within_the_rules_is_not(module, source):
    assert violations(source, module) == []


def test_an_include_against_the_rules_is_noticed():
    assert cpp_violations('#include "io/engine.h"\n#include "base/fd.h"\n#include <vector>\n', "memory") == ["io"]

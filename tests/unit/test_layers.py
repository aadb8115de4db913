"""Rules of imports between folders. The architecture is one-way; these rules keep it so.

Each line of PYTHON_LAYERS is a layer, from the bottom up. A folder (or a module next to the folders) imports from its own layer and
from those below.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.whole  # with each commit

ROOT = Path(__file__).parents[2]
PYTHON_LAYERS = [
    {"errors", "_C"},
    {"runtime"},
    {"tensors"},
    {"capabilities"},
    {"options"},
    {"io"},
    {"formats"},
    {"paging"},
    {"device"},
    {"codecs"},
    {"modules"},
    {"durability"},
    {"checkpoint"},
    {"train", "infer"},
    {"forecast"},
    {"manager", "swapper"},
    {"bench", "integrations"},
    {"cli", "__main__"},
]
TRAINING_LAYERS = [
    {"optimizer"},
    {"layout"},
    {"groups"},
    {"gradients"},
    {"state"},
    {"updates"},
    {"steps"},
    {"passes"},
    {"sharded"},
    {"planning"},
    {"session"},
    {"activations"},
]
"""The folders of `train`."""
CPP_LAYERS = [{"base"}, {"codecs"}, {"cuda"}, {"memory"}, {"io"}, {"bindings"}, {"tests"}]
LATE = {"swapper.train.planning.plan", "swapper.infer.planning.load_plan"}
"""They import the forecast when `predict` is called: nothing else of what trains or infers knows it."""
STRANGERS = {("train", "infer"), ("infer", "train")}
"""Of one layer, and nothing to do with each other."""
NOT_FOR_PAGING = {"torch.nn", "torch.distributed", "torch.cuda"}

SOURCES = sorted((ROOT / "swapper").rglob("*.py"))
CPP_SOURCES = sorted(path for suffix in ("*.h", "*.cpp") for path in (ROOT / "csrc").rglob(suffix))


def part_of(module: str) -> str:
    """Return the part of the package that a module (`swapper.paging.pager`) belongs to. What is defined in it counts as it."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and any(parts[1] in layer for layer in PYTHON_LAYERS) else "swapper"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(source: str, module: str, is_package: bool = False) -> frozenset[str]:
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
    return frozenset(found)


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
            is_above = is_above and not (module in LATE and imported == "forecast")
            is_above = is_above and not (
                module == "swapper" and is_below(name, "swapper.integrations.transformers_cache")
            )
            if is_above or (importer, imported) in STRANGERS:
                wrong.append(f"{module} imports {name}: {importer} must not know {imported}")
        if importer == "paging" and any(is_below(name, stranger) for stranger in NOT_FOR_PAGING):
            wrong.append(f"{module} uses {name}: paging knows torch for dtypes and byte views only")
    return wrong


def training_violations(source: str, module: str) -> list[str]:
    """Return what a module of `train` imports from a folder above its own."""
    here = layer(module.split(".")[2], TRAINING_LAYERS)
    others = [name for name in sorted(imports(source, module)) if is_below(name, "swapper.train")]
    return [f"{module} imports {name}" for name in others if layer(name.split(".")[2], TRAINING_LAYERS) > here]


def circles(uses: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other, at once or through others."""
    reached = {module: set(used) for module, used in uses.items()}
    for middle in uses:
        for module in uses:
            if middle in reached[module]:
                reached[module] |= reached[middle]
    within = [{other for other in reached[module] if module in reached.get(other, ())} for module in uses]
    return [circle for number, circle in enumerate(within) if circle and circle not in within[:number]]


def imported_modules(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, wherever in it. `_C` is none, and a name counts as its module."""
    module = module_of(path)
    names = imports(path.read_text(), module, path.name == "__init__.py") - {"swapper._C"}
    known = {module_of(source) for source in SOURCES}
    return {name if name in known else name.rpartition(".")[0] for name in names if is_below(name, "swapper")} & known


def cpp_violations(source: str, part: str) -> list[str]:
    included = re.findall(r'^\s*#\s*include\s+"([^"/]+)/', source, re.MULTILINE)
    return [other for other in included if layer(other, CPP_LAYERS) > layer(part, CPP_LAYERS)]


def test_a_module_imports_only_from_its_own_layer_and_those_below():
    found = [violations(path.read_text(), module_of(path), path.name == "__init__.py") for path in SOURCES]
    assert [line for lines in found for line in lines] == []


def test_a_cpp_file_includes_only_from_its_own_layer_and_those_below():
    part_of_file = {path: path.relative_to(ROOT / "csrc").parts[0].removesuffix(".cpp") for path in CPP_SOURCES}
    found = {str(path): cpp_violations(path.read_text(), part) for path, part in part_of_file.items()}
    assert {path: included for path, included in found.items() if included} == {}


def test_no_two_parts_import_each_other():
    """Within a layer too: what depends on itself in a circle is one part, whatever its name."""
    uses: dict[str, set[str]] = {}
    for path in SOURCES:
        module = module_of(path)
        imported = imports(path.read_text(), module, path.name == "__init__.py")
        parts = {part_of(name) for name in imported if is_below(name, "swapper")}
        uses.setdefault(part_of(module), set()).update(parts - {"forecast"} if module in LATE else parts)
    circles = {(a, b) for a, used in uses.items() for b in used if a != b and a in uses.get(b, ())}
    assert circles - {("swapper", "manager"), ("manager", "swapper")} == set()


def test_a_folder_of_training_imports_only_from_those_below():
    paths = [path for path in SOURCES if module_of(path).count(".") > 2 and module_of(path).split(".")[1] == "train"]
    assert {module_of(path).split(".")[2] for path in paths} == set.union(*TRAINING_LAYERS)
    found = [training_violations(path.read_text(), module_of(path)) for path in paths]
    assert [line for lines in found for line in lines] == []


def test_no_two_modules_import_each_other():
    """At once, late in a function, for types only, or through others: what cannot be read alone is one module."""
    assert circles({module_of(path): imported_modules(path) for path in SOURCES}) == []


def test_every_part_of_the_package_has_its_layer():
    known = {part for parts in PYTHON_LAYERS for part in parts}
    parts = {path.relative_to(ROOT / "swapper").parts[0].removesuffix(".py") for path in SOURCES} - {"__init__"}
    assert parts <= known
    assert {"paging", "train", "checkpoint", "manager", "cli"} <= parts, "the sources were not found"
    cpp_parts = {path.relative_to(ROOT / "csrc").parts[0].removesuffix(".cpp") for path in CPP_SOURCES}
    assert {"base", "memory", "io", "bindings"} <= cpp_parts <= {part for parts in CPP_LAYERS for part in parts}


MAX_MODULES = 13
"""In one folder, without its `__init__`: more are two folders."""


def test_a_folder_is_small_enough_to_be_read_at_a_glance():
    folders: dict[str, int] = {}
    for path in SOURCES:
        folder = str(path.parent.relative_to(ROOT))
        folders[folder] = folders.get(folder, 0) + (path.name != "__init__.py")
    assert {folder: count for folder, count in folders.items() if count > MAX_MODULES} == {}


def test_a_name_of_a_module_means_one_thing():
    """Commands of the command line are called as what they show."""
    modules = [path.name for path in SOURCES if path.name != "__init__.py" and path.parent.name != "cli"]
    assert sorted({name for name in modules if modules.count(name) > 1}) == []


def test_a_name_of_a_class_means_one_thing():
    """Of a nested class too, whether it is private or not."""
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    assert sorted({name for name in classes if classes.count(name) > 1}) == []


# --- the rules notice what they are for ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module, source",
    [
        ("swapper.errors", "from swapper.paging import pager"),
        ("swapper.io.handle.aio", "import swapper.paging.pager"),
        ("swapper.paging.pager", "from swapper.train.layout.slices import Slice"),
        ("swapper.paging.pager", "from ..train import slices"),
        ("swapper.paging.pager", "from swapper import SwapManager"),
        ("swapper.paging.pager", "import swapper"),
        ("swapper.paging.pager", "def late():\n    from swapper.durability.commit import read_commit"),
        ("swapper.paging.pager", "from torch import nn"),
        ("swapper.paging.pager", "import torch.distributed as dist"),
        ("swapper.paging.pager", "import torch\n\ntorch.cuda.synchronize()"),
        ("swapper.train.passes.train_hooks", "from swapper.infer.load import load"),
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
        ("swapper.paging.store.swap_files", "from ..section import Page\nfrom ...io import handle"),
        ("swapper.train.passes.train_hooks", "from torch import nn\nfrom swapper.paging.pager import Pager"),
        ("swapper.durability.recovery", "from swapper.paging.host_memory import Pool"),
        ("swapper.cli.demo", "import swapper\nfrom swapper import SwapManager"),
    ],
)
def test_an_import_within_the_rules_is_not(module, source):
    assert violations(source, module) == []


def test_an_import_against_the_order_of_training_is_noticed():
    source = "from swapper.train.updates.sweep import Sweep\nfrom swapper.train.layout.slices import Slice"
    assert training_violations(source, "swapper.train.layout.slices") == [
        "swapper.train.layout.slices imports swapper.train.updates.sweep.Sweep"
    ]
    assert training_violations(source, "swapper.train.steps.executor") == []


def test_a_circle_of_modules_is_noticed():
    uses = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert circles(uses) == [{"a", "b", "c"}]
    assert circles({**uses, "c": {"d"}}) == []


def test_an_include_against_the_rules_is_noticed():
    assert cpp_violations('#include "io/engine.h"\n#include "base/fd.h"\n#include <vector>\n', "memory") == ["io"]

"""The package needs what it declares and no more, and its source distribution has what a build needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DECLARED_ALONE = '''
import importlib, importlib.metadata as metadata, pkgutil, re, sys
from packaging.requirements import Requirement

def plain(name):
    return re.sub("[-_.]+", "-", name).lower()

declared, left = set(), ["torch-swapper"]
while left:
    name = plain(left.pop())
    if name in declared:
        continue
    declared.add(name)
    try:
        needed = map(Requirement, metadata.requires(name) or ())
    except metadata.PackageNotFoundError:  # for another platform
        continue
    left += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
owners = metadata.packages_distributions()

class Undeclared:
    """Finds nothing, and stops the search for modules of what is installed here and not declared."""

    def find_spec(self, name, path=None, target=None):
        owned = owners.get(name.partition(".")[0], ())
        if owned and declared.isdisjoint(map(plain, owned)):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

assert {"torch", "numpy", "typer"} <= declared and declared.isdisjoint({"pytest", "transformers", "triton"})
sys.meta_path.insert(0, Undeclared())
import swapper
from swapper import *
refused = []
for module in pkgutil.walk_packages(swapper.__path__, "swapper."):
    if module.name != "swapper.__main__":  # the command line itself
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            refused.append(f"{module.name} {error.name}")
print(*refused, sep="\\n")
'''


def test_every_module_is_imported_with_the_declared_dependencies_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DECLARED_ALONE], capture_output=True, text=True
    )  # nothing is imported there
    assert done.returncode == 0, done.stderr[-3000:]
    refused = [line.split() for line in done.stdout.splitlines()]
    assert {library for _, library in refused} <= {"axolotl", "transformers", "triton"}
    assert [module for module, library in refused if library not in re.split(r"[._]", module)] == []


def test_the_source_distribution_has_every_file_of_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the hook that pip and build call; it compiles nothing."""
    backend = pytest.importorskip("scikit_build_core.build", reason="scikit-build-core is not installed: tools/setup")
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / backend.build_sdist(str(tmp_path))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files", "swapper", "csrc"], cwd=ROOT, capture_output=True, text=True)
    wanted = {"CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", *listed.stdout.splitlines()}
    assert sorted(wanted - names) == []
    assert not {name for name in names if name.startswith((".ci", ".git/", ".venv", "build"))}

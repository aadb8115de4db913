"""Names of torch that are not public are used in one module, which says what each is relied on for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.whole  # with each commit

ROOT = Path(__file__).parents[2]
ONE_PLACE = ROOT / "swapper" / "tensors" / "torch_private.py"
SOURCES = sorted(path for folder in ("swapper", "examples", "tools") for path in (ROOT / folder).rglob("*.py"))


def private_names(source: str) -> list[str]:
    """Return the private names of torch's modules and classes that `source` imports, or names by them."""
    nodes = list(ast.walk(ast.parse(source)))
    imported = {a.asname or a.name: a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    imported |= {a.asname or a.name: f"{node.module}.{a.name}" for node in froms for a in node.names}
    chains = [ast.unparse(node).partition(".") for node in nodes if isinstance(node, ast.Attribute) and _is_chain(node)]
    names = {*imported.values(), *(f"{imported.get(first, first)}.{rest}" for first, _, rest in chains)}
    return sorted(name for name in names if name.startswith("torch.") and _is_private(name))


def _is_chain(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_chain(node.value))


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_private_names_of_torch_are_used_in_one_place():
    found = {str(path.relative_to(ROOT)): private_names(path.read_text()) for path in SOURCES if path != ONE_PLACE}
    assert {path: names for path, names in found.items() if names} == {}
    assert private_names(ONE_PLACE.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch\n\ntorch._C._storage_Use_Count(1)",
        "import torch\n\ntorch.Tensor._make_subclass(torch.Tensor, x)",
        "from torch.utils import _pytree",
        "import torch.distributed as dist\n\ndist._broadcast_coalesced()",
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "from torch import autograd\n\nautograd.Variable._execution_engine",
        "import torch.nn.functional as F\nfrom torch.autograd import Variable as V\n\nV._execution_engine",
    ],
)
def test_a_private_name_is_noticed(source: str):
    assert private_names(source)


def test_public_names_are_not():
    source = "import torch\nfrom torch import nn\n\ntorch.__version__, torch.Tensor.__get__, nn.Module, x._version, nn.M()._base"
    assert private_names(source) == []

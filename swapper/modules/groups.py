"""Divides a model into units, whose hooks lease, and groups, the parameters that are used together; and several models as one.

A *unit* is a module whose forward needs some parameters; its hooks lease the groups that hold them. Each child of a ModuleList or
Sequential with two or more children of one class (a transformer's layers) is a unit with its whole subtree, unless it has no
forward, as a list in a list (PoolFormer's stages). Elsewhere each module is a unit with its direct parameters. A *group* holds the
parameters that a unit is the first to need; small neighbors share one. A tied parameter belongs to the first unit that needs it,
and the others lease that group too.
"""

from __future__ import annotations

import dis
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType, MethodType

import torch
from torch import nn

from swapper.errors import UnsupportedError

MERGE_BELOW_BYTES = 1 << 20
"""Neighboring units outside of lists share a group while it is smaller than this."""


_FoundUnit = tuple[str, nn.Module, list[nn.Parameter], bool]
"""(name, module, parameters that its forward needs, whether its group is its own: it is a list's child)"""


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that are used together, with their qualified names."""

    index: int
    name: str
    parameters: tuple[tuple[str, nn.Parameter], ...]

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for _, parameter in self.parameters)


@dataclass(frozen=True, slots=True)
class Unit:
    """A module with hooks, and the indices of the groups that its forward needs."""

    name: str
    module: nn.Module
    groups: tuple[int, ...]


def partition(model: nn.Module) -> tuple[list[Group], list[Unit]]:
    """Return the model's groups and units in module order. The model itself is always a unit, if only an empty one."""
    return _divide(model, [("", model, parameters_read(model), False), *_below("", model)])


def by_module(model: nn.Module) -> tuple[list[Group], list[Unit]]:
    """Return groups and units as `partition` does, but one unit for each module, with the parameters that its own forward reads.

    Inference uses this: a linear map needs less memory at once than its layer, and only those experts are used that are routed to.
    Modules without parameters are units too.
    """
    return _divide(model, [(name, module, parameters_read(module), True) for name, module in model.named_modules()])


def _divide(model: nn.Module, units: list[_FoundUnit]) -> tuple[list[Group], list[Unit]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owner: dict[int, int] = {}  # id of parameter -> index of group
    members: list[list[tuple[str, nn.Parameter]]] = []
    group_names: list[str] = []
    open_bytes = math.inf  # of the group that small units may still join
    for name, _, parameters, in_list in units:
        new = {id(p): p for p in parameters if id(p) not in owner}
        if not new:
            continue
        nbytes = sum(p.nbytes for p in new.values())
        if in_list or open_bytes + nbytes > MERGE_BELOW_BYTES:
            members.append([])
            group_names.append(name or type(model).__name__)
            open_bytes = math.inf if in_list else 0
        open_bytes += nbytes
        for key, parameter in new.items():
            owner[key] = len(members) - 1
            members[-1].append((names[key], parameter))
    groups = [Group(i, name, tuple(m)) for i, (name, m) in enumerate(zip(group_names, members, strict=True))]
    hooked = [Unit(name, module, tuple(dict.fromkeys(owner[id(p)] for p in read))) for name, module, read, _ in units]
    return groups, hooked


def largest_working_set(units: list[Unit], group_pages: list[int]) -> tuple[int, str]:
    """Return the peak of pages leased in a forward or backward, and the unit where that is.

    While a unit runs, so do its ancestors, whose own groups stay leased.

    Args:
        units: as `partition` returns them.
        group_pages: for each group, how many pages it has.
    """
    worst, where = 0, ""
    for unit, needed in zip(units, working_sets(units), strict=True):
        pages = sum(group_pages[group] for group in needed)
        if pages > worst:
            worst, where = pages, unit.name
    return worst, where


def working_sets(units: list[Unit]) -> list[set[int]]:
    """Return for each unit the groups in use while it runs: its own, and its ancestors'."""
    by_name = {unit.name: unit for unit in units}
    found = []
    for unit in units:
        needed = set(unit.groups)
        parts = unit.name.split(".") if unit.name else []
        for depth in range(len(parts)):
            ancestor = by_name.get(".".join(parts[:depth]))
            needed.update(ancestor.groups if ancestor else ())
        found.append(needed)
    return found


def _below(prefix: str, module: nn.Module) -> Iterator[_FoundUnit]:
    repeats = isinstance(module, nn.ModuleList | nn.Sequential) and any(
        count > 1 for count in Counter(type(child) for child in module.children()).values()
    )
    for child_name, child in module.named_children():
        name = f"{prefix}.{child_name}" if prefix else child_name
        if repeats and type(child).forward is not nn.Module.forward:
            subtree = list(child.parameters())
            if subtree:
                yield name, child, subtree, True
        else:
            own = parameters_read(child)
            if own or isinstance(module, Models):  # a model is a unit, if only an empty one
                yield name, child, own, False
            yield from _below(name, child)


def parameters_read(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that `module`'s own forward reads: its direct ones, and some of its children's.

    Those could be read in when they are touched, but torch's attention checks their class before: with a parameter of another
    class it takes another path, with other bits and other values at padded positions.
    """
    own = list(module.parameters(recurse=False))
    if isinstance(module, nn.MultiheadAttention):
        own += module.out_proj.parameters()
    elif isinstance(module, nn.TransformerEncoderLayer):
        own = list(module.parameters())
    elif isinstance(module, nn.TransformerEncoder):
        own += module.layers[0].parameters()
    return own


def changes_itself(model: nn.Module) -> bool:
    """Return whether a forward in `model` is known to change parameters. Others are found out when they do it."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return any(table.max_norm is not None for table in tables)


def taken_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of submodules that `module`'s own methods name, as `F.linear(x, self.proj.weight)` does, each once.

    The forwards of the submodules may never be called (torchvision's Swin, torch's MultiheadAttention). The names are found in the
    bytecode of the module's class and of its forward hooks: `self`, attributes, and a parameter at the end. Parameters used in
    other ways (in a loop over a list) are found out when the forward runs.
    """
    found: dict[int, nn.Parameter] = {}
    of_hooks = (path for code, first in _codes_of_hooks(module) for path in _paths_in(code, first))
    for path in (*_paths_of(type(module)), *of_hooks):  # type: ignore[arg-type]
        parameter = _at(module, path)
        if parameter is not None:
            found[id(parameter)] = parameter
    return list(found.values())


def _at(module: nn.Module, path: tuple[str, ...]) -> nn.Parameter | None:
    inner: nn.Module | None = module
    for name in path[:-1]:
        inner = inner._modules.get(name) if inner is not None else None
    return inner._parameters.get(path[-1]) if inner is not None and inner is not module else None


@cache
def _paths_of(cls: type[nn.Module]) -> frozenset[tuple[str, ...]]:
    """Return the chains of attributes of `self` in the methods of a class and of those that it is derived from."""
    classes = [base for base in cls.__mro__ if base not in nn.Module.__mro__]
    methods = [method for base in classes for method in vars(base).values() if isinstance(method, FunctionType)]
    running = [method for method in methods if not method.__name__.startswith(("__init", "reset_", "_reset", "init"))]
    return frozenset(path for method in running for path in _paths_in(method.__code__))


def hooks_read_weights(module: nn.Module) -> bool:
    """Return True if the bytecode of a forward hook of `module` names its weights (`module.weight`, `module.parameters()`)."""
    return any(_NAMES_OF_WEIGHTS & _names_in(code) for code, _ in _codes_of_hooks(module))


_NAMES_OF_WEIGHTS = {"weight", "bias", "parameters", "named_parameters", "_parameters", "state_dict"}


def _names_in(code: CodeType) -> set[str]:
    """Return the names in a function's code, and in functions inside of it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _codes_of_hooks(module: nn.Module) -> Iterator[tuple[CodeType, int]]:
    """Yield the code of each forward hook, as far as it is Python's own, and the position of its argument that is the module."""
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        function: object = hook if isinstance(hook, FunctionType | MethodType) else vars(type(hook)).get("__call__")
        if isinstance(function, FunctionType | MethodType):
            yield function.__code__, 0 if function is hook and isinstance(hook, FunctionType) else 1


def _paths_in(code: CodeType, first: int = 0) -> Iterator[tuple[str, ...]]:
    """Yield the chains of attributes of the argument at position `first`."""
    own = code.co_varnames[first : first + 1]
    path: tuple[str, ...] | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_ATTR" and path is not None:
            path = (*path, instruction.argval)
            continue
        if path is not None and len(path) > 1:
            yield path
        loaded = instruction.argval if instruction.opname.startswith("LOAD_FAST") else None
        names = loaded if isinstance(loaded, tuple) else (loaded,)
        path = () if loaded is not None and names[-1:] == own else None


# --- several models as one, and what no model may be -------------------------------------------------------------------


class Models(nn.Module):
    """Several models as one: a policy and its reference, a draft and its target. One set of groups, one budget, one order of use.

    It has no forward: its children, by name, are called by themselves.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)


def as_one(models: object) -> nn.Module:
    """Return a module that is `models`, or contains them: a module, a dictionary of modules by name, or a list or tuple.

    Raises:
        UnsupportedError: it is something else.
    """
    if isinstance(models, nn.Module):
        return models
    by_name = dict(models) if isinstance(models, Mapping) else {}
    if isinstance(models, list | tuple):
        by_name = {str(number): model for number, model in enumerate(models)}
    strangers = [model for model in by_name.values() if not isinstance(model, nn.Module)]
    if not by_name or strangers:
        raise UnsupportedError(f"offload takes an nn.Module, a dictionary or list of them, not {type(models).__name__}")
    for name in by_name:
        if not isinstance(name, str) or not name or "." in name:
            raise UnsupportedError(f"{name!r} cannot be the name of a model: use a string without dots")
    return Models(by_name)


def check_plain(name: str, parameter: nn.Parameter) -> None:
    """Check that a parameter can be paged: it has its elements as they are, one after the other.

    Raises:
        UnsupportedError: it is a sparse tensor, or of a class of its own, as weights that torchao has quantized.
    """
    if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
        raise UnsupportedError(
            f"parameter {name} is a {type(parameter).__name__} with layout {parameter.layout}: only plain dense nn.Parameter can "
            "be paged. Build the model with such; for weights in few bits, make a file by `swapper export --quantize int8`"
        )


def refuse_scripted(model: nn.Module, verb: str) -> None:
    """Refuse TorchScript: its code uses parameters where no hook and no guard sees it.

    Raises:
        UnsupportedError: a module of `model` is TorchScript.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"module {name}" if name else "the model"
            raise UnsupportedError(
                f"{where} is TorchScript ({type(module).__name__}), which uses its parameters where nothing brings them in first: "
                f"give {verb} the nn.Module that it was made of, before torch.jit.script or torch.jit.trace"
            )

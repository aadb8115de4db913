"""Which parameters of its submodules a module's own code takes by name, as `F.linear(x, self.proj.weight)` does. Pure.

Such a forward uses them beside the modules that they belong to, whose own forwards may never be called (torchvision's Swin, torch's
MultiheadAttention). It is found in the bytecode of the module's class: `self`, attributes, and a parameter at the end. What is
taken in other ways (in a loop over a list) is found out when the forward runs.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType

from torch import nn


def taken_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of submodules that `module`'s own methods name, each once."""
    found: dict[int, nn.Parameter] = {}
    for path in _paths_of(type(module)):  # type: ignore[arg-type]
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


def _paths_in(code: CodeType) -> Iterator[tuple[str, ...]]:
    own = code.co_varnames[:1]
    path: tuple[str, ...] | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_ATTR" and path is not None:
            path = (*path, instruction.argval)
            continue
        if path is not None and len(path) > 1:
            yield path
        loaded = instruction.argval if instruction.opname.startswith("LOAD_FAST") else None
        path = (
            ()
            if (loaded is not None and (loaded,) == own) or (isinstance(loaded, tuple) and loaded[-1:] == own)
            else None
        )

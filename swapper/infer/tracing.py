"""Traces how a library's loader makes parameters of stored tensors, with tensors that have no data.

A library that loads checkpoints renames, casts, stacks and splits tensors. It gets `Traced` tensors, on the meta
device, instead of the checkpoint's. The tensors that it puts into the model then show from which stored tensors, and by
which operations of torch, each parameter is made. Those operations are repeated on the real bytes whenever the
parameter is used: most often there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from swapper.checkpoint.quantization import QuantizedLayout
from swapper.errors import UnsupportedError
from swapper.formats.stored import ChunkedTensor, StoredTensor
from swapper.infer.matching import Make, Recipe, shape_of
from swapper.tensors.guarded_tensor import SET_DATA, Function
from swapper.tensors.torch_private import without_torch_functions


@dataclass(frozen=True, eq=False)
class Node:
    """A stored tensor, or result number `index` of a function of other nodes (instead of tensors in its arguments).

    `is_view`: the result shares its memory with an argument. `changed`: functions that changed the result in place.
    """

    stored: StoredTensor | None = None
    function: Function | None = None
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    index: int | None = None
    is_view: bool = False
    changed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Dequantise:
    """The function of a quantized tensor's node."""

    layout: QuantizedLayout

    def __call__(self, stored: torch.Tensor) -> torch.Tensor:
        return self.layout.dequantise(stored, self.layout.torch_dtype)


@dataclass(frozen=True)
class Assemble:
    """The function of the node of a tensor in chunks along several dimensions."""

    chunked: ChunkedTensor

    def __call__(self, *parts: torch.Tensor) -> torch.Tensor:
        return self.chunked.assembled(parts, self.chunked.dtype)


class Traced(torch.Tensor):
    """A tensor on the meta device that records how it was made."""

    node: Node

    @staticmethod
    def wrap(tensor: torch.Tensor, node: Node) -> Traced:
        with without_torch_functions():
            traced: Any = tensor.detach().requires_grad_(tensor.requires_grad)
        traced.__class__, traced.node = Traced, node
        made: Traced = traced
        return made

    @classmethod
    def of(cls, stored: StoredTensor | ChunkedTensor, layout: QuantizedLayout | None = None) -> Traced:
        """Trace a stored tensor; of a quantized one, its dequantized form."""
        if isinstance(stored, ChunkedTensor):
            chunks = tuple(Node(stored=chunk.stored) for chunk in stored.chunks)
            meta = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            return cls.wrap(meta, Node(None, Assemble(stored), chunks))
        dtype = stored.dtype if layout is None else layout.torch_dtype
        meta = torch.empty(shape_of(stored, layout), dtype=dtype, device="meta")
        node = Node(stored=stored)
        return cls.wrap(meta, node if layout is None else Node(None, Dequantise(layout), (node,)))

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options = {name: value for name, value in (kwargs or {}).items() if name not in ("device", "non_blocking")}
        arguments = tuple(a for a in args if not isinstance(a, torch.device)) if func is torch.Tensor.to else args
        with without_torch_functions():
            result = func(*arguments, **options) if func is not torch.Tensor.to else _cast(*arguments, **options)
        name = getattr(func, "__name__", "")
        if func == SET_DATA and isinstance(args[0], Traced):
            if not isinstance(args[1], Traced):
                raise _refusal("data")
            args[0].node = args[1].node
            return None
        if _is_in_place(name):
            return _note_change(name, result if isinstance(result, torch.Tensor) else arguments[0], result)
        if isinstance(result, torch.Tensor):
            return cls._result(func, name, arguments, options, result, None)
        if isinstance(result, tuple | list) and any(isinstance(item, torch.Tensor) for item in result):
            return type(result)(cls._result(func, name, arguments, options, r, i) for i, r in enumerate(result))
        return result

    @classmethod
    def _result(
        cls, func: Function, name: str, args: Any, options: dict[str, Any], result: torch.Tensor, index: Any
    ) -> torch.Tensor:
        first = args[0] if args and isinstance(args[0], Traced) else None
        if first is not None and _is_same(func, name, args, first, result):
            return result if result is first else cls.wrap(result, first.node)
        function = _cast if func is torch.Tensor.to else func
        storages = {a.untyped_storage()._cdata for a in (*args, *options.values()) if isinstance(a, Traced)}
        is_view = result.untyped_storage()._cdata in storages
        return cls.wrap(result, Node(None, function, _nodes(args), tuple(_nodes(options).items()), index, is_view))


def recipe_of(traced: Traced) -> Recipe:
    """Return the recipe of `traced` from its stored tensors."""
    if traced.node.stored is not None:
        return Recipe((traced.node.stored,), None, traced.dtype)
    leaves: dict[int, StoredTensor] = {}
    _collect(traced.node, leaves)
    numbers = {key: number for number, key in enumerate(leaves)}
    node = traced.node
    make = _maker(node, numbers, traced.dtype)
    return Recipe(tuple(leaves.values()), make, traced.dtype, _goes_by_rows(node), node)


def _maker(node: Node, numbers: dict[int, int], dtype: torch.dtype) -> Make:
    inner = node.arguments[0] if node.function is _cast else None
    if isinstance(inner, Node) and isinstance(inner.function, Dequantise):  # directly in the wanted dtype
        layout = inner.function.layout
        return lambda parts, empty: layout.dequantise(parts[0], dtype, empty)
    if isinstance(inner, Node) and isinstance(inner.function, Assemble):
        chunked = inner.function.chunked
        return lambda parts, empty: chunked.assembled(parts, dtype, empty)
    return lambda parts, empty: _replay(node, parts, numbers, {})


def _goes_by_rows(node: Node) -> bool:
    """Return True if all operations treat each row of one stored tensor alone."""
    if node.stored is not None:
        return True
    by_rows = node.function is _cast or isinstance(node.function, Dequantise)
    return by_rows and isinstance(node.arguments[0], Node) and _goes_by_rows(node.arguments[0])


def recipe_of_row(recipe: Recipe, row: int) -> Recipe | None:
    """Return the recipe of `tensor[row]`, which reads no other rows; None if that is not known."""
    if recipe.make is None or recipe.by_rows:
        stored = [part.row(row) for part in recipe.parts]
        return None if None in stored else replace(recipe, parts=tuple(filter(None, stored)), by_rows=False, node=None)
    node = None if recipe.node is None else _row(recipe.node, row)
    if node is None:
        return None
    if node.stored is not None:
        return Recipe((node.stored,), None, recipe.dtype)
    leaves: dict[int, StoredTensor] = {}
    _collect(node, leaves)
    numbers = {key: number for number, key in enumerate(leaves)}
    found = node
    return Recipe(tuple(leaves.values()), lambda parts, empty: _replay(found, parts, numbers, {}), recipe.dtype)


def _row(node: Node, row: int) -> Node | None:
    """Return the node of `node[row]`, through stacks and concatenations."""
    if node.stored is not None:
        stored = node.stored.row(row)
        return None if stored is None else Node(stored=stored)
    options = dict(node.options)
    dim = options.get("dim", node.arguments[1] if len(node.arguments) > 1 else 0)
    by_rows = node.function is _cast or isinstance(node.function, Dequantise)
    if by_rows and isinstance(node.arguments[0], Node):
        inner = _row(node.arguments[0], row)
        return None if inner is None else replace(node, arguments=(inner, *node.arguments[1:]))
    if node.function is torch.stack and dim == 0 and row < len(node.arguments[0]):
        chosen = node.arguments[0][row]
        return chosen if isinstance(chosen, Node) else None
    if node.function is torch.cat and isinstance(dim, int) and dim > 0:
        rows = [_row(child, row) for child in node.arguments[0]]
        return None if None in rows else Node(None, torch.cat, (rows, dim - 1))
    return None


def _is_same(func: Any, name: str, args: Any, first: Traced, result: torch.Tensor) -> bool:
    """Return True if the result has the same values as the first argument."""
    if result is first or name in ("detach", "requires_grad_", "clone", "alias", "contiguous", "cpu"):
        return result.stride() == first.stride()
    if func is torch.Tensor.to:
        return result.dtype == first.dtype
    if name == "__getitem__":
        return args[1] is Ellipsis
    return name == "__get__" and result.shape == first.shape and result.dtype == first.dtype  # .data


def _cast(tensor: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
    """Do `tensor.to` without a device, which others decide."""
    dtype = next((a for a in (*args, options.get("dtype")) if isinstance(a, torch.dtype)), tensor.dtype)
    return tensor.to(dtype)


def _nodes(tree: Any) -> Any:
    if isinstance(tree, Traced):
        return tree.node
    if isinstance(tree, list | tuple):
        return type(tree)(_nodes(item) for item in tree)
    return {key: _nodes(item) for key, item in tree.items()} if isinstance(tree, dict) else tree


def _is_in_place(name: str) -> bool:
    if name.endswith("__"):
        return name == "__setitem__"
    return name.endswith("_") and name not in ("requires_grad_", "detach_", "share_memory_")


def _note_change(name: str, changed: object, result: object) -> object:
    """Record a change in place. The result may be discarded, such as initial values."""
    if not isinstance(changed, Traced) or changed.node.stored is not None or changed.node.is_view:
        raise _refusal(name)
    changed.node.changed.append(name)
    return result


def _refusal(name: str) -> UnsupportedError:
    return UnsupportedError(f"a checkpoint's tensor would be changed in place by {name} while it is loaded")


def _collect(tree: object, leaves: dict[int, StoredTensor]) -> None:
    """Collect the stored tensors in `tree`.

    Raises:
        UnsupportedError: one of its operands was changed in place, which cannot be repeated.
    """
    if isinstance(tree, Node):
        if tree.changed:
            raise _refusal(tree.changed[0])
        if tree.stored is not None:
            leaves.setdefault(id(tree.stored), tree.stored)
        _collect((tree.arguments, tree.options), leaves)
    elif isinstance(tree, list | tuple):
        for item in tree:
            _collect(item, leaves)


def _replay(tree: Any, parts: Sequence[torch.Tensor], numbers: dict[int, int], done: dict[int, Any]) -> Any:
    """Repeat the operations on the parts."""
    if isinstance(tree, list | tuple):
        return type(tree)(_replay(item, parts, numbers, done) for item in tree)
    if not isinstance(tree, Node):
        return tree
    if tree.stored is not None:
        return parts[numbers[id(tree.stored)]]
    if id(tree) not in done and tree.function is not None:
        arguments = _replay(tree.arguments, parts, numbers, done)
        result = tree.function(*arguments, **dict(_replay(tree.options, parts, numbers, done)))
        done[id(tree)] = result if tree.index is None else result[tree.index]
    return done[id(tree)]

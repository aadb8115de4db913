"""Torch's functions: tables of those that need the data of their arguments and those that do not, and what each writes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from swapper.tensors.torch_private import schemas_of, without_torch_functions

Function = Callable[..., Any]


def getters(*names: str) -> set[Function]:
    """Return what `__torch_function__` is given for these attributes; versions of torch differ in which there are."""
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


def _named(names: str, *spaces: Any) -> set[Function]:
    return {getattr(space, name) for space in spaces for name in names.split() if hasattr(space, name)}


METADATA: set[Function] = {
    *getters(
        *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "names"),
        *("_version", "retains_grad", "is_cuda", "is_cpu", "is_sparse", "is_sparse_csr", "is_quantized"),
        *("is_meta", "is_mkldnn", "is_mps", "is_xpu", "is_nested", "is_vulkan", "is_ort", "is_mtia", "is_ipu"),
        *("output_nr", "_backward_hooks", "_post_accumulate_grad_hooks", "itemsize", "nbytes", "_grad", "_base"),
        *("is_xla", "is_maia", "name"),
    ),
    *(
        getattr(torch.Tensor, name).__set__
        for name in ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")
    ),
    getattr(torch.Tensor, "grad").__delete__,  # noqa: B009  # mypy takes it for an instance's
    *_named(
        "size dim ndimension numel nelement stride element_size is_floating_point is_complex is_contiguous is_signed is_inference "
        "storage_offset get_device requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad __len__ "
        "is_same_size dim_order is_conj is_neg has_names _is_view sparse_dim dense_dim",
        torch.Tensor,
    ),
    *_named(
        "is_floating_point is_complex is_signed is_inference numel is_same_size is_conj is_neg _has_compatible_shallow_copy_type",
        torch,
    ),
}
"""Functions that read or change properties of a tensor, not its data."""

LIKE: set[Function] = _named(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full "
    "new_empty_strided result_type",
    torch,
    torch.Tensor,
)
"""Functions that make a tensor of their first argument's form."""

AFTER_ANOTHER: set[Function] = _named("type_as to expand_as view_as reshape_as", torch.Tensor)
"""Functions that bring their first argument into the form of another one."""

VIEWS: set[Function] = {
    *getters("data", "T", "mT", "mH", "H"),
    *_named(
        "view view_as t transpose permute expand expand_as unsqueeze squeeze narrow select split chunk unbind tensor_split hsplit "
        "vsplit dsplit diagonal unfold movedim moveaxis swapaxes swapdims adjoint broadcast_to as_strided unflatten",
        torch.Tensor,
        torch,
    ),
}
"""Functions that return a view of their first argument. All others are taken to read it."""

CHANGES_OF_FORM: set[Function] = _named(
    "t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ detach_ resize_ resize_as_ set_ share_memory_ rename_ "
    "apply_ map_ map2_ module_load data_ptr untyped_storage storage _typed_storage numpy __array__ __dlpack__ as_subclass "
    "__reduce_ex__ _make_subclass is_set_to is_shared",
    torch.Tensor,
    torch,
)
"""Functions that would change the form or the memory of a cold tensor, or hand out that memory."""

SET_DATA: Function = torch.Tensor.data.__set__  # type: ignore[attr-defined]

KEEPS_NOTHING: set[Function] = _named("cat concat concatenate stack hstack vstack dstack", torch)
"""Functions that read many tensors, whose data autograd does not save."""

_OPERATORS = "add sub mul truediv floordiv div mod pow and or xor lshift rshift matmul"
_IN_PLACE = frozenset(["__setitem__", "__set__", *(f"__i{name}__" for name in _OPERATORS.split())])


RUNNING: dict[Function, tuple[tuple[int, str], ...]] = {
    F.batch_norm: ((1, "running_mean"), (2, "running_var")),
    F.instance_norm: ((1, "running_mean"), (2, "running_var")),
    **dict.fromkeys(
        _named("batch_norm instance_norm native_batch_norm", torch), ((3, "running_mean"), (4, "running_var"))
    ),
}
"""Running statistics, position and name of each argument: the schemas do not say that they are written."""


def written_arguments(function: Function) -> list[tuple[int, str]]:
    """Return position and name of each argument that `function`, one of torch's, writes to, but `out=`."""
    first = [(0, "self")] if writes_first(function) else []
    return [*first, *_written_by_schema(getattr(function, "__name__", "")), *RUNNING.get(function, ())]


@cache
def _written_by_schema(name: str) -> frozenset[tuple[int, str]]:
    """Return the arguments that an operator writes to, but the first."""
    schemas = schemas_of(f"aten::{name}")
    after_first = ((place, of) for schema in schemas for place, of in enumerate(schema.arguments) if place > 0)
    return frozenset(
        (place, of.name) for place, of in after_first if not of.kwarg_only and of.alias_info and of.alias_info.is_write
    )


def writes_first(function: Function) -> bool:
    """Return whether `function`, one of torch's, writes to its first argument."""
    name = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


CONVERSIONS: frozenset[Function] = frozenset(
    getattr(torch.Tensor, name)
    for name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "contiguous")
)
"""Conversions, which training loops and pipelines call by habit. One that changes nothing (`.float()` of fp32) needs no data."""


def changes_nothing(convert: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> bool:
    """Return whether `convert(tensor)` would be `tensor` itself, by asking it of a small one that is like it.

    Args:
        convert: does not change the tensor that it is given, or changes it visibly (`share_memory_`).
        tensor: contiguous; its data is not read.
    """
    with without_torch_functions(), torch.no_grad():
        like = torch.empty((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
        try:
            return convert(like) is like and not (like.device.type == "cpu" and like.is_shared())
        except Exception:
            return False  # the real conversion raises the error


def written_among(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that `func`, one of torch's, would write to with these arguments."""
    if kwargs.get("inplace") or kwargs.get("max_norm") is not None:  # of torch.nn.functional, which gives these by name
        return tensors_among((args, kwargs))
    by_place = [args[place] if place < len(args) else kwargs.get(name) for place, name in written_arguments(func)]
    by_name = [kwargs.get(name) for name in ("input", "tensor")] if writes_first(func) else []
    return tensors_among([*by_place, *by_name, kwargs.get("out")])


def tensors_among(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in the arguments or the result of a function: in lists, tuples and dictionaries, at any depth."""
    found: list[torch.Tensor] = []
    pending = [tree]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
    return found


def leaves(tree: Any) -> Iterator[Any]:
    """Yield what lies in lists, tuples and dictionaries, at any depth."""
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        yield from leaves(list(tree.values()))
    else:
        yield tree


# --- tensors of classes with a __torch_function__ of their own ----------------------------------------------------------


def native(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do `func` as if all tensors were of torch's own class."""
    with without_torch_functions():
        return func(*args, **kwargs)


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as one of torch's own class."""
    with without_torch_functions():
        return tensor.as_subclass(torch.Tensor)


def share_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    with without_torch_functions():
        try:
            return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)
        except NotImplementedError:  # it has none: functorch has wrapped it
            return False

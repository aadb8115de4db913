"""Guarded tensors: an operation on one is done, done otherwise, or refused, by rules (docs/architecture.md has the table).

Tables of torch's functions say which need the data of their arguments and which do not, and what each writes to.

A guarded tensor is an ordinary one whose class is a `GuardedTensor` for a time: the same object, with its shape, dtype and hooks.
What reads or changes its properties (METADATA) is done at once. A `WatchedTensor` has its data, does operations as an ordinary
tensor does, and its `TensorWatch` has the rules. Where the data is not in memory a class has them, and is asked first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy
import torch
from torch.nn import functional as F

from swapper.errors import StateError
from swapper.tensors.torch_private import AtenOperation, not_traced, schemas_of, without_torch_functions

Function = Callable[..., Any]


def getters(*names: str) -> set[Function]:
    """Return what `__torch_function__` is given for these attributes; versions of torch differ in which there are."""
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


def _named(names: str, *spaces: object) -> set[Function]:
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


COLLECTIVES: dict[Function, tuple[tuple[int, str], ...]] = {
    getattr(torch.distributed, name): ((place, of),)
    for of, place, names in (
        ("tensor", 0, "broadcast all_reduce reduce scatter recv irecv"),
        ("tensors", 0, "all_reduce_coalesced"),
        ("tensor_list", 0, "all_gather"),
        ("gather_list", 1, "gather"),
        ("output_tensor_lists", 0, "all_gather_coalesced"),
        ("output_tensor", 0, "all_gather_into_tensor all_gather_single"),
        ("output", 0, "reduce_scatter reduce_scatter_tensor reduce_scatter_single all_to_all_single"),
        ("output_tensor_list", 0, "all_to_all"),
    )
    for name in names.split()
    if hasattr(torch.distributed, name)
}
"""As RUNNING, of torch.distributed. They write past what counts versions."""

SENDING: set[Function] = _named("send isend", torch.distributed)


def goes_on_after(func: Function, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of `func` uses its tensors after it has returned."""
    is_collective = func in COLLECTIVES or func in SENDING
    return is_collective and (bool(kwargs.get("async_op")) or func.__name__ in ("isend", "irecv"))


def written_arguments(function: Function) -> list[tuple[int, str]]:
    """Return position and name of each argument that `function`, one of torch's, writes to, but `out=`."""
    first = [(0, "self")] if writes_first(function) else []
    if function in COLLECTIVES:
        return list(COLLECTIVES[function])
    return [*first, *_written_by_schema(_name_of(function)), *RUNNING.get(function, ())]


def _name_of(function: Function) -> str:
    """Return the name of one of torch's functions, or of one of ATen's operations without that of its overload."""
    return getattr(function, "__name__", "").partition(".")[0]


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
    name = _name_of(function)
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


CONVERSIONS: frozenset[Function] = frozenset(
    getattr(torch.Tensor, name)
    for name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "contiguous")
)
"""Conversions, which training loops and pipelines call by habit. One that changes nothing (`.float()` of fp32) needs no data."""


def changes_nothing(convert: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> bool:
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


def tensors_among(tree: object) -> list[torch.Tensor]:
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


def leaves(tree: object) -> Iterator[object]:
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


class GuardedTensor(torch.Tensor):
    """The base of classes that a tensor's class is set to. A subclass has the rules for what needs data."""

    @classmethod
    @not_traced
    def __torch_function__(cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with without_torch_functions():
                return func(*args, **(kwargs or {}))
        return cls._operate(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return self._text()

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) not in memo:
            instead = self._instead("__deepcopy__")
            memo[id(self)] = self.__deepcopy__(memo) if instead is self else instead
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._instead("__reduce_ex__").__reduce_ex__(protocol)

    @staticmethod
    def _operate(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Do torch's function `func`, which needs data or may need it, with these arguments; some are of this class."""
        raise NotImplementedError

    def _text(self) -> str:
        return repr(self._instead("__repr__"))

    def _instead(self, operation: str) -> torch.Tensor:
        """Return what `operation`, a method's name, is done with.

        Returns:
            Itself if it is an ordinary tensor now. Else one with its content; for `__deepcopy__`: the copy.
        """
        raise NotImplementedError


class TensorWatch:
    """The rules of watched tensors. These do as ordinary tensors do.

    Attributes:
        is_mapped: the tensors are mapped from files: an array gets a copy, and pickling one needs none.
        locks_arrays: arrays are read-only.
        moves_copy: `.to()` returns a copy also where nothing changes.
        follows_writes: `wrote` is called.
    """

    is_mapped = False
    locks_arrays = True
    moves_copy = False
    follows_writes = False

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Watch `tensor`, an ordinary one, from now on; return it."""
        tensor.__class__ = WatchedTensor
        tensor.swapper_watch = self  # type: ignore[attr-defined]
        return tensor

    def use(self, tensor: torch.Tensor) -> None:
        """An operation needs the data of `tensor`: raise, or make an ordinary tensor of it, or allow it."""

    def used(self, tensor: torch.Tensor) -> None:
        """It is done: raise if its result may be wrong."""

    def changes_nothing(self, func: Function, args: Sequence[object]) -> bool:
        """Return whether `func`, which writes to a tensor, need not be done."""
        return False

    def write(self, how: str) -> None:
        """A function of this name is about to write to a tensor: raise, or allow it."""

    def wrote(self, how: str) -> None:
        """It has written."""

    def text(self, tensor: torch.Tensor) -> str | None:
        """Return a text in place of the content."""
        return None


class WatchedTensor(GuardedTensor):
    """A tensor whose data is in memory.

    Attributes:
        swapper_watch: has the rules.
    """

    swapper_watch: TensorWatch

    @staticmethod
    def _operate(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        tensors = tensors_among((args, kwargs))
        for tensor in tensors:
            if isinstance(tensor, GuardedTensor) and type(tensor) is not WatchedTensor:  # its data is not in memory
                return type(tensor)._operate(func, args, kwargs)  # which refuses, or calls `func` again when it is
        for tensor in tensors:
            if type(tensor) is WatchedTensor:  # yet: one use may end several watches
                tensor.swapper_watch.use(tensor)
        watched = _watched_among((args, kwargs))
        if not watched:
            return func(*args, **kwargs)
        how = _name_of(func) or str(func)
        targets = _watched_among(written_among(func, args, kwargs))
        if goes_on_after(func, kwargs) and any(tensor.swapper_watch.follows_writes for tensor in targets):
            raise StateError(
                f"{how} would write to a tensor of optimizer.state after its call: leave async_op out, or call recv, not irecv"
            )
        for tensor in targets:
            if tensor.swapper_watch.changes_nothing(func, args):
                return tensor
            tensor.swapper_watch.write(how)
        counts = func not in COLLECTIVES and not isinstance(func, AtenOperation)  # which are below what counts versions
        followed = [tensor for tensor in (watched if counts else targets) if tensor.swapper_watch.follows_writes]
        versions = [tensor._version for tensor in followed]
        result = _run(func, args, kwargs, watched)
        for tensor in watched:
            tensor.swapper_watch.used(tensor)
        changes = zip(followed, versions, strict=True)
        written = [tensor for tensor, version in changes if not counts or tensor._version != version]
        for watch in dict.fromkeys(tensor.swapper_watch for tensor in written):
            watch.wrote(how)
        return result

    def _text(self) -> str:
        return self.swapper_watch.text(self) or super()._text()

    def _instead(self, operation: str) -> torch.Tensor:
        watch = self.swapper_watch
        watch.use(self)
        if type(self) is not WatchedTensor:
            return self
        with without_torch_functions():
            plain = self.as_subclass(torch.Tensor)
        if operation == "__repr__" or (watch.is_mapped and operation == "__reduce_ex__"):
            return plain
        copied = plain.detach().clone()
        watch.used(self)
        return copied


def watch_of(tensor: object) -> TensorWatch | None:
    return tensor.swapper_watch if type(tensor) is WatchedTensor else None


def unwatch(tensor: torch.Tensor) -> None:
    """Make a watched tensor an ordinary one again."""
    tensor.__class__ = torch.Tensor
    del tensor.swapper_watch  # type: ignore[attr-defined]


def _watched_among(tree: object) -> list[WatchedTensor]:
    return [tensor for tensor in tensors_among(tree) if type(tensor) is WatchedTensor]


_ARRAYS: set[Callable[..., object]] = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}


def _run(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], watched: Sequence[WatchedTensor]) -> Any:
    """Do `func` as with ordinary tensors, and watch results that share memory with `watched`."""
    watches = [tensor.swapper_watch for tensor in watched]
    with without_torch_functions():
        if func in _ARRAYS and watches[0].is_mapped:  # an array checks nothing
            args = (args[0].as_subclass(torch.Tensor).clone(), *args[1:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.to and any(result is t and t.swapper_watch.moves_copy for t in watched):
            return result.detach().as_subclass(torch.Tensor).clone()
        for item in leaves(result):
            if isinstance(item, numpy.ndarray):
                if any(watch.locks_arrays for watch in watches):
                    item.flags.writeable = False
            elif type(item) is torch.Tensor:
                shown = next((tensor for tensor in watched if share_memory(item, tensor)), None)
                if shown is not None:
                    shown.swapper_watch.watch(item)
    return result

"""Cold parameters: the class of a parameter whose pages may not be in memory, and what operations on it do.

While a parameter is cold its class is `ColdParameter`. It is the same object with the same shape, dtype, gradient and hooks.
Operations on those need no data and run at once, and so do views, of class `ColdView`. Other operations go to the parameter's fault
handler (guarded.py). Inside the forward of a module that contains the parameter, the handler reads it in for the rest of that
forward (a parent may use a child's weight directly, as nn.MultiheadAttention does). Anywhere else it is read in for that one
operation, to be read or changed; or the operation is refused, if the user asked for that or it would not be exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from swapper.errors import ColdParameterError, StateError
from swapper.modules.guarded import RunWith, answering_handler, forget, guarded_parameters, handler_of, name_of, refuse
from swapper.runtime.process import after_fork_in_child
from swapper.tensors.guarded_tensor import (
    AFTER_ANOTHER,
    CHANGES_OF_FORM,
    CONVERSIONS,
    LIKE,
    METADATA,
    SET_DATA,
    VIEWS,
    Function,
    GuardedTensor,
    as_plain,
    changes_nothing,
    getters,
    goes_on_after,
    leaves,
    native,
    share_memory,
    tensors_among,
    written_among,
)
from swapper.tensors.torch_private import pytree, without_data, without_torch_functions


def unguard(parameter: nn.Parameter) -> None:
    """Make `parameter` an ordinary one for good."""
    materialize(parameter)
    forget(parameter)


def leave_cold(parameter: nn.Parameter) -> None:
    """Leave `parameter` cold for good, without a fault handler and memory: it keeps nothing of its manager alive."""
    _drop_data(parameter)
    set_cold(parameter)
    forget(parameter)


def leave_view(view: torch.Tensor) -> None:
    """Leave a tensor that follows a cold parameter without memory: that closes."""
    if type(view) is ColdView:
        _drop_data(view)


def _drop_data(tensor: torch.Tensor) -> None:
    """Have a tensor refer to no memory, unless it has a stand-in there, of one element."""
    with without_torch_functions():
        if tensor.untyped_storage().nbytes() >= tensor.nbytes > 0:
            tensor.data = without_data(tensor)


def _forbid_in_child() -> None:
    """Make all guarded parameters cold in a forked child, also resident ones: swapper's memory does not exist there."""
    parameters = guarded_parameters()
    set_cold(*parameters)
    if parameters:
        METADATA.difference_update(getters("grad", "_grad"))  # gradients lie there too


after_fork_in_child(_forbid_in_child)


def set_cold(*parameters: nn.Parameter) -> None:
    for parameter in parameters:
        parameter.__class__ = ColdParameter


def materialize(*parameters: nn.Parameter) -> None:
    for parameter in parameters:
        if type(parameter) is ColdParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def follow(tensor: torch.Tensor, parameter: nn.Parameter, offset: int) -> None:
    """Make `tensor` a view of `parameter`, from element `offset` on, with the shape and strides that it has."""
    with without_torch_functions():
        tensor.data = parameter.data.as_strided(tensor.shape, tensor.stride(), offset)
        if is_cold(parameter):
            _watch(tensor, parameter, None, torch.Tensor.as_strided)


def is_cold(parameter: torch.Tensor) -> bool:
    return type(parameter) is ColdParameter


_gives_aliases: ContextVar[bool] = ContextVar("gives_aliases", default=False)
is_aliasing = _gives_aliases.get
"""Returns whether this is within `aliases()`."""


@contextmanager
def aliases() -> Iterator[None]:
    """Return a context in which `state_dict()` of cold parameters gives tensors at their addresses, without data."""
    before = _gives_aliases.set(True)
    try:
        yield
    finally:
        _gives_aliases.reset(before)


SAME_FORM = (
    "Assign values of the same shape and dtype (`p.data = x` copies them to the parameter), or change them inside `with "
    "manager.gather(..., write=True)`. Other shapes, dtypes or devices (resize_token_embeddings, .to(), .half() and the like) "
    "cannot be applied after offload: apply them before manager.offload"
)
"""A user's remedy."""

ASSIGNED_BESIDE_ALIAS = (
    "was assigned another tensor (`p.data = x`), and something still refers to its memory from before, which keeps the old "
    "values in plain torch and would get the new ones here: keep a copy instead (`backup = p.data.clone()`), or write the "
    "values in place (`p.data.copy_(x)`). If it is the graph of x itself, compute x under torch.no_grad()"
)


def _answer(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Do torch's function `func` with these arguments, some of them cold."""
    action = _ACTIONS.get(func)
    done = NotImplemented if action is None else action(func, args, kwargs)
    return _operate(func, args, kwargs) if done is NotImplemented else done


class ColdParameter(GuardedTensor, nn.Parameter):
    """The class of a cold parameter. It is never instantiated: a parameter's class is set to it and back."""

    _operate = staticmethod(_answer)

    def __format__(self, specification: str) -> str:
        return repr(self) if not specification else str(super().__format__(specification))  # type: ignore[no-untyped-call]

    def _text(self) -> str:
        return repr(self) if _has_caught_up(self) else _describe(self)

    def _instead(self, operation: str) -> torch.Tensor:
        """Pickle a plain parameter on a tensor that shows this one: torch.save of a model need not hold all of it in memory."""
        if _has_caught_up(self):
            return self
        is_copy = operation == "__deepcopy__"
        shown = None if is_copy else answering_handler(self, "pickling").detached(self)
        return nn.Parameter(_copy(self) if shown is None else as_plain(shown), self.requires_grad)


class ColdView(GuardedTensor):
    """The class of a view of a cold parameter. It is never instantiated: a tensor's class is set to it.

    Attributes:
        swapper_owner: the parameter.
        swapper_apart: it has other memory, which shows the parameter's content.
    """

    swapper_owner: nn.Parameter
    swapper_apart: bool

    _operate = staticmethod(_answer)

    def _text(self) -> str:
        return _describe(self)

    def _instead(self, operation: str) -> torch.Tensor:
        if operation == "__reduce_ex__":
            refuse(self.swapper_owner, "pickling a view")
        if self.grad_fn is not None:
            raise RuntimeError("only tensors created explicitly by the user support the deepcopy protocol: detach it")
        return _copy(self).requires_grad_(self.requires_grad)


Cold = ColdParameter | ColdView


# --- functions that need no data, or special handling -----------------------------------------------------------------


def _differentiate(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.autograd.grad: give cold tensors by their edges in the graph. The backward must run with torch functions enabled."""
    outputs, inputs, *others = args
    if any(isinstance(tensor, Cold) for tensor in tensors_among((outputs, others, kwargs))):
        return NotImplemented
    with without_torch_functions():
        edges = [torch.autograd.graph.get_gradient_edge(i) if isinstance(i, Cold) else i for i in inputs]
    return func(outputs, edges, *others, **kwargs)


def _detach(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    first = args[0] if args else kwargs["input"]
    if type(first) is not ColdParameter:
        return _view(func, (first,), {})
    if is_aliasing():
        return native(func, args, kwargs)
    fault_handler = handler_of(first)
    detached = None if fault_handler is None else fault_handler.detached(first)
    return NotImplemented if detached is None else detached


def _index(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    row = _in_part(args[0], func, args, kwargs)
    if row is not NotImplemented:
        return row
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    is_view = all(i is None or i is Ellipsis or type(i) in (int, slice) for i in index)
    return _view(func, args, kwargs) if is_view else NotImplemented


def _by_rows(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """F.embedding and F.linear, whose weight is their second argument."""
    return _in_part(args[1] if len(args) > 1 else kwargs.get("weight"), func, args, kwargs)


def _copy_into(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return NotImplemented if _only_first_is_cold(args, kwargs) is None else _in_part(args[0], func, args, kwargs)


def _in_part(parameter: Any, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fault_handler = handler_of(parameter) if type(parameter) is ColdParameter else None
    return NotImplemented if fault_handler is None else fault_handler.in_part(parameter, func, args, kwargs)


def _stride(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """as_strided: an offset counts from the beginning of the storage, which many parameters share."""
    has_offset = len(args) > 3 or kwargs.get("storage_offset") is not None
    return _refuse_form(func, args, kwargs) if has_offset else _view(func, args, kwargs)


def _convert(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    first = args[0]
    if not isinstance(first, Cold):
        return _follow_form(func, args, kwargs)
    if native(torch.Tensor.is_contiguous, (first,), {}) and changes_nothing(
        lambda tensor: func(tensor, *args[1:], **kwargs), first
    ):
        return first
    if "meta" in map(str, (*args[1:], *kwargs.values())):  # the first half of Module.to, whose second half would fail
        refuse(owner_of(first), func)
    return NotImplemented


def _set_data(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`p.data = x`: with the form of `p`, a write. The values are copied when the lease for it ends."""
    target, source = args
    if target is source:  # Module.to, where nothing changes
        return None
    if isinstance(source, Cold):  # in plain torch both would share memory from then on
        if _is_all_of(source, target):
            return None
        refuse(owner_of(source), "setting .data of another tensor to it (copy it: `.clone()`, or `x.data.copy_(p)`)")
    if type(target) is ColdView:
        refuse(target.swapper_owner, "setting .data of a view")
    handler = handler_of(target) if is_cold(target) else None
    if handler is not None and handler.unmanage(target):
        return func(target, source)
    fault_handler = answering_handler(target, "setting .data")
    with without_torch_functions():
        is_alike = source.shape == target.shape and source.dtype == target.dtype and source.device == target.device
    if not is_alike or source.layout is not torch.strided:
        raise ColdParameterError(
            f"parameter {fault_handler.describe(target)} has {target.dtype} {list(target.shape)}, and .data was set to "
            f"{source.dtype} {list(source.shape)} on {source.device}. {SAME_FORM}"
        )
    fault_handler.check_assignable(target)
    return NotImplemented


def _is_all_of(view: Cold, parameter: torch.Tensor) -> bool:
    """Return True if `view` shows `parameter` as it is."""
    with without_torch_functions():
        is_same_form = view.shape == parameter.shape and view.stride() == parameter.stride()
        return owner_of(view) is parameter and is_same_form and view.dtype == parameter.dtype


def _without_data_of_first(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return NotImplemented if _only_first_is_cold(args, kwargs) is None else native(func, args, kwargs)


def _follow_form(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Do a function that needs only the form of a cold argument, unless that is the first one."""
    if args and not isinstance(args[0], Cold):
        form, named = pytree.tree_map_only(Cold, as_plain, (args[1:], kwargs))
        return func(args[0], *form, **named)
    return _view(func, args, kwargs) if func in VIEWS else NotImplemented


def _view(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    first = _only_first_is_cold(args, kwargs)
    _check_views([] if first is None else [first], func)
    if first is None or not is_cold(owner_of(first)) or _fault_in([owner_of(first)], func):
        return NotImplemented
    owner = owner_of(first)
    whole = answering_handler(owner, func).whole(owner) if type(first) is ColdParameter else None
    if whole is None and _has_no_memory(owner):
        return NotImplemented
    result = native(func, args if whole is None else (whole, *args[1:]), kwargs)
    return _watched(result, [owner], {} if whole is None else {id(owner): whole}, [first], func)


def _has_no_memory(parameter: nn.Parameter) -> bool:
    """Return True if nothing is reserved for its data meanwhile, as on an accelerator: torch makes views of what is there."""
    with without_torch_functions():
        return parameter.numel() > 0 and parameter.untyped_storage().nbytes() == 0


def _to_array(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """numpy(): a copy that cannot be written to, as an array can neither follow the parameter nor expire."""
    first = _only_first_is_cold(args, kwargs)
    if first is None or first.requires_grad:
        return _refuse_form(func, args, kwargs)
    if not isinstance(first, ColdView) and _fault_in([first], func):
        return NotImplemented
    array = native(func, (_copy(first), *args[1:]), kwargs)
    array.flags.writeable = False
    return array


def _refuse_form(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    cold = _cold_among((args, kwargs))
    if not _fault_in([owner_of(tensor) for tensor in cold], func):
        refuse(owner_of(cold[0]), func)
    return NotImplemented


def _only_first_is_cold(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument if it, and no other, is cold; else None."""
    return args[0] if args and isinstance(args[0], Cold) and not _cold_among((args[1:], kwargs)) else None


_Action = Callable[[Function, tuple[object, ...], dict[str, object]], object]

_ACTIONS: dict[Function, _Action] = {
    **dict.fromkeys(CHANGES_OF_FORM, _refuse_form),
    **dict.fromkeys(LIKE, _without_data_of_first),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(CONVERSIONS, _convert),
    **dict.fromkeys(AFTER_ANOTHER - CONVERSIONS, _follow_form),
    SET_DATA: _set_data,
    torch.Tensor.numpy: _to_array,
    torch.Tensor.__array__: _to_array,
    torch.autograd.grad: _differentiate,
    torch.Tensor.backward: _without_data_of_first,
    torch.Tensor.detach: _detach,
    torch.detach: _detach,
    torch.Tensor.__getitem__: _index,
    torch.Tensor.as_strided: _stride,
    torch.as_strided: _stride,
    torch.Tensor.copy_: _copy_into,
    F.embedding: _by_rows,
    F.linear: _by_rows,
}
"""By function, what is done; NotImplemented: it is an operation that needs data. For those not in METADATA."""


# --- operations that need data ----------------------------------------------------------------------------------------


def _operate(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    touched = _cold_among((args, kwargs))
    owners = list({id(owner_of(tensor)): owner_of(tensor) for tensor in touched}.values())
    _check_views(touched, func)
    if _fault_in(owners, func) and all(type(tensor) is not ColdView for tensor in touched):
        if any(isinstance(tensor, Cold) for tensor in touched):  # a wrapper of torch.func's keeps its class
            return native(func, args, kwargs)
        return func(*args, **kwargs)  # which asks other guarded tensors among them
    if goes_on_after(func, kwargs):
        refuse(owners[0], f"{name_of(func)}, which goes on after its call (async_op=True, isend, irecv),")
    away = [owner for owner in owners if is_cold(owner)]
    changed = [tensor for tensor in written_among(func, args, kwargs) if isinstance(tensor, Cold)]
    written = {id(owner_of(tensor)) for tensor in changed}
    _check_written(func, args, kwargs, changed)

    def run(instead: Mapping[int, torch.Tensor]) -> object:
        arguments = _exchanged((args, kwargs), instead) if instead else (args, kwargs)
        views = [t for t in touched if type(t) is ColdView and id(t.swapper_owner) not in instead]
        with _as_plain_tensors(views):
            result = func(*arguments[0], **arguments[1])
        return _watched(result, owners, instead, touched, func)

    def read(instead: Mapping[int, torch.Tensor]) -> object:
        return _with_data(away, func, "read", run, instead)

    return _with_data([owner for owner in away if id(owner) in written], func, "write", read, {})


def _with_data(
    parameters: Iterable[nn.Parameter], func: Function, how: str, run: RunWith, before: Mapping[int, torch.Tensor]
) -> object:
    """Run `run` with the data of those `parameters` that are still cold, by their fault handlers' `read` or `write`."""
    away = [parameter for parameter in parameters if is_cold(parameter) and id(parameter) not in before]
    if not away:
        return run(before)
    fault_handler = answering_handler(away[0], func)
    own = [parameter for parameter in away if handler_of(parameter) is fault_handler]
    others = [parameter for parameter in away if handler_of(parameter) is not fault_handler]
    answer: Callable[..., object] = getattr(fault_handler, how)
    return answer(own, func, lambda instead: _with_data(others, func, how, run, {**before, **instead}))


def _fault_in(owners: Iterable[nn.Parameter], func: Function) -> bool:
    """Read in those of `owners` that the running forward contains. Returns whether none is cold now."""
    is_there = True
    for owner in owners:
        if is_cold(owner):
            fault_handler = handler_of(owner)
            if fault_handler is None:
                refuse(owner, func)
            is_there = fault_handler.fault_in(owner) and is_there
            if not is_there and not fault_handler.answers:
                refuse(owner, func)
    return is_there


def _check_views(touched: Iterable[Cold], func: Function) -> None:
    """Raise StateError if a parameter was given other memory after a view of it was made."""
    for tensor in touched:
        if type(tensor) is ColdView and not tensor.swapper_apart and not _is_of(tensor, tensor.swapper_owner):
            raise StateError(
                f"{name_of(func)} was given a view of a parameter that was made before the parameter's memory was another one "
                "(the optimizer got more to train, or the manager was closed): make the view again"
            )


def _check_written(func: Function, args: object, kwargs: object, written: Iterable[Cold]) -> None:
    """Refuse a change outside of a forward that autograd would record on a parameter: it must stay a leaf. Its `.data` may not."""
    if func == SET_DATA or not torch.is_grad_enabled():
        return
    tensors = tensors_among((args, kwargs))
    with without_torch_functions():
        for tensor in written:
            is_apart = isinstance(tensor, ColdView) and tensor._base is not tensor.swapper_owner
            if not is_apart and not tensor.requires_grad and any(t.requires_grad for t in tensors):
                refuse(owner_of(tensor), func)


def _watched(
    result: object,
    owners: Sequence[nn.Parameter],
    instead: Mapping[int, torch.Tensor],
    touched: Sequence[Cold],
    func: Function,
) -> object:
    """Return an operation's result, with views of parameters that become cold again as `ColdView`.

    Raises:
        ColdParameterError: the result is a pointer or an array, say, which cannot be watched.
    """
    apart = [(t.swapper_owner, t) for t in touched if isinstance(t, ColdView) and t.swapper_apart]
    for item in leaves(result):
        if not isinstance(item, torch.Tensor):
            if not isinstance(item, _PLAIN_RESULTS):
                refuse(owners[0], func)
        elif type(item) is torch.Tensor and item.layout is torch.strided:
            for owner, shown in [*((owner, instead.get(id(owner))) for owner in owners), *apart]:
                if _is_of(item, owner) if shown is None else share_memory(item, shown):
                    _watch(item, owner, shown, func)
                    break
    return result


def _watch(view: torch.Tensor, owner: nn.Parameter, shown: torch.Tensor | None, func: Function) -> None:
    if shown is not None and type(shown) not in (torch.Tensor, ColdView):
        refuse(owner, func)  # its memory shows something else after this operation
    view.__class__ = ColdView
    view.swapper_owner = owner  # type: ignore[attr-defined]
    view.swapper_apart = shown is not None  # type: ignore[attr-defined]


_PLAIN_RESULTS = (
    bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def _is_of(tensor: torch.Tensor, whole: nn.Parameter) -> bool:
    """Return whether `tensor` lies in the range of `whole`, which shares its storage with other parameters."""
    if not share_memory(tensor, whole):
        return False
    with without_torch_functions():
        begin, at = whole.storage_offset() * whole.itemsize, tensor.storage_offset() * tensor.itemsize
        return begin <= at <= begin + whole.nbytes


def _exchanged(tree: Any, instead: Mapping[int, torch.Tensor]) -> Any:
    """Return arguments with other tensors instead of parameters, and with views of those instead of their views."""
    if isinstance(tree, Cold):
        whole = instead.get(id(owner_of(tree)))
        if whole is None:
            return tree
        if type(tree) is ColdView:
            whole = as_plain(tree) if tree.swapper_apart else _same_view(tree, whole)
        with without_torch_functions():
            if torch.is_grad_enabled() and tree.requires_grad:
                return _InPlaceOf.apply(tree, whole)  # type: ignore[no-untyped-call]
            return whole
    if isinstance(tree, list | tuple):
        # In reverse: so autograd reaches them in the order in which it would reach the parameters.
        items = [_exchanged(item, instead) for item in reversed(tree)][::-1]
        return type(tree)(items) if type(tree) in (list, tuple) else type(tree)(*items)
    if isinstance(tree, dict):
        return {key: _exchanged(value, instead) for key, value in tree.items()}
    return tree


class _InPlaceOf(torch.autograd.Function):
    """Puts a tensor that shows the data of a cold one into the cold one's place in the graph."""

    @staticmethod
    def forward(ctx: object, cold: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
        return as_plain(shown)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> object:
        return gradients[0], None


def _same_view(view: ColdView, whole: torch.Tensor) -> torch.Tensor:
    """Return the view of `whole` that `view` is of its parameter."""
    with without_torch_functions():
        owner = view.swapper_owner
        if view.dtype != owner.dtype or view.is_conj() or view.is_neg():
            refuse(owner, "an operation on a view of another dtype")
        offset = view.storage_offset() - owner.storage_offset()
        return whole.as_strided(view.shape, view.stride(), whole.storage_offset() + offset)


@contextmanager
def _as_plain_tensors(views: Sequence[ColdView]) -> Iterator[None]:
    """Return a context in which these views, whose data is in memory, are plain tensors."""
    for view in views:
        view.__class__ = torch.Tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for view in views:
            view.__class__ = ColdView


def owner_of(tensor: Cold) -> nn.Parameter:
    """Return the parameter that a cold tensor is, or is a view of."""
    return tensor.swapper_owner if isinstance(tensor, ColdView) else tensor


def _cold_among(tree: object) -> list[Cold]:
    return [tensor for tensor in tensors_among(tree) if isinstance(tensor, Cold)]


@torch.no_grad()
def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def _describe(tensor: Cold) -> str:
    with without_torch_functions():
        return (
            f"{type(tensor).__name__}(away, shape={tuple(tensor.shape)}, dtype={tensor.dtype}, "
            f"requires_grad={tensor.requires_grad})"
        )


def _has_caught_up(parameter: nn.Parameter) -> bool:
    """Materialize a parameter that only waits for a deferred update. Returns whether it is an ordinary one now."""
    fault_handler = handler_of(parameter)
    if fault_handler is not None:
        fault_handler.catch_up(parameter)
    return not is_cold(parameter)

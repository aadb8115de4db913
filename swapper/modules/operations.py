"""Records the operations of a forward and backward without computing them, and measures how long they take on this processor.

[Note: recorded operations] A copy of the model, whose parameters have shapes and no memory, runs once under torch's fake tensors,
so a model of any size, also one on the meta device, is recorded in a second or so. Then each distinct operation (function,
shapes, strides, dtypes, other arguments) runs a few times on tensors of ours, and counts as often as it was recorded. Tensors lie
in a memory that is larger than a processor's cache, each time elsewhere: weights of a model are not in the cache either.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from statistics import median
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from swapper import _C
from swapper.modules.groups import Unit
from swapper.runtime.free_memory import peak_resident_bytes, return_free_memory
from swapper.tensors.torch_private import TorchDispatchMode, fake_tensors, pytree

log = logging.getLogger("swapper")

T = TypeVar("T")

SCRATCH_BYTES = 64 << 20
"""Memory for the tensors of a trial, of each dtype: larger than most caches. An operation on more is measured on a part."""
LARGE_BYTES = 64 << 10
"""Smaller results do not count as memory."""
LARGE_OPERAND_BYTES = 1 << 20
"""What an operation takes for itself is measured if it has a tensor as large as this."""
TRIALS, TRIAL_S = 5, 0.02
"""An operation runs so often, or less often if that takes longer, in seconds: the median counts, as a step has all of them."""
MIN_TRIALS = 3
ROUNDS = 3
"""Of all measurements: the median of each counts, as another program that runs for a moment makes some many times as long."""
SHARED_ELEMENTS = 1 << 17
"""Torch's threads share an operation on more than 32768 elements (at::internal::GRAIN_SIZE)."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor's form."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def span(self) -> int:
        """Elements from the first to the last."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)) if 0 not in self.shape else 0

    @property
    def nbytes(self) -> int:
        return self.span * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecordedOperation:
    """An operation, to be run again: its function, and its arguments with tensors by their forms."""

    function: Any
    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec = field(compare=False)

    @property
    def forms(self) -> list[TensorForm]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]


@dataclass(frozen=True)
class Recording:
    """The operations of a pass.

    Attributes:
        counts: how often each operation ran, by phase ("forward" or "backward") and group.
        live_bytes: of results that were in memory with that of an operation at most: activations, gradients that pass by,
            temporary tensors.
    """

    counts: Mapping[tuple[str, int], Counter[RecordedOperation]]
    live_bytes: Mapping[RecordedOperation, int]


class _Recorder(TorchDispatchMode):
    """Attributes: phase, group: of the operations that come now."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase, self.group = "forward", 0
        self.counts: dict[tuple[str, int], Counter[RecordedOperation]] = {}
        self.live_bytes: Counter[RecordedOperation] = Counter()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim" and not func.is_view:
            leaves, tree = pytree.tree_flatten((args, kwargs or {}))
            operation = RecordedOperation(func, tuple(map(_form_of, leaves)), tree)
            self.counts.setdefault((self.phase, self.group), Counter())[operation] += 1
            self._note_memory(operation, result)
        return result

    def _note_memory(self, operation: RecordedOperation, result: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        storages = [s for s in (tensor.untyped_storage() for tensor in tensors) if s.nbytes() >= LARGE_BYTES]
        if not storages:
            return
        self._live = {key: kept for key, kept in self._live.items() if not kept[0].expired()}
        for storage in storages:
            reference = StorageWeakRef(storage)
            self._live[reference.cdata] = reference, storage.nbytes()
        live_bytes = sum(nbytes for _, nbytes in self._live.values())
        self.live_bytes[operation] = max(self.live_bytes[operation], live_bytes)


def _form_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorForm(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype)
    try:
        hash(leaf)
    except TypeError:
        return repr(leaf)
    return leaf


def record(
    model: nn.Module,
    units: Sequence[Unit],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    train: bool,
    dtypes: Mapping[int, torch.dtype] | None = None,
) -> Recording:
    """Record `model(*args, **kwargs)`, and with `train` the backward of its loss.

    The loss is the result, if that is a tensor; else its attribute or key `loss`, else its first tensor. A result of several
    elements is summed. The model is not changed.

    Args:
        units: modules by name, whose operations count for their first group; others count for the group before.
        dtypes: of parameters by id, if they are to have others than now.

    Raises:
        Exception: what the model raises, or what fake tensors do: they have no values.
    """
    fake = fake_tensors()
    recorder = _Recorder()
    with fake, torch.set_grad_enabled(train):
        clone = _without_memory(model, dtypes or {})
        _watch(clone, {unit.name: unit.groups[0] for unit in units if unit.groups}, recorder)
        given, named = pytree.tree_map_only(torch.Tensor, _fake_like, (tuple(args), dict(kwargs)))
        with recorder:
            loss = _loss_of(clone(*given, **named))
            if train:
                recorder.phase = "backward"
                loss.backward()
    return Recording(recorder.counts, recorder.live_bytes)


def _fake_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, requires_grad=tensor.requires_grad, device="cpu"
    )


def _without_memory(model: nn.Module, dtypes: Mapping[int, torch.dtype]) -> nn.Module:
    """Return a copy of `model` whose parameters and buffers have no memory."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = _fake_like(parameter.detach()).to(dtypes.get(id(parameter), parameter.dtype))
        memo[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _fake_like(buffer.detach())
    return copy.deepcopy(model, memo)


def _watch(model: nn.Module, group_of: Mapping[str, int], recorder: _Recorder) -> None:
    """Have `recorder` know which group's operations come: in a forward its module's, in a backward those of the module
    whose result's gradient has come."""

    def enter(group: int) -> Callable[..., None]:
        def note(*_: Any) -> None:
            recorder.group = group

        return note

    def leave(group: int) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, result: Any) -> None:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(enter(group))

        return note

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    for name, module in model.named_modules():
        if name in group_of:
            module.register_forward_pre_hook(enter(group_of[name]), prepend=True)
            module.register_forward_hook(leave(group_of[name]))


def _drop_gradient(parameter: torch.Tensor) -> None:
    """A gradient that has come counts with those of the plan."""
    parameter.grad = None


def _loss_of(result: Any) -> torch.Tensor:
    found = result
    if not isinstance(found, torch.Tensor):
        found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if not isinstance(found, torch.Tensor):
        found = next(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return found if found.numel() == 1 else found.float().sum()


class OperationTimes:
    """Measures operations on this processor, with torch's present number of threads. Keeps what it has measured.

    Attributes:
        call_s: what Python and autograd take for an operation of a forward, and of a backward, in addition to its own time.
    """

    def __init__(self) -> None:
        self._known: dict[RecordedOperation, float] = {}
        self._workspaces: dict[RecordedOperation, int] = {}
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._next: Counter[torch.dtype] = Counter()
        self.call_s = {"forward": 0.0, "backward": 0.0}  # until it is measured
        self.call_s = self._measure_calls()

    def of(self, phase: str, counts: Mapping[RecordedOperation, int]) -> float:
        """Return the seconds of all of these operations of a phase."""
        return sum(count * (self.seconds(operation) + self.call_s[phase]) for operation, count in counts.items())

    def peak_bytes(self, live_bytes: Mapping[RecordedOperation, int]) -> int:
        """Return the most that is in memory at once: of results, and what an operation takes for itself while it runs.

        Args:
            live_bytes: of results, with that of each operation.
        """
        return max((nbytes + self.workspace_bytes(operation) for operation, nbytes in live_bytes.items()), default=0)

    def product(self, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> float:
        """Return the seconds of a product of (rows, inputs) and transposed (outputs, inputs) matrices."""
        forms = TensorForm((rows, inputs), (inputs, 1), dtype), TensorForm((inputs, outputs), (1, inputs), dtype)
        _, tree = pytree.tree_flatten((forms, {}), is_leaf=lambda leaf: isinstance(leaf, TensorForm))
        return self.seconds(RecordedOperation(torch.ops.aten.mm.default, forms, tree))

    def _measure_calls(self) -> dict[str, float]:
        """Compare a model of small operations with the operations alone."""
        with torch.device("cpu"):
            model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
        x = torch.zeros(1, 64, device="cpu")
        recorded = record(model, (), (x,), {}, True).counts
        spent: dict[str, list[float]] = {"forward": [], "backward": []}
        for _ in range(2 * TRIALS):
            began_s = time.perf_counter()
            with torch.enable_grad():
                loss = model(x).sum()
                between_s = time.perf_counter()
                loss.backward()
            spent["forward"].append(between_s - began_s)
            spent["backward"].append(time.perf_counter() - between_s)
            model.zero_grad()
        found = {}
        for phase, seconds in spent.items():
            counts = recorded[phase, 0]
            found[phase] = max(median(seconds) - self.of(phase, counts), 0.0) / counts.total()
        return found

    def seconds(self, operation: RecordedOperation) -> float:
        if operation not in self._known:
            self._known[operation] = self._measure(operation)
        return self._known[operation]

    def workspace_bytes(self, operation: RecordedOperation) -> int:
        """Return what the operation takes in addition to its result, and gives back before it ends.

        Torch sums a product of matrices in bf16 in fp32, in memory of its own, where the processor has no instructions for bf16.
        """
        if operation not in self._workspaces:
            self._workspaces[operation] = self._measure_workspace(operation)
        return self._workspaces[operation]

    def _measure(self, operation: RecordedOperation) -> float:
        part, share = part_of(operation)
        found: list[float] = []
        while len(found) < MIN_TRIALS or (len(found) < TRIALS and sum(found) < TRIAL_S):
            act = self._trial(part)
            began_s = time.perf_counter()
            try:
                act()
            except Exception as error:  # it needs values of some kind: random states, sizes in tensors
                log.warning("%s cannot be measured alone, and counts as no time: %s", part.function, error)
                return 0.0
            found.append(time.perf_counter() - began_s)
        return median(found) / share

    def _measure_workspace(self, operation: RecordedOperation) -> int:
        part, _ = part_of(operation)
        if max((form.nbytes for form in part.forms), default=0) < LARGE_OPERAND_BYTES or self.seconds(operation) == 0:
            return 0
        act = self._trial(part)
        return_free_memory()  # what it takes is new to the process then
        before_bytes = peak_resident_bytes(reset=True)
        result = act()
        peak_bytes = peak_resident_bytes()
        if before_bytes is None or peak_bytes is None:
            return 0
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        results = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
        for scratch in self._scratch.values():  # the result of an operation in place
            results.pop(scratch.data_ptr(), None)
        workspace_bytes = peak_bytes - before_bytes - sum(results.values())
        if workspace_bytes < LARGE_BYTES:
            return 0
        of_part, of_whole = (sum(form.nbytes for form in of.forms) for of in (part, operation))
        return workspace_bytes * of_whole // of_part

    def _trial(self, operation: RecordedOperation) -> Callable[[], Any]:
        args, kwargs = pytree.tree_unflatten([self._make(leaf) for leaf in operation.leaves], operation.tree)
        return partial(operation.function, *args, **kwargs)

    def _make(self, leaf: Any) -> Any:
        if not isinstance(leaf, TensorForm):
            return leaf
        if not leaf.dtype.is_floating_point:
            return torch.zeros(leaf.span, dtype=leaf.dtype, device="cpu").as_strided(leaf.shape, leaf.stride)
        if leaf.dtype not in self._scratch:
            self._scratch[leaf.dtype] = torch.zeros(
                SCRATCH_BYTES // leaf.dtype.itemsize, dtype=leaf.dtype, device="cpu"
            )
        scratch = self._scratch[leaf.dtype]
        begin = self._next[leaf.dtype]
        begin = begin if begin + leaf.span <= scratch.numel() else 0
        self._next[leaf.dtype] = begin + leaf.span
        return scratch.as_strided(leaf.shape, leaf.stride, begin)


def part_of(operation: RecordedOperation) -> tuple[RecordedOperation, float]:
    """Return the operation on a part of its data that fits the scratch, and which part of the work that is."""
    part = operation
    while max((form.nbytes for form in part.forms), default=0) > SCRATCH_BYTES // 4:
        largest = max(n for form in part.forms for n in form.shape)
        leaves = tuple(_halved(leaf, largest) if isinstance(leaf, TensorForm) else leaf for leaf in part.leaves)
        leaves = tuple(leaf // 2 if type(leaf) is int and leaf == largest else leaf for leaf in leaves)
        part = RecordedOperation(operation.function, leaves, operation.tree)
    return part, 1.0 if part is operation else _work(part) / _work(operation)


def _work(operation: RecordedOperation) -> int:
    """Return a number that grows as the operation's time does: of products and attention their products, else elements."""
    forms, name = operation.forms, str(operation.function)
    if any(f".{product}." in name for product in PRODUCTS) and len(forms) >= 2:
        return math.prod(forms[-2].shape) * forms[-1].shape[-1]
    if "scaled_dot_product" in name and len(forms) >= 3:
        queries, keys = forms[1:3] if "backward" in name else forms[:2]
        return math.prod(queries.shape) * keys.shape[-2]
    return sum(math.prod(form.shape) for form in forms)


def _halved(form: TensorForm, size: int) -> TensorForm:
    """Return the form with half of each dimension of this size; a contiguous order of dimensions stays."""
    shape = tuple(n // 2 if n == size else n for n in form.shape)
    order = sorted(range(len(shape)), key=lambda d: form.stride[d])
    stride, step = [0] * len(shape), 1
    for dim in order:
        stride[dim] = step if form.stride[dim] else 0
        step *= shape[dim] if form.stride[dim] else 1
    return TensorForm(shape, tuple(stride), form.dtype)


def middle(rounds: Sequence[T]) -> T:
    """Return the median of each of their numbers: of dataclasses, mappings or numbers."""
    one: Any = rounds[0]
    found: Any = None
    if is_dataclass(one):
        names = [each.name for each in fields(one)]
        found = replace(one, **{name: middle([getattr(of, name) for of in rounds]) for name in names})  # type: ignore[type-var]
    elif isinstance(one, Mapping):
        found = {key: middle([of[key] for of in cast(Any, rounds)]) for key in one}
    elif one is not None:
        found = median(cast(Any, rounds))
    return cast(T, found)


class ColdCaches:
    """Memory larger than a processor's cache, to empty it: in a step, where pages come and go, neither data nor Python's code are
    there. Python takes twice as long then.

    The memory is read without torch: after an operation of torch's, OpenMP's other threads spin for some milliseconds (GNU's
    GOMP_SPINCOUNT) on processors that the engine's thread needs.
    """

    def __init__(self) -> None:
        self._memory = torch.ones(
            SCRATCH_BYTES, dtype=torch.uint8, device="cpu"
        )  # untouched pages are one page of zeros

    def make(self) -> None:
        _C.crc32_address(self._memory.data_ptr(), SCRATCH_BYTES)


def has_spare_processor() -> bool:
    """Return whether torch's threads leave a processor to the engine's: else each of them waits for what delays one."""
    return torch.get_num_threads() < len(os.sched_getaffinity(0))


def median_seconds(act: Callable[[], object], times: int) -> float:
    """Return the median of the seconds of several calls."""
    return median(_seconds_of(act) for _ in range(times))


def cold_seconds(act: Callable[[], object], times: int) -> float:
    """Return the median of the seconds of several calls, each with cold caches, and while torch's threads spin as in a pass."""
    caches, found, shared = ColdCaches(), [], torch.zeros(SHARED_ELEMENTS, device="cpu")
    for _ in range(times):
        caches.make()
        shared.add_(1)
        found.append(_seconds_of(act))
    return median(found)


def min_seconds(act: Callable[[], object], times: int = 2) -> float:
    """Return the seconds of the fastest of several calls."""
    return min(_seconds_of(act) for _ in range(times))


def _seconds_of(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s

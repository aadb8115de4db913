"""Leases a module's parameters around its forward, for inference: there is no backward.

Calls are kept on a stack, which is the forward of one thread; those of others pass through the model with it, one of which
runs at a time (callers.py). A Ctrl-C may leave calls behind, whose frames do not run any more: their leases are released at
the next call.

Also here: the prediction of the next passes, and what modules of a loaded model refuse (to be moved, trained, copied).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_not
from types import FrameType
from typing import Any

import torch
from torch import nn

from swapper.device.device import Device
from swapper.errors import BudgetError, StateError
from swapper.infer.callers import CallersPass
from swapper.infer.weights import GroupWeights, refuse_gradient
from swapper.modules.groups import Unit
from swapper.modules.module_hooks import Call, ModuleHooks, OwnHook, copy_without_hooks, outside_transforms, tensors_of
from swapper.modules.turns import Turns, frame_of_call, is_running
from swapper.paging.schedule import Access
from swapper.runtime.interrupts import close_all
from swapper.tensors.guarded_tensor import changes_nothing
from swapper.tensors.torch_private import is_traced

_requires_grad = attrgetter("requires_grad")


@dataclass(eq=False, slots=True)
class InferenceCall(Call):
    """A call of a module, and torch's frame that runs it; None if there is none (a compiled caller)."""

    frame: FrameType | None = None


class InferenceHooks(ModuleHooks[GroupWeights, InferenceCall]):
    """Owns the hooks of one model and the leases that they hold.

    Args:
        units: all modules with, by index, the groups that their forward needs.
        groups: all groups, by index.
        begin_pass: called before the outermost forward; raises if the model cannot be used.
        end_pass: called after it with the name of its module and the groups that were leased, in order.
        make_room: called if a group's lease was refused for lack of memory; raises if none can be freed.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: Sequence[GroupWeights],
        begin_pass: Callable[[], None],
        end_pass: Callable[[str, list[int]], None],
        make_room: Callable[[GroupWeights, BudgetError], None],
    ) -> None:
        paged = {id(parameter) for group in groups for parameter in group.parameters}
        hooked = [unit for unit in units if any(id(parameter) in paged for parameter in unit.module.parameters())]
        super().__init__(hooked, groups, Turns())
        self._make_room = make_room
        self._begin_pass = begin_pass
        self._end_pass = end_pass
        self._is_unloaded = False
        self._last_unit = ""
        self._order: list[int] = []  # of the groups in this pass
        self._pass = CallersPass(weakref.proxy(self), self._turns)

    @contextmanager
    def turn_to_unload(self) -> Iterator[None]:
        """Run the context when no forward runs; refuse all later ones, including those of threads that wait."""
        self._check_outside("unload was called from inside of the model's forward: call it when that is over")
        with self._pass.alone():
            yield
            self._is_unloaded = True

    def map(self, function: Callable[[Any], Any], batches: Sequence[Any], device: Device | None) -> list[Any]:
        """See LoadedModel.map.

        Raises:
            StateError: called from inside of a forward or of a `map` of this model.
        """
        self._check_outside("a model was asked to run many batches from inside its own forward, or its own map")
        if self._is_removed:
            return [function(batch) for batch in batches]

        def run(batch: Any) -> Any:
            self._check_not_unloaded()
            return function(batch)

        return self._pass.run_batches(run, batches, device)

    def _check_outside(self, refusal: str) -> None:
        """Raise StateError if this thread is in a forward or a function of `map`. A forward that a Ctrl-C ended is over."""
        if self.is_inside:
            self.drop_stale()
            if self.has_calls or self._pass.has_batch:
                raise StateError(refusal)
            self._pass.leave()

    def aside(self) -> AbstractContextManager[None]:
        """See CallersPass."""
        return self._pass.aside()

    @property
    def is_inside(self) -> bool:
        return self._turns.is_mine

    def _before(self, unit: Unit, module: nn.Module, args: object, kwargs: object) -> None:
        with outside_transforms():
            _check_not_traced(unit)
            call = InferenceCall(unit.name, frame=frame_of_call())
            if not self._is_nested and not self._enter(unit, call.frame):
                return
            self._running.append(call)
            for index in unit.groups:
                if self._groups[index].paged:
                    self._lease_more(call, self._groups[index])

    def _after(self, unit: Unit, module: nn.Module, args: object, output: object) -> object:
        call = self._end(unit) if self._turns.is_mine else None
        if call is None:
            return None  # the pre-hook itself failed
        try:
            return self._owned(output) if output is not None and call.groups else output
        finally:
            with outside_transforms():
                try:
                    self._release(call)
                finally:
                    if not self._running:
                        self._last_unit = unit.name
                        self._pass.leave(is_awaited=output is not None)

    # --- a pass -------------------------------------------------------------------------------------------------------

    @property
    def _is_nested(self) -> bool:
        """Whether this thread is in a forward of the model, which has not ended without its hooks."""
        return bool(self._running) and _is_running(self._running[-1]) and self._turns.is_mine

    def _enter(self, unit: Unit, frame: FrameType | None) -> bool:
        """Wait until this thread may run `unit`. Return False if the hooks were removed meanwhile."""
        self._pass.enter(frame, lambda: self._part_of_running(unit))
        if self.has_calls:
            return True
        try:
            self._check_not_unloaded()
            if not self._is_removed:
                self._begin_pass()
                return True
        except BaseException:
            self._pass.leave()
            raise
        self._pass.leave()
        return False

    def _check_not_unloaded(self) -> None:
        if self._is_unloaded:
            raise StateError("the model was unloaded by another thread: load it again")

    def _lease_more(self, call: InferenceCall, group: GroupWeights) -> None:
        self._pass.arrive(group)
        while True:
            try:
                is_asked = group.lease()
                break
            except BudgetError as refusal:
                self._make_room(group, refusal)
        call.groups.append(group.index)
        if is_asked:
            self._order.append(group.index)
        self._pass.hold(group)

    # --- called by the pass: see CallersPass --------------------------------------------------------------------------

    @property
    def has_calls(self) -> bool:
        """Whether the running caller is in a forward."""
        return bool(self._running)

    def drop_stale(self) -> None:
        """Release calls of a forward that a Ctrl-C ended: their frames do not run any more."""
        while self._running and not _is_running(self._running[-1]):
            self._release(self._running.pop())

    def release_calls(self, calls: Iterable[InferenceCall]) -> None:
        close_all(partial(self._release, call) for call in calls)

    def pass_over(self, is_shared: bool) -> None:
        """Record the order of a pass: of several forwards, that of the first."""
        order, self._order = self._order, []
        self._end_pass(self._last_unit, _first_round(order) if is_shared else order)

    def _owned(self, output: object) -> object:
        """Return an output that keeps no memory of streamed weights. A gradient cannot flow back."""
        tensors, rebuild = tensors_of(output)
        if any(map(_requires_grad, tensors)):
            refuse_gradient()
        replaced = list(map(self._own, tensors))
        return rebuild(replaced) if any(map(is_not, replaced, tensors)) else output


def _is_running(call: InferenceCall) -> bool:
    return call.frame is None or is_running(call.frame)


def _check_not_traced(unit: Unit) -> None:
    """Refuse to be traced: weights that a graph holds as constants have other values when it runs."""
    if is_traced():
        raise StateError(
            f"the forward of {unit.name or type(unit.module).__name__} is being traced (linearize, make_fx, torch.export, "
            "jit.trace), and the graph would keep weights that are in memory for this forward only: use torch.func.jvp for "
            "linearize, or build the model in memory"
        )


# --- the order of passes ----------------------------------------------------------------------------------------------


def _first_round(order: list[int]) -> list[int]:
    """Return what the first of several passes in a row used."""
    again = next((i for i in range(1, len(order)) if order[i] == order[0]), len(order))
    return order[:again]


class PassPredictor:
    """Predicts the groups that the next passes use from earlier ones.

    What followed a pass last time is expected to follow it again, and so on until one repeats: two models that alternate
    are both read ahead, and so are the parts of a model whose forward is called without its hooks.

    Args:
        whole: names of the units that are models; "" for the only one. Passes of parts of models count if they repeat.
    """

    def __init__(self, whole: Collection[str]) -> None:
        self._whole = frozenset(whole)
        self._orders: dict[str, list[int]] = {}  # of the last pass of each
        self._after: dict[str | None, str] = {}
        self._last: str | None = None

    def note(self, name: str, order: list[int]) -> list[int] | None:
        """Record that a pass of `name` used groups in `order`. Return what is expected now; None if that is unchanged."""
        if not order:
            return None  # it reads nothing
        is_again = self._orders.get(name) == order and name in (self._last, self._after.get(self._last))
        self._after[self._last], self._orders[name], self._last = name, order, name
        if not is_again and name not in self._whole:
            return None
        expected: list[int] = []
        seen: set[str] = set()
        following = self._after.get(name, name)
        while following not in seen:
            seen.add(following)
            if is_again or following in self._whole:
                expected += self._orders[following]
            following = self._after.get(following, following)
        return expected


def is_cyclic(cycle: list[Access], other: list[Access]) -> bool:
    """Return True if both are the same cycle, possibly with different beginnings."""
    if len(cycle) != len(other) or not cycle:
        return cycle == other
    return any(cycle == other[i:] + other[:i] for i in range(len(other)) if other[i] == cycle[0])


# --- what modules refuse ----------------------------------------------------------------------------------------------


def refuse_changes(module: nn.Module, name: str, is_whole: bool) -> None:
    """Put refusals in place of methods of `module`, which users know as `name`, until `allow_changes`.

    A method that the user has put into the instance (a `train` that does nothing) stays. A copy of a part of a model is a plain
    module in memory. Of one that `is_whole`, a model, none is made.
    """
    of = weakref.ref(module)

    def apply(convert: Callable[[torch.Tensor], object], recurse: bool = True) -> nn.Module:
        """Do nothing if `convert` would change nothing, as `Module._apply` would; else refuse."""
        module = of()
        tensors = [] if module is None else [*module.parameters(recurse), *module.buffers(recurse)]
        if module is not None and all(changes_nothing(convert, tensor) for tensor in tensors):
            return module
        raise StateError(
            f"{name} was loaded by swapper.load and cannot be moved or converted (.to, .half, .cuda, ...): its weights stay in "
            "the checkpoint's files. Say dtype= and device= when loading"
        )

    def train(mode: bool = True) -> nn.Module:
        """Refuse, except train(False), which is `eval`."""
        module = of()
        if mode or module is None:
            raise StateError(
                f"{name} was loaded for inference and cannot be trained: its weights are read from the checkpoint and never "
                "written. Build the model in memory and use swapper.SwapManager; or, for dropout without training, set "
                "`training` of the modules that have it"
            )
        return type(module).train(module, False)

    copy_without_hooks(module)
    refusals: dict[str, Callable[..., object]] = {"_apply": apply, "train": train}
    if is_whole:
        refusals["__reduce_ex__"] = _refuse_to_copy  # pickle and copy look it up on the instance
    for method, refusal in refusals.items():
        module.__dict__.setdefault(method, OwnHook(refusal))


def allow_changes(module: nn.Module) -> None:
    for name in ("_apply", "train", "__reduce_ex__"):
        if isinstance(module.__dict__.get(name), OwnHook):
            del module.__dict__[name]


def _refuse_to_copy(protocol: object) -> object:
    raise StateError(
        "a model that was loaded by swapper.load cannot be copied or pickled, its weights stay in the checkpoint's files: load "
        "it once more, or copy or save model.state_dict()"
    )

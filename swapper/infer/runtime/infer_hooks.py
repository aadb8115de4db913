"""Hooks that lease a module's parameters around its forward, for inference: there is no backward.

Calls are kept on a stack, which is the pass of one thread: other threads wait for its end. A call is *live* while the frame that
runs it is on that thread's stack of frames; what a Ctrl-C left behind is found by that, and its leases are given back.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from swapper.errors import BudgetError, StateError
from swapper.infer.runtime.weights import GroupWeights, refuse_gradient
from swapper.modules.groups import Unit
from swapper.modules.outputs import tensors_of
from swapper.modules.own_hook import OwnHook
from swapper.modules.transforms import outside_transforms
from swapper.modules.turns import Turns

_TORCHS_CALLS = nn.modules.module.__file__


def _frame_of_the_call() -> FrameType:
    """Return torch's frame that runs the module's hooks now, whatever is between it and us (torch._dynamo.disable, for one)."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename != _TORCHS_CALLS and frame.f_back is not None:
        frame = frame.f_back
    return frame


class Call:
    """One forward of one unit, and what it leases."""

    __slots__ = ("frame", "groups", "unit")

    def __init__(self, unit: Unit, frame: FrameType) -> None:
        self.unit = unit
        self.frame = frame  # torch's, from which the hooks are called
        self.groups: list[GroupWeights] = []


class Passing(Protocol):
    """What is asked where several batches pass through a model together (swapper.infer.runtime.batched_pass)."""

    def arrive(self, group: GroupWeights) -> None: ...
    def hold(self, group: GroupWeights) -> None: ...


class InferenceHooks:
    """Owns the hooks of one model and the leases that they hold.

    Args:
        units: all modules with, by index, the groups that their forward needs.
        groups: all groups, by index.
        begin_pass: called before the outermost forward; raises if the model cannot be used.
        end_pass: called after it with the name of its module and the groups that were leased, in order.
        drop_leases: makes the pager forget all leases of this pass, after it was abandoned.
        make_room: called where a group's lease was refused for want of memory; raises if there is none to be had.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: Sequence[GroupWeights],
        begin_pass: Callable[[], None],
        end_pass: Callable[[str, list[int]], None],
        drop_leases: Callable[[], None],
        make_room: Callable[[GroupWeights, BudgetError], None],
    ) -> None:
        self._make_room = make_room
        self._groups = groups
        self._begin_pass = begin_pass
        self._end_pass = end_pass
        self._drop_leases = drop_leases
        self._turns = Turns()
        self._is_removed = False
        self._is_unloaded = False
        self._last_unit = ""
        self._convoy: Passing | None = None
        self._stack: list[Call] = []
        self._order: list[int] = []  # of the groups in this pass
        self._group_of = {id(w.parameter): group for group in groups for w in group.weights}
        self._homes = {part.untyped_storage()._cdata for group in groups for w in group.weights for part in w.parts}
        self._handles: list[Any] = []
        for unit in units:
            if any(id(parameter) in self._group_of for parameter in unit.module.parameters()):
                before, after = OwnHook(self._before(unit)), OwnHook(self._after(unit))
                self._handles.append(unit.module.register_forward_pre_hook(before, prepend=True))
                self._handles.append(unit.module.register_forward_hook(after, always_call=True))

    def remove(self) -> None:
        """The model is a plain one from now on: everything is in memory for good."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._is_removed = True

    @contextmanager
    def turn_to_unload(self) -> Iterator[None]:
        """Within it no forward runs, and after it none can: those of other threads are waited for, or refused."""
        if self._turns.is_mine:
            self._drop_stale()
            if self._stack or self._convoy is not None:
                raise StateError("unload was called from inside of the model's forward: call it when that is over")
        has_turn = self._take_turn()
        try:
            yield
            self._is_unloaded = True
        finally:
            if has_turn:
                self._turns.give()

    @contextmanager
    def turn_for(self, convoy: Passing) -> Iterator[bool]:
        """Within it, this thread has the turn for all that `convoy` lets run. False: there are no hooks any more."""
        if not self._take_turn():
            yield False
            return
        if self._stack:
            raise StateError("a model was asked to run many batches from inside its own forward")
        self._last_unit = ""
        try:
            self._convoy = convoy
            yield True
        finally:
            self._convoy = None
            self._turns.owner = threading.current_thread()
            order, self._order = self._order, []
            try:
                if order:
                    self._end_pass(self._last_unit, _first_round(order))
            finally:
                self._turns.give()

    def exchange(self, thread: threading.Thread | None, stack: list[Call]) -> list[Call]:
        """Another batch of a convoy goes on, in `thread`, inside the calls of `stack`. Returns those of the one before."""
        self._turns.owner = thread
        before, self._stack = self._stack, stack
        return before

    def abandon_pass(self) -> None:
        """Forget a forward that never ended, with its leases."""
        self._stack.clear()
        self._order.clear()
        for group in self._groups:
            group.forget_leases()
        self._drop_leases()

    def bring(self, parameter: nn.Parameter) -> bool:
        """A cold parameter is touched: lease its group for the innermost running forward that contains it."""
        if not self._turns.is_mine:
            return False
        for call in reversed(self._stack):
            if any(parameter is inside for inside in call.unit.module.parameters()):
                self._lease(call, [self._group_of[id(parameter)]])
                return True
        return False

    def _before(self, unit: Unit) -> Callable[..., None]:
        groups = [self._groups[index] for index in unit.groups if self._groups[index].paged]

        def hook(module: nn.Module, args: Any) -> None:
            with outside_transforms():
                before()

        def before() -> None:
            _check_not_traced(unit)
            if not self._take_turn():
                return
            self._drop_stale()
            if not self._stack:
                self._begin()
            call = Call(unit, _frame_of_the_call())
            self._stack.append(call)
            self._lease(call, groups)

        return hook

    def _after(self, unit: Unit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if not self._turns.is_mine or all(call.unit is not unit for call in self._stack):
                return None  # the pre-hook itself failed
            while (call := self._stack.pop()).unit is not unit:
                self._release(call)  # stopped by something that went past its hooks
            try:
                if output is not None and call.groups:
                    output = self._own(output)
            finally:
                with outside_transforms():
                    try:
                        self._release(call)
                    finally:
                        if not self._stack:
                            self._end(unit)
            return output

        return hook

    # --- a pass ---------------------------------------------------------------------------------------------------

    def _take_turn(self) -> bool:
        """Wait until no other thread is inside the model. False if nobody need wait any more: the hooks are out meanwhile."""
        if not self._turns.take():
            return True
        if self._is_unloaded:
            self._turns.give()
            raise StateError("the model was unloaded by another thread: load it anew")
        if self._is_removed:
            self._turns.give()
            return False
        return True

    def _begin(self) -> None:
        try:
            self._begin_pass()
        except BaseException:
            if self._convoy is None:
                self._turns.give()
            raise

    def _end(self, unit: Unit) -> None:
        if self._convoy is not None:
            self._last_unit = unit.name
            return
        order, self._order = self._order, []
        try:
            self._end_pass(unit.name, order)
        finally:
            self._turns.give()

    def _drop_stale(self) -> None:
        """Forget a pass that a Ctrl-C ended: its innermost call's frame runs no more."""
        if not self._stack:
            return
        wanted = self._stack[-1].frame
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame is wanted:
                return
            frame = frame.f_back
        live = set()
        frame = sys._getframe(1)
        while frame is not None:
            live.add(id(frame))
            frame = frame.f_back
        while self._stack and id(self._stack[-1].frame) not in live:
            self._release(self._stack.pop())
        if not self._stack:
            self._order.clear()

    def _lease(self, call: Call, groups: Iterable[GroupWeights]) -> None:
        for group in groups:
            if self._convoy is not None:
                self._convoy.arrive(group)
            asked = self._leased(group)
            call.groups.append(group)
            if asked:
                self._order.append(group.index)
            if self._convoy is not None:
                self._convoy.hold(group)

    def _leased(self, group: GroupWeights) -> bool:
        """Lease a group, as its `lease` does."""
        while True:
            try:
                return group.lease()
            except BudgetError as refusal:
                self._make_room(group, refusal)

    def _release(self, call: Call) -> None:
        for group in call.groups:
            group.release()

    def _own(self, output: Any) -> Any:
        """An output that is a view of a streamed parameter must not leave with it: copy it. A gradient cannot come back."""
        tensors, rebuild = tensors_of(output)
        if any(tensor.requires_grad for tensor in tensors):
            refuse_gradient()
        replaced = [self._copied(tensor) for tensor in tensors]
        if any(new is not old for new, old in zip(replaced, tensors, strict=True)):
            return rebuild(replaced)
        return output

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # torch.func has wrapped it
            return tensor
        return tensor.clone() if storage._cdata in self._homes else tensor


def _check_not_traced(unit: Unit) -> None:
    """Weights that a graph has taken in as constants are others by the time that it runs."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        raise StateError(
            f"the forward of {unit.name or type(unit.module).__name__} is being traced (linearize, make_fx, torch.export), "
            "and the graph would keep weights that are in memory for this forward only: use torch.func.jvp for linearize, or build "
            "the model in memory"
        )


def _first_round(order: list[int]) -> list[int]:
    """Several passes came one after the other: what the first of them used."""
    again = next((i for i in range(1, len(order)) if order[i] == order[0]), len(order))
    return order[:again]

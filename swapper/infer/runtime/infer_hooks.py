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
from swapper.modules.module_hooks import Call, ModuleHooks, tensors_of
from swapper.modules.own_hook import outside_transforms
from swapper.modules.turns import Turns
from swapper.paging.planning.schedule import Access

_TORCHS_CALLS = nn.modules.module.__file__


def _frame_of_the_call() -> FrameType:
    """Return torch's frame that runs the module's hooks now, whatever is between it and us (torch._dynamo.disable, for one)."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename != _TORCHS_CALLS and frame.f_back is not None:
        frame = frame.f_back
    return frame


class InferenceCall(Call):
    """A call that is live while torch's frame, from which the hooks are called, is on the stack."""

    __slots__ = ("frame",)

    def __init__(self, module: str, frame: FrameType) -> None:
        super().__init__(module)
        self.frame = frame


class Passing(Protocol):
    """What is asked where several batches pass through a model together (swapper.infer.runtime.batched_pass)."""

    def arrive(self, group: GroupWeights) -> None: ...
    def hold(self, group: GroupWeights) -> None: ...


class InferenceHooks(ModuleHooks[GroupWeights, InferenceCall]):
    """Owns the hooks of one model and the leases that they hold.

    Args:
        units: all modules with, by index, the groups that their forward needs.
        groups: all groups, by index.
        begin_pass: called before the outermost forward; raises if the model cannot be used.
        end_pass: called after it with the name of its module and the groups that were leased, in order.
        drop_leases: makes the pager forget all leases but those given, after a pass was abandoned.
        make_room: called where a group's lease was refused for want of memory; raises if there is none to be had.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: Sequence[GroupWeights],
        begin_pass: Callable[[], None],
        end_pass: Callable[[str, list[int]], None],
        drop_leases: Callable[[Iterable[Access]], None],
        make_room: Callable[[GroupWeights, BudgetError], None],
    ) -> None:
        paged = {id(parameter) for group in groups for parameter in group.parameters}
        hooked = [unit for unit in units if any(id(parameter) in paged for parameter in unit.module.parameters())]
        super().__init__(hooked, groups, drop_leases, Turns())
        self._make_room = make_room
        self._begin_pass = begin_pass
        self._end_pass = end_pass
        self._is_unloaded = False
        self._last_unit = ""
        self._convoy: Passing | None = None
        self._order: list[int] = []  # of the groups in this pass

    @contextmanager
    def turn_to_unload(self) -> Iterator[None]:
        """Within it no forward runs, and after it none can: those of other threads are waited for, or refused."""
        if self._turns.is_mine:
            self._drop_stale()
            if self._running or self._convoy is not None:
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
        if self._running:
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

    def exchange(self, thread: threading.Thread | None, stack: list[InferenceCall]) -> list[InferenceCall]:
        """Another batch of a convoy goes on, in `thread`, inside the calls of `stack`. Returns those of the one before."""
        self._turns.owner = thread
        before, self._running = self._running, stack
        return before

    def abandon_pass(self) -> None:
        self._order.clear()
        super().abandon_pass()

    @property
    def _is_inside(self) -> bool:
        return self._turns.is_mine

    def _before(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        with outside_transforms():
            _check_not_traced(unit)
            if not self._take_turn():
                return
            self._drop_stale()
            if not self._running:
                self._begin()
            call = InferenceCall(unit.name, _frame_of_the_call())
            self._running.append(call)
            for index in unit.groups:
                if self._groups[index].paged:
                    self._lease_more(call, self._groups[index])

    def _after(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
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
                        self._end_outermost(unit)

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

    def _end_outermost(self, unit: Unit) -> None:
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
        if not self._running:
            return
        wanted = self._running[-1].frame
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
        while self._running and id(self._running[-1].frame) not in live:
            self._release(self._running.pop())
        if not self._running:
            self._order.clear()

    def _lease_more(self, call: InferenceCall, group: GroupWeights) -> None:
        if self._convoy is not None:
            self._convoy.arrive(group)
        while True:
            try:
                is_asked = group.lease()
                break
            except BudgetError as refusal:
                self._make_room(group, refusal)
        call.groups.append(group.index)
        if is_asked:
            self._order.append(group.index)
        if self._convoy is not None:
            self._convoy.hold(group)

    def _owned(self, output: Any) -> Any:
        """Return an output that keeps nothing of weights that leave. A gradient cannot come back."""
        tensors, rebuild = tensors_of(output)
        if any(tensor.requires_grad for tensor in tensors):
            refuse_gradient()
        replaced = [self._own(tensor) for tensor in tensors]
        if any(new is not old for new, old in zip(replaced, tensors, strict=True)):
            return rebuild(replaced)
        return output


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

"""Leases a module's parameters around its forward and its backward, by hooks.

Forward: the pre-hook leases the unit's groups, the post-hook releases them (`always_call`, because activation
checkpointing stops a recomputed forward early). Backward: the post-hook puts a hook on every output that has a gradient;
the first one to run leases the groups again.

[Note: when a backward lease ends] Calls of units are intervals on a clock that ticks at each start and end of a forward.
Autograd runs the nodes that are ready in decreasing order of creation, so when the backward of a call begins, every node
created after that call's end has run: the leases of all calls that *started* after it *ended* can be released. This
holds for frozen parameters, for parameters used twice and for calls inside other calls (an ancestor started earlier, and
keeps its lease). A tensor that a call received and returns is not its output: it was made before, and its gradient comes
long after the call's backward (T5's layers all return the position bias that the first one makes). Counting gradients
instead would release a frozen weight that a later node still multiplies with. The others end with the backward.

[Note: loops in a forward] A forward may touch parameters of other units: those stay leased until it ends, and in its backward. A
loop over all parameters (an average that follows in MoCo, a norm) would fill the pool. So where there is no room, groups that were
touched without autograd are released: no graph has them, and they are read again if they are touched again. On an accelerator
they stay, since a graph made later in the same forward may have them, whose reads nobody would answer there.

[Note: what a graph holds] Autograd's nodes hold their hooks, and Python's garbage collector does not traverse nodes. A
module that keeps a tensor with a graph (RecurrentGemma its state) would so keep itself alive, and the memory of a closed
session. So a tensor's hook has a weak reference to `TrainingHooks`, and a `TrainingCall` of names and numbers.

[Note: turns] Only one thread at a time changes a model's calls, leases and phases: a forward has the turn from its first
hook to its last, a backward from its first hook to autograd's final callback; a step, a snapshot, both ends of `gather`,
and closing take it too (modules/turns.py). Between a forward and its backward other threads may take it: nothing is
leased then, or it is leased permanently. Backwards on an accelerator run in autograd's own threads, which do not know
which thread has called them: they take no turns.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import attrgetter, is_not
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils import stateless

from swapper.errors import BudgetError, StateError
from swapper.modules.groups import Unit
from swapper.modules.leased_group import LeasedGroup
from swapper.modules.module_hooks import (
    Call,
    ModuleHooks,
    OwnHook,
    modules_by_unit,
    outside_transforms,
    side_outputs,
    tensors_of,
)
from swapper.modules.turns import frame_of_backward, frame_of_call, is_in_backward
from swapper.paging.schedule import Access
from swapper.runtime.free_memory import note_used
from swapper.runtime.interrupts import close_all
from swapper.runtime.sizes import format_bytes
from swapper.runtime.stats import StepClock
from swapper.tensors.guarded_tensor import tensors_among
from swapper.tensors.torch_private import after_backward, backward_task, innermost_transform, without_transforms
from swapper.train.groups.parameter_group import GroupParameters
from swapper.train.groups.processor import Processor
from swapper.train.groups.session_guard import SessionGuard
from swapper.train.steps.executor import UpdateExecutor

_module_of, _task_of = attrgetter("module"), attrgetter("backward_task")


class MicroBatches(Protocol):
    """Micro-batches that pass together. See AccumulationPass."""

    def arrive(self, group: LeasedGroup) -> None: ...

    def hold(self, group: LeasedGroup) -> None: ...

    def make_room(self) -> bool: ...


class PassOwner(Protocol):
    """What hooks ask of the model whose passes they follow. PassLifecycle answers.

    Attributes:
        clock: divides steps into phases: "forward", "backward" and "between".
    """

    clock: StepClock

    def enter_forward(self, is_outermost: bool = True) -> None:
        """A module's forward begins, outside of any backward. Raises if the manager cannot be used."""

    def drop_leases(self, kept: Iterable[Access]) -> None:
        """Drop all leases but `kept`, after waiting for copies that use them: a pass was abandoned."""


@dataclass(eq=False, slots=True)
class TrainingCall(Call):
    """A call whose groups are leased again in its backward. See [Note: what a graph holds]."""

    start: int = -1
    end: int = -1
    backward_task: int | None = None  # while its groups are leased for backward
    use: int = -1  # see PendingUses
    is_functional: bool = False  # with other parameters than the model's
    given: list[Any] = field(default_factory=list)  # autograd's nodes of its arguments, while the forward runs
    brought: list[int] = field(
        default_factory=list
    )  # of its groups, touched without autograd: [Note: loops in a forward]


class TrainingHooks(ModuleHooks[GroupParameters, TrainingCall]):
    """Owns the hooks of one model and the leases that they hold.

    Args:
        owner: of the model.
        updates: follows the passes.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        groups: list[GroupParameters],
        owner: PassOwner,
        updates: UpdateExecutor,
        session_guard: SessionGuard,
        processor: Processor,
    ) -> None:
        units = list(units)
        super().__init__(units, groups, session_guard.turns)
        self._session_guard = session_guard
        self._processor = processor
        self.alone = processor.alone
        self._updates = updates
        self._paged = frozenset(group.index for group in groups if group.paged)
        self._uses = updates.uses if updates.follows_backward else None  # nobody else asks for them
        self._owner = owner
        self._clock = count()  # ticks: [Note: when a backward lease ends]
        self._batches: MicroBatches | None = None  # that pass together now
        self._backward: list[TrainingCall] = []  # calls whose groups are leased for backward
        self._held: list[TrainingCall] = []  # calls whose outputs have no gradient: leased until a backward is over
        self._tasks: set[int] = set()  # running backwards, one within the other
        self._members: dict[str, list[tuple[nn.Module, str, nn.Parameter]]] = {}  # by the unit's name
        answers_reads = all(group.home.answers_reads for group in groups if group.paged)
        self._side_modules = {} if answers_reads else modules_by_unit(units)
        for unit in units:
            needed = {id(p) for index in unit.groups for p in groups[index].parameters}
            self._members[unit.name] = [
                (owner, name, parameter)
                for owner in unit.module.modules()
                for name, parameter in owner._parameters.items()
                if parameter is not None and id(parameter) in needed
            ]

    @property
    def pass_is_open(self) -> bool:
        """True while a forward or a backward holds leases."""
        return bool(self._running or self._backward or self._held)

    # --- batches that pass together ---------------------------------------------------------------------------------

    @property
    def is_batched(self) -> bool:
        """True while several batches pass together."""
        return self._batches is not None

    def share(self, batches: MicroBatches | None) -> None:
        """Begin a pass of `batches`, in whose threads the hooks run until `share(None)`. This thread has the turn."""
        self._batches = batches
        self.exchange(threading.current_thread())

    def exchange(self, thread: threading.Thread | None, state: Any = None) -> Any:
        before = self._backward, self._held, self._tasks
        running, self._backward, self._held, self._tasks = (None, [], [], set()) if state is None else state
        return super().exchange(thread, running), *before

    def abandon_batches(self) -> None:
        """End a pass that failed, in all of its batches' threads, and forget all leases."""
        self.share(None)
        self._forget_leases()

    def end_batch(self) -> None:
        """End the leases that the running batch still has."""
        for call in self._running:
            self._release(call)
        self._running = []
        for call in list(self._backward):
            self._end_call(call)
        self._release_held()
        self._tasks.clear()

    def suspend(self, state: Any) -> list[tuple[TrainingCall, int]]:
        """Release the leases of a batch that waits, whose `state` this is. Return them, for `resume`."""
        running, backward, held, _ = state
        leases = []
        for call in (*running, *backward, *held):
            groups, call.groups = call.groups, []
            leases += [(call, index) for index in groups]
        close_all(self._groups[index].release for _, index in leases)
        return leases

    def resume(self, leases: list[tuple[TrainingCall, int]]) -> None:
        """Make these leases again, and remove them from the list."""
        while leases:
            call, index = leases[0]
            self._lease_with_room(self._groups[index])
            call.groups.append(index)
            leases.pop(0)

    def _lease(self, group: GroupParameters) -> None:
        """Lease `group`, when the batches that pass together have come to it."""
        if self._batches is None:
            try:
                group.lease()
            except BudgetError:
                if not self._release_brought():
                    raise
                group.lease()
            return
        self._batches.arrive(group)
        self._lease_with_room(group)
        self._batches.hold(group)

    def _lease_with_room(self, group: GroupParameters) -> None:
        """Lease `group`, at the cost of batches that wait, if they lease too much at once: they take different ways."""
        assert self._batches is not None
        if self._updates.leases_update:
            self._batches.make_room()  # the update before the lease needs some too
        try:
            group.lease()
        except BudgetError:
            if not self._batches.make_room():
                raise
            group.lease()

    # ----------------------------------------------------------------------------------------------------------------

    def abandon_pass(self) -> None:
        if self.pass_is_open:
            self._backward.clear()
            self._held.clear()
            self._forget_leases()

    def _forget_leases(self) -> None:
        """Forget the leases of forwards that an exception or Ctrl-C ended, but `GroupHome.kept_accesses`."""
        if self._uses is not None:
            self._uses.clear()
        self._running.clear()
        for group in self._groups:
            group.forget_leases()
        self._owner.drop_leases([access for group in self._groups for access in group.home.kept_accesses])

    @property
    def is_inside(self) -> bool:
        return not is_in_backward()

    def _lease_more(self, call: TrainingCall, group: GroupParameters) -> None:
        try:
            self._lease(group)
        except BudgetError as error:
            raise self._no_room_to_touch(call, group, error.option) from error
        call.groups.append(group.index)
        if not torch.is_grad_enabled() and group.home.answers_reads:
            call.brought.append(group.index)
        if self._uses is not None:
            self._uses.brought(call, group.index)

    def _release_brought(self) -> bool:
        """Release groups that running passes touched without autograd. Return True if there are any."""
        found = [(call, index) for call in (*self._running, *self._backward) for index in call.brought]
        for call, index in found:
            call.brought.remove(index)
            call.groups.remove(index)
        close_all(self._groups[index].release for _, index in found)
        return bool(found)

    def _no_room_to_touch(self, call: TrainingCall, group: GroupParameters, option: str) -> BudgetError:
        """Return the error of a forward that touches too many parameters of other units with autograd."""
        module = self._modules[call.module]()
        inside = {id(p) for p in module.parameters()} if module is not None else set()
        needed = sum(one.home.taken_bytes for one in self._groups if any(id(p) in inside for p in one.parameters))
        how = ", or under torch.no_grad() if no gradient is wanted" if torch.is_grad_enabled() else ""
        return BudgetError(
            f"the forward of {call.module or 'the model'} itself reads parameters of modules inside it ({group.names[0]} and "
            f"others), which stay in memory until it and its backward are over: raise {option} by "
            f"{format_bytes(needed)} ({needed} bytes), which is enough for all of them; or do that outside of the forward (a "
            f"penalty in the training loop), where each is in memory for its operation only{how}",
            option=option,
            missing_bytes=needed,
        )

    def follow(self, parameters: Iterable[nn.Parameter], run: Callable[[], Any]) -> Any:
        """Return the result of `run`, an operation outside of modules on `parameters`, which are in memory.

        Its backward leases them like that of a module's call.
        """
        if not torch.is_grad_enabled():
            return run()
        call = TrainingCall("an operation", start=next(self._clock))
        call.groups += dict.fromkeys(self._group_of[id(parameter)].index for parameter in parameters)
        output = run()
        call.end = next(self._clock)
        is_hooked = self._hook_outputs([tensor for tensor in tensors_among(output) if _has_graph(tensor)], call)
        if is_hooked and self._uses is not None:
            self._uses.begin(call)
        return output

    # --- forward --------------------------------------------------------------------------------------------------

    def _before(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        with HookTurn(self, unit) as in_backward, self.alone:
            is_stale = not in_backward and self._is_stale(unit)
            if in_backward:
                self._enter_backward()
            else:
                if self._batches is not None and unit.groups:
                    self._batches.arrive(self._groups[unit.groups[0]])
                    if self._updates.leases_update:
                        self._batches.make_room()
                self._owner.enter_forward(is_outermost=is_stale or not self._running)
            is_functional = self._has_other_members(unit, module)
            if is_stale:
                self.abandon_pass()
            if self._held and not in_backward and any(call.module == unit.name for call in self._held):
                self._release_held()  # no backward has followed that forward
            if in_backward:
                self._note_backward()
                self._updates.backward_goes_on()
            else:
                if not self._running:
                    self._tasks.clear()
                    self._processor.check_inputs(module, args)
                    self._owner.clock.enter("forward")
                self._updates.forward_reaches(unit.groups)
            call = TrainingCall(unit.name, start=next(self._clock))
            call.is_functional = is_functional
            if torch.is_grad_enabled():
                call.given = [tensor.grad_fn for tensor in tensors_among((args, kwargs)) if tensor.grad_fn is not None]
            self._running.append(call)
            for index in unit.groups:
                self._lease(self._groups[index])
                call.groups.append(index)
            if self._uses is not None:
                called = self._uses.called_again if in_backward else self._uses.called
                called(call, torch.is_grad_enabled())

    def _after(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._turns.is_mine and not _in_thread_of_autograd():
            return None  # the pre-hook itself failed
        with self.alone:
            try:
                call = self._end(unit)
                return None if call is None else self._leave(call, output, self._side_modules.get(unit.name, ()))
            finally:
                self._give_turn()

    def _leave(self, call: TrainingCall, output: Any, modules: Sequence[weakref.ref[nn.Module]]) -> Any:
        """End the forward of `call`: release its leases. Return its output. `modules`: that may have others."""
        call.end = next(self._clock)
        try:
            if output is not None and call.groups:
                output = self._watch(call, output)
            if modules and call.groups and torch.is_grad_enabled():
                self._hook_outputs(side_outputs(modules, call.given), call)
            if output is not None and not self._storages and not self._running:
                self._check_at_backward(output)
        finally:
            call.given = []
            with outside_transforms():
                self._release(call)
                if not self._running and not is_in_backward():
                    self._owner.clock.enter("between")
        return output

    def _has_other_members(self, unit: Unit, module: nn.Module) -> bool:
        """Return True if torch.func.functional_call has replaced the unit's parameters for this forward.

        Raises:
            StateError: they are replaced permanently.
        """
        is_functional = False
        for owner, name, parameter in self._members[unit.name]:
            if owner._parameters.get(name) is parameter:
                continue
            is_functional = is_functional or _is_functional_call()
            if not is_functional:
                raise StateError(
                    f"parameter {name!r} of {unit.name or type(module).__name__} was replaced by another object after "
                    "manager.offload, which would not be trained. Change values inside "
                    "`with manager.gather(..., write=True)` or by load_state_dict without assign=True"
                )
        return is_functional

    def _is_stale(self, unit: Unit) -> bool:
        """Return True if recorded leases are of a pass that never ended: Ctrl-C skips the post-hooks."""
        if self._batches is not None:
            return False
        return bool(self._backward) or unit.name in map(_module_of, self._running)

    def _watch(self, call: TrainingCall, output: Any) -> Any:
        """Prepare `output` for the time when the call's parameters are cold, and return it or a copy."""
        is_paged = not self._paged.isdisjoint(call.groups)
        if not is_paged and self._uses is None:
            return output
        tensors, rebuild = tensors_of(output)
        replaced: list[torch.Tensor] = []
        watched: list[torch.Tensor] = []
        own: list[torch.Tensor] = []
        for tensor in tensors:
            if is_paged and type(tensor) is not nn.Parameter:
                tensor = self._own(tensor)
            replaced.append(tensor)
            if _has_graph(tensor):
                watched.append(tensor)
                if tensor.grad_fn not in call.given:
                    own.append(tensor)
        if torch.is_grad_enabled() and not self._hook_outputs(own or watched, call) and not call.is_functional:
            groups = [self._groups[index] for index in call.groups]
            if any(p.requires_grad for group in groups for p in group.parameters):
                held = TrainingCall(call.module, list(call.groups), start=call.start)
                for group in groups:
                    group.lease()
                self._held.append(held)
        return rebuild(replaced) if any(map(is_not, replaced, tensors)) else output

    def _check_at_backward(self, output: Any) -> None:
        """Check at backward that the manager can be used, though nothing is paged: a forked child lacks the memory."""
        for tensor in tensors_of(output)[0]:
            if _has_graph(tensor):
                tensor.register_hook(_when_backward_reaches(weakref.ref(self)))

    def _hook_outputs(self, outputs: list[torch.Tensor], call: TrainingCall) -> bool:
        """Have the backward of each output lease the groups of `call`. Return True if there are any."""
        for tensor in outputs:
            tensor.register_hook(OwnHook(_when_backward_reaches(weakref.ref(self), call)))
        return bool(outputs)

    # --- backward -------------------------------------------------------------------------------------------------

    def _enter_backward(self) -> None:
        """Finish an open step, which a backward must not see. Raises if the manager cannot be used."""
        self._updates.finish(in_order=True)
        self._session_guard.events.check()

    def backward_begins(self) -> None:
        """Begin the backward of an output of a model that is not paged. This thread has the turn."""
        self._enter_backward()
        self._note_backward()

    def backward_reaches(self, call: TrainingCall) -> None:
        """Lease the groups of `call`, when the first of its outputs has its gradient. This thread has the turn."""
        groups = [self._groups[index] for index in call.groups]
        if call.backward_task is not None and call in self._backward:
            for group in groups:
                group.home.wait_on_current_stream()  # which may differ from the first output's
            return
        self._enter_backward()
        task = backward_task()
        if task not in map(_task_of, self._backward):
            after_backward(OwnHook(partial(self._end_backward, task)))
        for other in list(self._backward):  # [Note: when a backward lease ends]
            if other.start > call.end:
                self._end_call(other)
        self._note_backward()
        self._updates.backward_goes_on()
        if self._uses is not None:
            self._uses.begin(call)
        call.backward_task = task
        leased = []
        try:
            for group in groups:
                if torch.is_grad_enabled():
                    group.check_graph_of_backward()
                self._lease(group)
                leased.append(group)
        except BaseException:
            for group in leased:
                group.release()
            call.backward_task = None
            raise
        self._backward.append(call)

    def _end_backward(self, task: int) -> None:
        with outside_transforms():
            for call in list(self._backward):
                if call.backward_task == task:
                    self._end_call(call)
            if not self._backward:
                self._release_held()

    def _note_backward(self) -> None:
        """Enter the phase "backward", until the outermost one is over: reentrant checkpointing runs backwards within one."""
        task = backward_task()
        if task in self._tasks:
            return
        if not self._tasks:
            note_used()
            self._owner.clock.enter("backward")
        self._tasks.add(task)
        self._updates.backward_begins(task)
        after_backward(OwnHook(partial(self._note_end, task)))

    def _note_end(self, task: int) -> None:
        self._tasks.discard(task)
        try:
            with outside_transforms():
                self._updates.backward_ends(task)
                if not self._tasks:
                    self._owner.clock.enter("between")
        finally:
            self._give_turn()

    def _end_call(self, call: TrainingCall) -> None:
        self._backward.remove(call)
        call.backward_task = None
        if self._uses is not None:
            self._uses.end(call)
        self._release(call)

    def _release_held(self) -> None:
        while self._held:
            self._release(self._held.pop())

    # --- turns ----------------------------------------------------------------------------------------------------

    def enter_turn(self, unit: Unit | None) -> bool:
        """Take the turn for a hook. Return whether it is of a backward. Raises StateError as `_take_turn`."""
        in_backward = is_in_backward()
        if self._is_removed or not self._turns.goes_on():
            frame = frame_of_backward() if in_backward else frame_of_call()
            if frame is not None or not in_backward:  # else in a thread of autograd's
                self._take_turn(frame, unit)
        return in_backward

    def _take_turn(self, frame: FrameType | None, unit: Unit | None) -> None:
        """Wait until no other thread uses the model. See [Note: turns].

        Raises:
            StateError: the running forward waits for this thread, which runs `unit`, a part of it.
        """
        if self._turns.take(frame, lambda: self._part_of_running(unit)):
            self._tasks.clear()
            if self._running or self._backward:
                self.abandon_pass()  # a thread ended it without giving the turn
        if self._is_removed:
            self._give_turn()
            raise StateError(
                "the manager was closed, or its optimizer got more to train (add_param_group), while this thread waited for "
                "its turn: run the forward again"
            )

    def _give_turn(self) -> None:
        """Give the turn, if the outermost forward or backward is over."""
        if not self._running and not self._tasks and self._batches is None and self._turns.is_mine:
            self._turns.give()


class HookTurn:
    """The context of a hook: its thread has the turn, and no transform of torch.func sees what it does.

    Each hook enters one, so it is no generator, which would take twice as many calls. Next to it a hook enters
    `TrainingHooks.alone`, which keeps out other threads of its backward on a device.

    Args:
        unit: whose hook it is; None: one of a backward.

    Returns:
        On entering, whether the hook is of a backward.

    Raises:
        StateError: on entering, as `TrainingHooks._take_turn`.
    """

    __slots__ = ("_hooks", "_outside", "_unit")

    def __init__(self, hooks: TrainingHooks, unit: Unit | None = None) -> None:
        self._hooks, self._unit = hooks, unit
        self._outside: AbstractContextManager[object] | None = None

    def __enter__(self) -> bool:
        if innermost_transform() is None:
            return self._hooks.enter_turn(self._unit)
        self._outside = without_transforms()
        self._outside.__enter__()
        try:
            return self._hooks.enter_turn(self._unit)
        except BaseException:
            self._outside.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *error: Any) -> None:
        if self._outside is not None:
            self._outside.__exit__(*error)


def _when_backward_reaches(
    hooks: weakref.ref[TrainingHooks], call: TrainingCall | None = None
) -> Callable[[torch.Tensor], None]:
    """Return a hook for an output of `call`, or of a model that is not paged. [Note: what a graph holds]"""

    def hook(gradient: torch.Tensor) -> None:
        alive = hooks()
        if alive is None:
            raise StateError(
                "this graph was made before the manager was closed, or before the optimizer got more to train "
                "(add_param_group), which moved what it refers to: run the forward again"
            )
        with HookTurn(alive), alive.alone:
            if call is None:
                alive.backward_begins()
            else:
                alive.backward_reaches(call)

    return hook


def _is_functional_call() -> bool:
    """Return True if torch.func.functional_call is running, which replaces a model's parameters for one forward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != stateless.__file__:
        frame = frame.f_back
    return frame is not None


def _in_thread_of_autograd() -> bool:
    """Return True if this thread is autograd's, and runs a part of a backward that another thread has called."""
    return is_in_backward() and frame_of_backward() is None


def _has_graph(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.grad_fn is not None

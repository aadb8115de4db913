"""Passes several callers through a model for one read of its parameters.

A caller is a thread: it has one batch of several, or is a user's own (infer/callers.py). One runs at a time. A caller that
needs a group of parameters that is not in use waits; when all of them wait, one of these groups is read, and each caller that
waits for it runs on to the next group that it needs. So any forward works, also a `generate`: the model is not taken apart.
The callers' activations stay in memory.
"""

from __future__ import annotations

import contextvars
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch.overrides import BaseTorchFunctionMode

from swapper.device.device import Device
from swapper.errors import InvariantError
from swapper.modules.leased_group import LeasedGroup
from swapper.modules.turns import BatchThread
from swapper.runtime.interrupts import defer_signals
from swapper.runtime.process import naming_limits
from swapper.tensors.torch_private import function_modes, pop_function_mode, push_function_mode, saved_tensor_hooks


class Stopped(BaseException):
    """Ends a batch's pass after another one failed."""


class CallerHooks(Protocol):
    """See ModuleHooks."""

    def exchange(self, thread: threading.Thread | None, state: Any = None) -> Any: ...


class ModelCaller:
    """One thread: the hooks' state of its pass, and the group that it waits for.

    Args:
        lock: of the pass.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.thread = threading.current_thread()
        self.turn = threading.Condition(lock)  # notified when it is the one that runs
        self.state: Any = None  # while another one runs
        self.wanted: LeasedGroup | None = None
        self.is_inside = False  # of the present pass; see swapper.infer.callers
        self.is_aside = False  # waits for a read of its own, without the turn
        self.failure: BaseException | None = None  # which it is to raise when it runs next

    @property
    def must_stop(self) -> bool:
        return self.failure is not None

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error

    def check(self) -> None:
        """Raise what ended the caller's pass while another one ran."""
        failure, self.failure = self.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback has this frame


class BatchSet:
    """Batches that are run together: the first exception of one ends all of them."""

    def __init__(self, lock: threading.Lock) -> None:
        self.changed = threading.Condition(lock)  # notified when a batch is done
        self.failure: BaseException | None = None


class Batch(ModelCaller):
    """One batch, in a thread of its own."""

    def __init__(self, lock: threading.Lock, batch_set: BatchSet, index: int, argument: object) -> None:
        super().__init__(lock)
        self.batch_set = batch_set
        self.index = index
        self.argument = argument
        self.is_done = False
        self.result: object = None

    @property
    def must_stop(self) -> bool:
        return self.batch_set.failure is not None

    def fail(self, error: BaseException) -> None:
        self.batch_set.failure = self.batch_set.failure or error

    def check(self) -> None:
        if self.must_stop:
            raise Stopped


class BatchedPass:
    """Chooses which caller runs.

    Args:
        hooks: the model's.
    """

    def __init__(self, hooks: CallerHooks) -> None:
        self._hooks = hooks
        self._lock = threading.Lock()  # of all that follows
        self._callers: list[ModelCaller] = []  # those that run or wait, the first to come first
        self._running: ModelCaller | None = None
        self._here: LeasedGroup | None = None  # the group that callers pass through now
        self._is_held = False  # by this object, in addition to the callers' own leases

    def run_batches(
        self, function: Callable[[Any], object], arguments: Sequence[object], device: Device | None
    ) -> list[Any]:
        """Return the function's results, in the order of the arguments. The first exception of a batch ends all of them.

        Args:
            function: called with each argument, in threads: one of them runs at a time.
            arguments: of the batches.
            device: runs the kernels; None on the CPU.
        """
        modes, batch_set = _Modes(device), BatchSet(self._lock)
        batches = [self._make_batch(batch_set, index, argument) for index, argument in enumerate(arguments)]
        for batch in batches:
            batch.thread = BatchThread(batch_set, partial(self._work, function, batch, modes))
        try:
            with defer_signals:
                self._start(batches)
            self._wait_until_done(batch_set, batches)
        except BaseException as error:  # Ctrl-C, or there is no memory for a thread
            with defer_signals:
                with self._lock:
                    batch_set.failure = batch_set.failure or error
                    if self._running is None:
                        self._switch()
                self._wait_until_done(batch_set, batches)
        for batch in batches:
            if batch.thread.ident is not None:
                batch.thread.join()
        failure, batch_set.failure = batch_set.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback has this frame
        return [batch.result for batch in batches]

    # --- called by the hooks, in the running caller's thread ----------------------------------------------------------

    def arrive(self, group: LeasedGroup) -> None:
        """The running caller needs `group`: return when it may lease it."""
        if not group.is_leased and not group.settled:
            self._wait(group)

    def hold(self, group: LeasedGroup) -> None:
        """The running caller has leased `group`: keep it for the callers that follow."""
        if group is self._here and not self._is_held and not group.settled:
            group.lease()
            self._is_held = True

    # --- what differs -------------------------------------------------------------------------------------------------

    def _make_batch(self, batch_set: BatchSet, index: int, argument: object) -> Batch:
        return Batch(self._lock, batch_set, index, argument)

    def _present(self) -> list[ModelCaller]:
        """Return the callers of which one may run now."""
        return self._callers

    def _may_run(self, caller: ModelCaller) -> bool:
        """Return True if nothing but its group keeps `caller` from running."""
        return True

    def _may_move(self) -> bool:
        """Return True if the next group may be read when all wait."""
        return True

    def _next(self, waiting: Sequence[ModelCaller]) -> ModelCaller:
        """Return one of `waiting`, whose group is to be read: here, the first one of those that most wait for."""
        counts = Counter(id(caller.wanted) for caller in waiting)
        return max(waiting, key=lambda caller: counts[id(caller.wanted)])

    def _ends_turn(self, caller: ModelCaller) -> None:
        """The running caller waits, or is done."""

    def _begins_turn(self, caller: ModelCaller) -> None:
        """The caller runs on."""

    def _ends(self, batch: Batch) -> None:
        """The running batch is over: called in its thread."""

    def _wait_for_turn(self, caller: ModelCaller) -> None:
        """Return when `caller`, of this thread, is the one that runs. Without the lock."""
        with self._lock:
            caller.turn.wait_for(lambda: self._running is caller)

    # --- in the callers' threads --------------------------------------------------------------------------------------

    def _work(self, function: Callable[[Any], object], batch: Batch, modes: _Modes) -> None:
        self._wait_for_turn(batch)
        try:
            try:
                batch.check()
                batch.result = modes.run(function, batch.argument)
            finally:
                self._ends(batch)
        except Stopped:
            pass
        except BaseException as error:
            batch.fail(error)
        with self._lock:
            batch.is_done = True
            self._callers.remove(batch)
            self._switch()
            batch.batch_set.changed.notify_all()

    def _wait(self, group: LeasedGroup | None) -> None:
        """Let other callers run until it is the turn of the running one, with `group` or without."""
        with self._lock:
            caller = self._running
            if caller is None:
                return
            caller.wanted = group
            self._switch()
        if self._running is not caller:
            self._wait_for_turn(caller)
        caller.wanted = None
        caller.check()

    # --- with the lock ------------------------------------------------------------------------------------------------

    def _switch(self) -> None:
        """Switch to a caller that waits for the present group or for none; else to one of another group."""
        before = self._running
        try:
            if before is not None:
                before.state = self._hooks.exchange(None)
                if not before.must_stop:
                    self._ends_turn(before)
            self._running = self._choose()
            if self._running is not None and not self._running.must_stop:
                self._begins_turn(self._running)
        except BaseException as error:
            (before or self._callers[0]).fail(error)
            self._running = next(iter(self._present()), None)
        if self._running is not None:
            self._hooks.exchange(self._running.thread, self._running.state)
            self._running.turn.notify()
        elif self._callers:
            self._callers[0].turn.notify()  # it looks after those that are awaited

    def _choose(self) -> ModelCaller | None:
        left = self._present()
        waiting = [caller for caller in left if caller.must_stop or self._may_run(caller)]
        for caller in waiting:
            if caller.wanted is None or caller.wanted is self._here or caller.must_stop:
                return caller
        if not self._may_move():
            return None
        self._leave_group()
        if not left:
            return None
        if not waiting:
            raise InvariantError("batches wait for each other")
        chosen = self._next(waiting)
        self._here = chosen.wanted
        return chosen

    def _leave_group(self) -> None:
        (here, self._here), (was_held, self._is_held) = (self._here, None), (self._is_held, False)
        if was_held and here is not None:
            here.release()

    # --- for run_batches ----------------------------------------------------------------------------------------------

    def _start(self, batches: Sequence[Batch]) -> None:
        """Start the threads, then have them run. If one cannot be started, those that were end."""
        try:
            for batch in batches:
                with naming_limits("run"):
                    batch.thread.start()
        except BaseException as error:
            batch.fail(error)
        with self._lock:
            self._callers += [batch for batch in batches if batch.thread.ident is not None]
            if self._running is None:
                self._switch()

    def _wait_until_done(self, batch_set: BatchSet, batches: Sequence[Batch]) -> None:
        with self._lock:
            batch_set.changed.wait_for(lambda: not any(batch in self._callers for batch in batches))


class _Modes:
    """Modes that torch keeps by thread, as they are in the thread that starts the batches."""

    def __init__(self, device: Device | None) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        types = {"cpu"} if device is None else {"cpu", device.device.type}
        self._autocast = {t: torch.get_autocast_dtype(t) for t in types if torch.is_autocast_enabled(t)}
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._function_modes: list[BaseTorchFunctionMode] = function_modes()
        self._saved_tensor_hooks = saved_tensor_hooks(False)
        self._stream = None if device is None else (device, device.current_stream())
        self._context = contextvars.copy_context()

    def run(self, function: Callable[[object], object], argument: object) -> object:
        """Return `function(argument)`, called in these modes."""
        with self._entered():
            return self._context.copy().run(function, argument)

    def _entered(self) -> ExitStack:
        stack = ExitStack()
        for mode in self._function_modes:  # a default device is one
            push_function_mode(mode)
            stack.callback(pop_function_mode)
        if self._inference:
            stack.enter_context(torch.inference_mode())
        else:
            stack.enter_context(torch.set_grad_enabled(self._grad))
        for device_type, dtype in self._autocast.items():
            stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=self._caches_casts))
        if self._saved_tensor_hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saved_tensor_hooks))
        if self._stream is not None:
            device, stream = self._stream
            stack.enter_context(device.on(stream))
        return stack

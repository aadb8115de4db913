"""Passes many batches through a model for one read of its parameters.

Each batch has a thread, of which one runs at a time. A batch that needs a group of parameters that is not in use waits;
when all of them wait, one of these groups is read, and each batch that waits for it runs on to the next group that it
needs. So any forward works, also a `generate`: the model is not taken apart. The batches' activations stay in memory.
"""

from __future__ import annotations

import contextvars
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import BaseTorchFunctionMode

from swapper.device.device import Device
from swapper.errors import InvariantError
from swapper.modules.leased_group import LeasedGroup
from swapper.modules.module_hooks import ModuleHooks
from swapper.runtime.interrupts import defer_signals
from swapper.runtime.process import naming_limits
from swapper.tensors.torch_private import function_modes, pop_function_mode, push_function_mode, saved_tensor_hooks


class Stopped(BaseException):
    """Ends a batch's pass after another one failed."""


class Batch:
    """One batch: its thread, the hooks' state of its pass, and the group that it waits for."""

    def __init__(self, index: int, argument: object) -> None:
        self.index = index
        self.argument = argument
        self.thread: threading.Thread
        self.state: object = None
        self.wanted: LeasedGroup | None = None
        self.is_done = True  # until its thread has begun
        self.result: object = None


class BatchedPass:
    """Runs `function` on every batch. Made for one `run`.

    Args:
        hooks: the model's; this thread has the turn.
        function: called with each batch, in threads: one of them runs at a time.
        batches: its arguments.
        device: runs the kernels; None on the CPU.
    """

    def __init__(
        self,
        hooks: ModuleHooks[Any, Any],
        function: Callable[[object], object],
        batches: Sequence[object],
        device: Device | None,
    ) -> None:
        self._device = device
        self._hooks = hooks
        self._function = function
        self._batches = [self._make_batch(index, argument) for index, argument in enumerate(batches)]
        self._changed = threading.Condition()
        self._running: Batch | None = None
        self._here: LeasedGroup | None = None  # the group that batches pass through now
        self._is_held = False  # by this object, in addition to the batches' own leases
        self._failure: BaseException | None = None

    def run(self) -> list[Any]:
        """Return the function's results, in the order of the batches. The first exception of a batch ends all of them."""
        modes = _Modes(self._device)
        for batch in self._batches:
            batch.thread = threading.Thread(target=self._work, args=(batch, modes), daemon=True)
        try:
            with defer_signals:
                for batch in self._batches:
                    with naming_limits("run"):
                        batch.thread.start()
                    batch.is_done = False
                with self._changed:
                    self._switch()
            with self._changed:
                self._changed.wait_for(self._is_over)
        except BaseException as error:  # Ctrl-C, or there is no memory for a thread
            with defer_signals, self._changed:
                self._failure = self._failure or error
                if self._running is None:
                    self._switch()
                self._changed.wait_for(self._is_over)
        for batch in self._batches:
            if batch.thread.ident is not None:
                batch.thread.join()
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback has this frame
        return [batch.result for batch in self._batches]

    # --- called by the hooks, in the running batch's thread -----------------------------------------------------------

    def arrive(self, group: LeasedGroup) -> None:
        """The running batch needs `group`: return when it may lease it."""
        if not group.is_leased and not group.settled:
            self._wait(group)

    def hold(self, group: LeasedGroup) -> None:
        """The running batch has leased `group`: keep it for the batches that follow."""
        if group is self._here and not self._is_held and not group.settled:
            group.lease()
            self._is_held = True

    # --- what differs -------------------------------------------------------------------------------------------------

    def _make_batch(self, index: int, argument: object) -> Batch:
        return Batch(index, argument)

    def _may_run(self, batch: Batch) -> bool:
        """Return True if nothing but its group keeps `batch` from running."""
        return True

    def _next(self, waiting: Sequence[Batch]) -> Batch:
        """Return one of `waiting`, whose group is to be read: here, the first one of those that most wait for."""
        counts = Counter(id(batch.wanted) for batch in waiting)
        return max(waiting, key=lambda batch: counts[id(batch.wanted)])

    def _ends_turn(self, batch: Batch) -> None:
        """The running batch waits, or is done."""

    def _begins_turn(self, batch: Batch) -> None:
        """The batch runs on."""

    # --- in the batches' threads --------------------------------------------------------------------------------------

    def _work(self, batch: Batch, modes: _Modes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._running is batch)
        try:
            if self._failure is None:
                batch.result = modes.run(self._function, batch.argument)
        except Stopped:
            pass
        except BaseException as error:
            self._failure = self._failure or error
        with self._changed:
            batch.is_done = True
            self._switch()

    def _wait(self, group: LeasedGroup | None) -> None:
        """Let other batches run until it is the turn of the running one, with `group` or without."""
        with self._changed:
            batch = self._running
            if batch is None:
                return
            batch.wanted = group
            self._switch()
            self._changed.wait_for(lambda: self._running is batch)
            batch.wanted = None
            if self._failure is not None:
                raise Stopped

    def _switch(self) -> None:
        """Switch to a batch that waits for the present group or for none; else to one of another group."""
        try:
            if self._running is not None:
                self._running.state = self._hooks.exchange(None)
                if self._failure is None:
                    self._ends_turn(self._running)
            self._running = self._choose()
            if self._running is not None and self._failure is None:
                self._begins_turn(self._running)
        except BaseException as error:
            self._failure = self._failure or error
            self._running = next((batch for batch in self._batches if not batch.is_done), None)
        if self._running is not None:
            self._hooks.exchange(self._running.thread, self._running.state)
        self._changed.notify_all()

    def _choose(self) -> Batch | None:
        left = [batch for batch in self._batches if not batch.is_done]
        waiting = [batch for batch in left if self._failure is not None or self._may_run(batch)]
        for batch in waiting:
            if batch.wanted is None or batch.wanted is self._here or self._failure is not None:
                return batch
        self._here, was_held, here = None, self._is_held, self._here
        self._is_held = False
        if was_held and here is not None:
            here.release()
        if not left:
            return None
        if not waiting:
            raise InvariantError("batches wait for each other")
        chosen = self._next(waiting)
        self._here = chosen.wanted
        return chosen

    def _is_over(self) -> bool:
        return all(batch.is_done for batch in self._batches)


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

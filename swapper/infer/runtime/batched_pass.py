"""Passes many batches through a model for one read of its weights.

Each batch has a thread, of which one runs at a time. A batch that needs a group of weights that is not in use waits;
when all of them wait, the group that most of them need is read, and each of these batches runs on to the next group
that it needs. So any forward works, also a `generate`: the model is not taken apart. The batches' activations stay in
memory.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from swapper.device.device import Device
from swapper.infer.runtime.infer_hooks import InferenceCall, InferenceHooks
from swapper.infer.runtime.weights import GroupWeights


class _Stopped(BaseException):
    """Ends a batch's forward after another one failed."""


class _Batch:
    """One batch: its thread, its running calls, and the group that it waits for."""

    def __init__(self, argument: Any) -> None:
        self.argument = argument
        self.thread: threading.Thread
        self.stack: list[InferenceCall] = []
        self.wanted: GroupWeights | None = None
        self.is_done = False
        self.result: Any = None


class BatchedPass:
    """Runs `function` on every batch. Made for one `run`.

    Args:
        hooks: the model's; this thread has the turn.
        function: called with each batch, in threads: one of them runs at a time.
        batches: its arguments.
        device: runs the kernels; None on the CPU.
    """

    def __init__(
        self, hooks: InferenceHooks, function: Callable[[Any], Any], batches: Sequence[Any], device: Device | None
    ) -> None:
        self._device = device
        self._hooks = hooks
        self._function = function
        self._batches = [_Batch(argument) for argument in batches]
        self._changed = threading.Condition()
        self._running: _Batch | None = None
        self._here: GroupWeights | None = None  # the group that batches pass through now
        self._is_held = False  # by this object, in addition to the batches' own leases
        self._failure: BaseException | None = None

    def run(self) -> list[Any]:
        """Return the function's results, in the order of the batches. The first exception of a batch ends all of them."""
        modes = _Modes(self._device)
        for batch in self._batches:
            batch.thread = threading.Thread(target=self._work, args=(batch, modes), daemon=True)
            batch.thread.start()
        try:
            with self._changed:
                self._switch()
                self._changed.wait_for(self._is_over)
        except BaseException as error:  # Ctrl-C
            with self._changed:
                self._failure = self._failure or error
                self._changed.wait_for(self._is_over)
        for batch in self._batches:
            batch.thread.join()
        if self._failure is not None:
            raise self._failure
        return [batch.result for batch in self._batches]

    # --- called by the hooks, in the running batch's thread -----------------------------------------------------------

    def arrive(self, group: GroupWeights) -> None:
        """The running batch needs `group`: return when it may lease it."""
        if group.is_leased or group.settled:
            return
        with self._changed:
            batch = self._running
            if batch is None:
                return
            batch.wanted = group
            self._switch()
            self._changed.wait_for(lambda: self._running is batch)
            batch.wanted = None
            if self._failure is not None:
                raise _Stopped

    def hold(self, group: GroupWeights) -> None:
        """The running batch has leased `group`: keep it for the batches that follow."""
        if group is self._here and not self._is_held and not group.settled:
            group.lease()
            self._is_held = True

    # --- in the batches' threads --------------------------------------------------------------------------------------

    def _work(self, batch: _Batch, modes: _Modes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._running is batch)
        try:
            with modes.entered():
                if self._failure is None:
                    batch.result = self._function(batch.argument)
        except _Stopped:
            pass
        except BaseException as error:
            self._failure = self._failure or error
        with self._changed:
            batch.is_done = True
            self._switch()

    def _switch(self) -> None:
        """Switch to a batch that waits for the present group or has not begun; else to the group that most wait for."""
        if self._running is not None:
            self._running.stack = self._hooks.exchange(None, [])
        try:
            self._running = self._choose()
        except BaseException as error:
            self._failure = self._failure or error
            self._running = next((batch for batch in self._batches if not batch.is_done), None)
        if self._running is not None:
            self._hooks.exchange(self._running.thread, self._running.stack)
        self._changed.notify_all()

    def _choose(self) -> _Batch | None:
        waiting = [batch for batch in self._batches if not batch.is_done]
        for batch in waiting:
            if batch.wanted is None or batch.wanted is self._here or self._failure is not None:
                return batch
        self._here, was_held, here = None, self._is_held, self._here
        self._is_held = False
        if was_held and here is not None:
            here.release()
        if not waiting:
            return None
        counts = Counter(id(batch.wanted) for batch in waiting)
        chosen = max(waiting, key=lambda batch: counts[id(batch.wanted)])  # the first of equals
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
        self._stream = None if device is None else (device, device.current_stream())

    def entered(self) -> ExitStack:
        stack = ExitStack()
        if self._inference:
            stack.enter_context(torch.inference_mode())
        else:
            stack.enter_context(torch.set_grad_enabled(self._grad))
        for device_type, dtype in self._autocast.items():
            stack.enter_context(torch.autocast(device_type, dtype=dtype))
        if self._stream is not None:
            device, stream = self._stream
            stack.enter_context(device.on(stream))
        return stack

"""Shares the passes of a loaded model between the threads that call it, so that each group is read once for all of them.

A pass begins with all callers that wait, in the order in which they came, and with those that come while it is at its first
group; it is over when the forwards of all of them are. Who comes later waits for the next pass, which so comes within the time
of one. A caller whose forward is over is likely to come back (`generate` does, for the next token): the next pass awaits it
for a small part of the time that the last one took. `map` has its batches in the pass until the function has returned; if
somebody else waits, they stop where their next forward begins.

A thread can leave its forward in the middle, by Ctrl-C: those that wait find that by its frame, and go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from swapper.errors import SwapperError
from swapper.infer.weights import GroupWeights
from swapper.modules.batched_pass import Batch, BatchedPass, CallerHooks, ModelCaller
from swapper.modules.leased_group import LeasedGroup
from swapper.modules.turns import PATIENCE_S, Turns, is_running

AWAITED_PART = 0.1
"""A pass awaits those that were in the last one for this part of the time that they were."""


class ForwardHooks(CallerHooks, Protocol):
    """The calls that the forward of the running caller consists of. See InferenceHooks."""

    @property
    def has_calls(self) -> bool: ...

    def drop_stale(self) -> None: ...

    def release_calls(self, calls: Iterable[Any]) -> None: ...

    def pass_over(self, is_shared: bool) -> None: ...


class Forward(ModelCaller):
    """A thread's forward, outside of `map`; or a thread that needs the model for itself.

    Args:
        lock: of the pass.
        frame: of torch that runs the forward; None: none is known, and it ends with the thread.
        is_exclusive: nobody else may be inside.
    """

    def __init__(self, lock: threading.Lock, frame: FrameType | None, is_exclusive: bool) -> None:
        super().__init__(lock)
        self.frame = frame
        self.is_exclusive = is_exclusive
        self.began_s = 0.0

    @property
    def is_abandoned(self) -> bool:
        """Whether its thread has left it, which no hook has noticed."""
        return not self.thread.is_alive() or (self.frame is not None and not is_running(self.frame))


class CallersPass(BatchedPass):
    """Owns the turns of a loaded model's callers.

    Args:
        hooks: the model's.
        turns: whose owner is the running caller.
    """

    _hooks: ForwardHooks

    def __init__(self, hooks: ForwardHooks, turns: Turns) -> None:
        super().__init__(hooks)
        self._turns = turns
        self._awaited: WeakKeyDictionary[threading.Thread, float] = WeakKeyDictionary()  # until when: time.monotonic
        self._ended: list[ModelCaller] = []  # while they waited: their calls have leases
        self._groups_chosen = 0  # in this pass
        self._forwards = 0  # in this pass; a batch counts as several

    # --- forwards -----------------------------------------------------------------------------------------------------

    def enter(self, frame: FrameType | None, part: Callable[[], str | None] = lambda: None) -> None:
        """Return when this thread, which begins a forward, is the one that runs.

        Args:
            frame: of the forward.
            part: see Turns.wait.
        """
        with self._lock:
            caller = self._running
            if caller is None or caller.thread is not threading.current_thread():
                caller = self._add(Forward(self._lock, frame, is_exclusive=False))
            elif not self._goes_on(caller, frame):
                caller.is_inside = False
                self._switch()
        if self._running is not caller:
            self._wait_for_turn(caller, None if isinstance(caller, Batch) else part)
        try:
            caller.check()
        except BaseException:
            self.leave()
            raise

    def leave(self, is_awaited: bool = False) -> None:
        """This thread's forward is over, and the next pass awaits it if `is_awaited`. A batch's function goes on."""
        caller = self._running
        if not isinstance(caller, Forward):
            return
        try:
            self._finish()
        finally:
            with self._lock:
                if is_awaited:
                    now = time.monotonic()
                    self._awaited[caller.thread] = now + AWAITED_PART * (now - caller.began_s)
                self._remove(caller)
        caller.check()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run the context while no forward and no `map` goes on. Callers that come meanwhile wait."""
        with self._lock:
            caller = self._add(Forward(self._lock, None, is_exclusive=True))
        if self._running is not caller:
            self._wait_for_turn(caller, lambda: None)
        try:
            yield
        finally:
            with self._lock:
                self._remove(caller)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let others run within the context, in which the running caller waits for a read of its own; a batch keeps its turn."""
        caller = self._running
        if not isinstance(caller, Forward) or not self._turns.is_mine or len(self._callers) == 1:
            yield
            return
        with self._lock:
            caller.is_aside = True
            self._switch()
        try:
            yield
        finally:
            with self._lock:
                caller.is_aside = False
                if self._running is None:
                    self._switch()
            if self._running is not caller:
                self._wait_for_turn(caller)
        caller.check()

    @property
    def has_batch(self) -> bool:
        """Whether the running caller is a batch of `map`."""
        return isinstance(self._running, Batch)

    # --- called by the hooks, in the running caller's thread ----------------------------------------------------------

    def arrive(self, group: LeasedGroup) -> None:
        if len(self._callers) == 1 and self._here is None:  # it is alone
            self._groups_chosen = 2
        elif not group.is_leased and not group.settled:
            self._refuse_change()
            self._wait(group)

    def _refuse_change(self) -> None:
        """Have the running caller raise what the group says of its own writes, before others use the group."""
        here = self._here
        if self._is_held and isinstance(here, GroupWeights) and here.is_changed:
            self._leave_group()

    # --- in the callers' threads --------------------------------------------------------------------------------------

    def _ends(self, batch: Batch) -> None:
        self._hooks.release_calls(self._hooks.exchange(batch.thread))
        self._finish()

    def _finish(self) -> None:
        try:
            self._refuse_change()
        finally:
            if [caller for caller in self._callers if caller.is_inside] == [self._running]:
                self._hooks.pass_over(self._forwards > 1)

    def _wait_for_turn(self, caller: ModelCaller, part: Callable[[], str | None] | None = None) -> None:
        """See BatchedPass. `part`: of a forward that begins, see Turns.wait; None: it goes on."""
        try:
            if part is not None:
                self._turns.wait(lambda: self._try_to_run(caller), part)
            while not self._try_to_run(caller):
                pass
        except BaseException:  # sent by another thread, or the turn will never come
            with self._lock:
                if isinstance(caller, Forward) and caller in self._callers:
                    if self._running is not caller:
                        self._ended.append(caller)
                    self._remove(caller)
            raise

    def _try_to_run(self, caller: ModelCaller) -> bool:
        """Wait for the turn of `caller`, and look after the others. Returns whether it has come."""
        end_s = time.monotonic() + PATIENCE_S
        with self._lock:
            while self._running is not caller and (left_s := end_s - time.monotonic()) > 0:
                caller.turn.wait(min(left_s, self._awaited_s()))
                if self._running is None:
                    self._switch()
            if self._running is not caller and isinstance(self._running, Forward) and self._running.is_abandoned:
                self._remove(self._running)
            return self._running is caller

    # --- with the lock ------------------------------------------------------------------------------------------------

    def _add(self, caller: Forward) -> Forward:
        self._callers.append(caller)
        self._awaited.pop(caller.thread, None)
        if self._running is None:
            self._switch()
        return caller

    def _remove(self, caller: ModelCaller) -> None:
        self._callers.remove(caller)
        if self._running is caller:
            caller.state = self._hooks.exchange(caller.thread)
            self._release_calls(caller)
        if self._running in (caller, None):
            self._switch()

    def _release_calls(self, caller: ModelCaller) -> None:
        """Release what the calls of a caller that is over have left, as after Ctrl-C. An error is that caller's."""
        try:
            self._hooks.release_calls(caller.state or ())
        except SwapperError as error:
            caller.fail(error)

    def _goes_on(self, caller: ModelCaller, frame: FrameType | None) -> bool:
        """Return whether the running caller, which calls the model (again), need not wait for the next pass."""
        self._hooks.drop_stale()
        if isinstance(caller, Forward):
            caller.frame = frame if not self._hooks.has_calls else caller.frame
            return True
        assert isinstance(caller, Batch)
        return self._hooks.has_calls or not any(self._stops_for(caller, other) for other in self._callers)

    def _stops_for(self, batch: Batch, other: ModelCaller) -> bool:
        if other.is_inside or (isinstance(other, Forward) and other.is_exclusive):
            return False
        return not isinstance(other, Batch) or other.batch_set is not batch.batch_set

    def _present(self) -> list[ModelCaller]:
        """Return the callers inside, after others have joined them, or the next pass has begun."""
        while self._ended:
            self._release_calls(self._ended.pop())
        if not any(caller.is_inside for caller in self._callers):
            self._begin()
        elif self._groups_chosen == 0 or (self._groups_chosen == 1 and self._here is not None):
            self._admit()
        return [caller for caller in self._callers if caller.is_inside or caller.must_stop]

    def _begin(self) -> None:
        """Begin a pass, unless those of the last one are awaited still."""
        self._leave_group()
        now = time.monotonic()
        for thread, end_s in list(self._awaited.items()):
            if end_s <= now or not thread.is_alive():
                del self._awaited[thread]
        if not self._awaited:
            self._groups_chosen = self._forwards = 0
            self._admit()

    def _admit(self) -> None:
        """Have those that wait join the pass, up to one that is to be alone. That one waits for the end of every `map`."""
        has_batches = any(isinstance(caller, Batch) for caller in self._callers)
        for caller in [caller for caller in self._callers if not caller.is_inside]:
            if not isinstance(caller, Forward):
                self._forwards += 2
            elif caller.is_exclusive:
                if has_batches:
                    continue
                caller.is_inside = not any(other.is_inside for other in self._callers)
                return
            else:
                self._forwards += 1
                caller.began_s = time.monotonic()
            caller.is_inside = True

    def _may_run(self, caller: ModelCaller) -> bool:
        return not caller.is_aside

    def _may_move(self) -> bool:
        """Nobody who is aside is left behind."""
        return not any(caller.is_aside for caller in self._callers)

    def _next(self, waiting: Sequence[ModelCaller]) -> ModelCaller:
        """Return one of those with most leases: so what one caller has is a part of what another has, and that is enough memory."""
        self._groups_chosen += 1
        leases = [sum(len(call.groups) for call in caller.state) for caller in waiting]
        most = max(leases)
        return super()._next([caller for caller, count in zip(waiting, leases, strict=True) if count == most])

    def _awaited_s(self) -> float:
        """Return how long to wait for the turn, at most: until those that are awaited have had their time."""
        if self._running is not None or not self._may_move():
            return PATIENCE_S
        return max(0.0, max(self._awaited.values(), default=0.0) - time.monotonic())

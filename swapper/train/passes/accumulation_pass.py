"""Runs the micro-batches of a step group by group: a group's parameters are read once in forward and once in backward.

The forwards of all micro-batches pass through a group before the next group is read (modules/batched_pass.py); when all
have their losses, so do the backwards. Losses, gradients and the random numbers are those of one after the other.

[Note: the order of gradients] Floats are added in the order of micro-batches, for each parameter. Usually the turns are
in that order. Where micro-batches take different ways, a gradient that comes early waits in a hook of its parameter, the
first one, before anything else has seen it: until each earlier micro-batch has added its own, or does not reach the
parameter, as autograd's engine knows when its backward begins. A micro-batch waits for earlier ones only, so there is
always one that can run. Autograd sums the uses within one backward before it accumulates them, so parameters that are
used twice need no more. Reentrant checkpointing accumulates in backwards of its own, one for each segment, and is refused.

[Note: random numbers] One after the other, the first micro-batch draws all its numbers before the second. Nobody knows
how many until its forward is over. So forwards that draw run one after the other, and it must be known before they begin:
what has begun may have read the generators' states (checkpointing does). The first pass in each training mode shows it;
if a later one draws after all, that is an error. A backward restores what it changes (checkpointing sets the state with
which the forward began), so there each micro-batch has a state of its own, which must end as it began.

[Note: buffers] A module's state, as batch norm's statistics, changes in the order of micro-batches if each calls the
module once. A buffer that an earlier micro-batch changes after a later one is an error.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from swapper.errors import StateError, UnsupportedError
from swapper.modules.batched_pass import Batch, BatchedPass, BatchSet, ModelCaller
from swapper.modules.leased_group import LeasedGroup
from swapper.modules.module_hooks import outside_transforms
from swapper.runtime.process import rng_states, set_rng_states
from swapper.tensors.torch_private import backward_task, running_ddp, will_run, without_torch_functions
from swapper.train.gradients.autograd_grads import AccumulationHooks, Hook
from swapper.train.passes.fault_handler import ParameterFaultHandler
from swapper.train.passes.train_hooks import TrainingCall, TrainingHooks

log = logging.getLogger("swapper")

REMEDY = "run them one after the other, `for batch in batches: loss_fn(batch).backward()`"


class AccumulationOrder:
    """Owns the hooks that put gradients in order. They must be the first of their parameters.

    Attributes:
        parameters: all of the model.
        running: the pass, within `of`; None: nothing is put in order.
        draws: whether the last forwards in a training mode drew random numbers. [Note: random numbers]
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [p for p in model.parameters() if p.dtype.is_floating_point or p.dtype.is_complex]
        self.running: AccumulationPass | None = None
        self.draws: dict[Hashable, bool] = {}
        self._model = weakref.ref(model)
        self._hooks = AccumulationHooks()
        for parameter in self.parameters:
            self._hooks.add(parameter, before=_make_hook(weakref.ref(self), id(parameter)))

    @property
    def mode(self) -> tuple[bool, ...]:
        """The training mode of each module."""
        model = self._model()
        return () if model is None else tuple(module.training for module in model.modules())

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        model = self._model()
        return [] if model is None else list(model.named_buffers())

    @contextmanager
    def of(self, together: AccumulationPass) -> Iterator[None]:
        """Return a context within which the gradients of this pass are put in order."""
        self.running = together
        try:
            yield
        finally:
            self.running = None

    def remove(self) -> None:
        self._hooks.remove()
        self.parameters.clear()


def _make_hook(order: weakref.ref[AccumulationOrder], parameter: int) -> Hook:
    def hook(_: torch.Tensor) -> None:
        if (alive := order()) is not None and alive.running is not None:
            alive.running.gradient_comes(parameter)

    return hook


class _MicroBatch(Batch):
    has_loss = False
    task: int | None = None  # autograd's graph task of its backward
    to_come: frozenset[int] | set[int] | None = None  # parameters whose gradients it still adds, by id; None: not known
    awaits: int | None = None  # the parameter whose gradients of earlier ones it waits for
    random_states: dict[str, Any] | None = None  # in its backward
    suspended: list[tuple[TrainingCall, int]] | None = None  # leases that it makes again before it runs on


class AccumulationPass(BatchedPass):
    """Runs forward and backward of all micro-batches. Made for one `run`, which returns their losses, detached.

    Args:
        hooks: the model's.
        order: of the gradients.
        loss_fn: returns the loss of a micro-batch.
        batches: its arguments.
        fault_handler: knows whether a forward has changed parameters.

    Attributes:
        has_losses: all micro-batches have their losses: gradients may have changed.
    """

    _hooks: TrainingHooks

    def __init__(
        self,
        hooks: TrainingHooks,
        order: AccumulationOrder,
        loss_fn: Callable[[Any], torch.Tensor],
        batches: Sequence[object],
        fault_handler: ParameterFaultHandler,
    ) -> None:
        super().__init__(hooks)
        self._arguments = batches
        self._batches: list[_MicroBatch] = []
        self._order = order
        self._loss_fn = loss_fn
        self._fault_handler = fault_handler
        self.has_losses = False
        self._settings = _settings()
        self._mode = order.mode
        self._is_serial = order.draws.get(self._mode, True)
        self._draws = False
        self._buffers = order.buffers()
        self._versions = [buffer._version for _, buffer in self._buffers]
        self._writers = [0] * len(self._buffers)  # the last micro-batch that has changed each
        self._random_states = self._present_states = rng_states(devices=False)
        with without_torch_functions():
            self._nodes = {
                id(parameter): torch.autograd.graph.get_gradient_edge(parameter).node
                for parameter in order.parameters
                if parameter.requires_grad
            }

    def run(self) -> list[Any]:
        """Return the losses. See BatchedPass.run_batches."""
        return self.run_batches(self._run, self._arguments, None)

    # --- a micro-batch, in its thread ---------------------------------------------------------------------------------

    def _run(self, argument: object) -> torch.Tensor:
        batch = self._running
        assert isinstance(batch, _MicroBatch)
        try:
            loss = self._loss_fn(argument)
            if not isinstance(loss, torch.Tensor):
                raise StateError(f"loss_fn returned {type(loss).__name__}: let it return the loss, a tensor")
            batch.has_loss = True
            self._wait(None)  # for all losses
            self.has_losses = True
            self._order.draws[self._mode] = self._draws
            if loss.grad_fn is not None:
                loss.register_hook(_when_backward_begins(weakref.ref(self)))
            loss.backward()
            return loss.detach()
        except BaseException:
            forget_failed_backward()
            raise
        finally:
            self._hooks.end_batch()

    def backward_begins(self) -> None:
        """Find out to which gradients the running micro-batch will add."""
        batch = self._running
        assert isinstance(batch, _MicroBatch)
        batch.task = backward_task()
        batch.to_come = {key for key, node in self._nodes.items() if will_run(node)}

    def gradient_comes(self, parameter: int) -> None:
        """Return when the running micro-batch may add its gradient of the parameter with this id.

        Raises:
            StateError: in a forward.
            UnsupportedError: in a backward within the micro-batch's own.
        """
        batch = self._running
        if not isinstance(batch, _MicroBatch) or batch.thread is not threading.current_thread():
            return  # another thread's, outside of the model's forwards
        is_own = batch.to_come is not None and backward_task() == batch.task
        if not is_own and self._is_captured(parameter):
            return
        if batch.to_come is None:
            raise StateError("loss_fn has accumulated gradients: let it return the loss, whose backward is run for it")
        if not is_own:
            raise UnsupportedError(
                "reentrant activation checkpointing accumulates gradients in backwards of its own, so that micro-batches that run "
                f"together would add them in another order: say use_reentrant=False; or {REMEDY}"
            )
        if any(_adds_to(other, parameter) for other in self._batches[: batch.index]):
            batch.awaits = parameter
            self._wait(None)
            batch.awaits = None
        batch.to_come -= {parameter}

    def adds_to(self, parameter: int) -> bool:
        """Return True if a micro-batch may still add to the gradient of the parameter with this id."""
        return any(_adds_to(batch, parameter) for batch in self._batches)

    def _is_captured(self, parameter: int) -> bool:
        """Return True if torch.autograd.grad returns the gradient, which is added to nothing."""
        try:
            will_run(self._nodes[parameter])
        except RuntimeError:  # torch's answer for a leaf
            return True
        return False

    def arrive(self, group: LeasedGroup) -> None:
        if running_ddp() is not None:
            raise UnsupportedError(
                "DistributedDataParallel expects a backward after each forward, so micro-batches cannot run together; "
                f"{REMEDY}, all but the last in its no_sync()"
            )
        super().arrive(group)

    def make_room(self) -> bool:
        """Release the leases of the batches that wait. Return False if there are none."""
        was_held, self._is_held = self._is_held, False
        if was_held and self._here is not None:
            self._here.release()
        waiting = [b for b in self._batches if b is not self._running and not b.is_done and b.state and not b.suspended]
        for batch in waiting:
            batch.suspended = self._hooks.suspend(batch.state)
        return was_held or any(batch.suspended for batch in waiting)

    # --- turns --------------------------------------------------------------------------------------------------------

    def _make_batch(self, batch_set: BatchSet, index: int, argument: object) -> Batch:
        self._batches.append(batch := _MicroBatch(self._lock, batch_set, index, argument))
        return batch

    def _may_run(self, batch: ModelCaller) -> bool:
        assert isinstance(batch, _MicroBatch)
        earlier = self._batches[: batch.index]
        if self.has_losses:
            return batch.awaits is None or not any(_adds_to(other, batch.awaits) for other in earlier)
        if batch.has_loss:
            return all(other.has_loss for other in self._batches)
        return not self._is_serial or all(other.has_loss for other in earlier)

    def _next(self, waiting: Sequence[ModelCaller]) -> ModelCaller:
        """Return the one that is furthest behind, in the order of the model's modules."""

        def place(batch: ModelCaller) -> int:
            return -1 if batch.wanted is None else batch.wanted.index

        return max(waiting, key=place) if self.has_losses else min(waiting, key=place)

    def _ends_turn(self, batch: ModelCaller) -> None:
        assert isinstance(batch, _MicroBatch)
        if self._fault_handler.changes_itself:
            raise UnsupportedError(f"a forward has changed parameters, so micro-batches cannot run together; {REMEDY}")
        if self._order.mode != self._mode or _settings() != self._settings:
            raise UnsupportedError(
                "loss_fn has changed the training mode of modules (model.eval()) or a setting of torch (sdpa_kernel, the default "
                f"dtype) while other micro-batches are in the middle: do that around accumulate_batches; or {REMEDY}"
            )
        self._check_buffers(batch)
        self._present_states = states = rng_states(devices=False)
        if self.has_losses:
            batch.random_states = states
            if batch.is_done and not _same(states, self._random_states):
                raise UnsupportedError(
                    f"the backward of a micro-batch has drawn random numbers, in another order than one after the other; {REMEDY}"
                )
        elif not _same(states, self._random_states):
            self._note_draws(batch, states)

    def _note_draws(self, batch: _MicroBatch, states: dict[str, Any]) -> None:
        """See [Note: random numbers]."""
        if not self._draws and not any(self._order.draws.values()):
            log.warning(
                "the forward of micro-batches draws random numbers (dropout): for the same ones, their forwards run one after the "
                "other, and each reads the parameters; without dropout they are read once for all. Backward reads them once"
            )
        self._draws = self._order.draws[self._mode] = True
        if not self._is_serial:
            set_rng_states(self._random_states)
            raise UnsupportedError(
                "micro-batches have drawn random numbers, and none did the last time in this mode, so they were run together and "
                "would draw in another order. Nothing was accumulated, and the generators are as before: call it again, and "
                "their forwards run one after the other"
            )
        self._random_states = states

    def _check_buffers(self, batch: _MicroBatch) -> None:
        """Raise UnsupportedError if a buffer was changed in another order than one after the other. [Note: buffers]"""
        for number, (name, buffer) in enumerate(self._buffers):
            if buffer._version == self._versions[number]:
                continue
            self._versions[number] = buffer._version
            if self._writers[number] > batch.index:
                raise UnsupportedError(
                    f"buffer {name} was changed by micro-batch {batch.index} after micro-batch {self._writers[number]}, because "
                    f"its module is called several times or recomputed (checkpointing): together they change it in another order; "
                    f"{REMEDY}"
                )
            self._writers[number] = batch.index

    def _begins_turn(self, batch: ModelCaller) -> None:
        assert isinstance(batch, _MicroBatch)
        if self.has_losses:
            states = batch.random_states or self._random_states
            if not _same(states, self._present_states):
                set_rng_states(states)
        if batch.suspended:
            self._hooks.resume(batch.suspended)


def _when_backward_begins(running: weakref.ref[AccumulationPass]) -> Hook:
    """Return a hook for a loss. A graph may outlive the pass."""

    def hook(_: torch.Tensor) -> None:
        if (alive := running()) is not None:
            alive.backward_begins()

    return hook


def _settings() -> tuple[Any, ...]:
    """Return settings of torch that are the process's, and that bits depend on."""
    return (
        torch.get_default_dtype(), torch.get_num_threads(), torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled, torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
    )  # fmt: skip


def _adds_to(batch: _MicroBatch, parameter: int) -> bool:
    """Return True if a micro-batch may still add its gradient of the parameter."""
    return not batch.is_done and (batch.to_come is None or parameter in batch.to_come)


def _same(states: dict[str, Any], others: dict[str, Any]) -> bool:
    return all(
        torch.equal(state, others[name]) if isinstance(state, torch.Tensor) else state == others.get(name)
        for name, state in states.items()
    )


def forget_failed_backward() -> None:
    """Run an empty backward: autograd's engine keeps the rest of a failed one in this thread's queue until the next one."""
    if backward_task() == -1:
        with outside_transforms(), torch.inference_mode(False), torch.enable_grad():
            torch.zeros((), device="cpu", requires_grad=True).backward()

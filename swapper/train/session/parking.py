"""Parks a manager: returns the memory of its session for a while, and opens the session again from its files.

What memory has and the files do not is written first, and committed if the run commits. Then the session closes as in a
relayout (relayout.py): pool, windows, page-locked memory, device memory and engines are released. Parameters
stay the same objects, with shape and dtype and without data, and refuse every access. Afterwards the session is opened
on the same files: resident sections are read at once, pages at their next use. The directory, its lock and its last
commit are untouched meanwhile, so a process that is killed while it is parked resumes from the last step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import nn

from swapper.capabilities import Feature, check
from swapper.errors import StateError
from swapper.modules.cold import leave_cold, set_cold, unguard
from swapper.modules.guarded import FaultHandler, guard
from swapper.runtime.free_memory import return_free_memory
from swapper.runtime.interrupts import defer_signals
from swapper.tensors.torch_private import without_torch_functions
from swapper.train.planning.plan import Plan
from swapper.train.session.origin import Origin
from swapper.train.session.relayout import check_between_steps
from swapper.train.session.session_slot import SessionSlot
from swapper.train.session.training_session import TrainingSession
from swapper.train.state.optim import StateOwner

VERB = "manager.parked"
REMEDY = "park between two steps"
PARKED = "the manager is parked: do this after `with manager.parked():`"
REOPEN = "close it, and resume from the last commit (resume='auto') or a snapshot"
OLD_GRAPH = "this graph was made before manager.parked(), which released what it refers to: run the forward again"


class ParkedParameters(FaultHandler):
    """Refuses all accesses to the parameters of a parked model.

    Args:
        parameters: by name; they have no data.
    """

    answers = False
    advice = PARKED + ", or take a copy of it before"

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters}
        for _, parameter in parameters:
            parameter.data = _without_data(parameter)
            guard(parameter, self)
            set_cold(parameter)

    def release(self) -> None:
        """Return the parameters to the session that adopts them."""
        for _, parameter in self._parameters:
            unguard(parameter)

    def leave(self) -> None:
        """Leave the parameters as those of a closed manager."""
        for _, parameter in self._parameters:
            leave_cold(parameter)

    def fault_in(self, parameter: nn.Parameter) -> NoReturn:
        raise StateError(f"parameter {self.describe(parameter)} has no data now: {self.advice}")

    def read(self, parameters: Sequence[nn.Parameter], function: Any, run: Any) -> NoReturn:
        self.fault_in(parameters[0])

    write, whole, detached = read, fault_in, fault_in

    def in_part(self, parameter: nn.Parameter, *_: Any) -> NoReturn:
        self.fault_in(parameter)

    def describe(self, parameter: nn.Parameter) -> str:
        return self._names[id(parameter)]


class _ParkedState:
    """The state of a parked model's optimizers: refuses all accesses."""

    def __getattr__(self, name: str) -> NoReturn:
        raise StateError(f"the optimizer's state was accessed: {PARKED}")


@contextmanager
def parked(current: SessionSlot) -> Iterator[None]:
    """See SwapManager.parked."""
    old: tuple[Plan, Origin, ParkedParameters] | None = None
    with current.clock.leave_out():
        try:
            with current.turns.turn(), defer_signals:
                old = _park(current)
            yield
        finally:
            if old is not None:
                with current.turns.turn(), defer_signals:
                    _unpark(current, *old)


def _park(current: SessionSlot) -> tuple[Plan, Origin, ParkedParameters]:
    current.check()
    run = current.running(VERB)
    _check(current, run)
    _write(run, current.clock.counters.step)
    device = None if run.on_device is None else run.on_device.device
    names = [entry for group in run.plan.inventory.groups for entry in group.parameters]
    plan, origin = run.plan, run.to_reopen()
    del run  # or its memory would stay
    try:
        current.detach(VERB, OLD_GRAPH, cast("StateOwner", _ParkedState()))
    except BaseException as error:
        current.leave(f"the manager could not be parked ({error}): {REOPEN}")
        raise
    parameters = ParkedParameters(names)
    current.leave(PARKED, [parameter for _, parameter in names])
    if device is not None:
        device.release_cached()
    return_free_memory()
    return plan, origin, parameters


def _check(current: SessionSlot, run: TrainingSession) -> None:
    """Raise unless the session may be parked now. Changes nothing."""
    check({*run.plan.request.features, Feature.PARKED})
    current.check_between_steps(VERB)
    check_between_steps(run, VERB, REMEDY)
    if run.model.updates.has_begun_early:
        raise StateError(f"{VERB} before the optimizer.step() of a backward that has updated parameters: {REMEDY}")
    if run.publisher.is_publishing or run.committer.has_snapshot:
        raise StateError(f"{VERB} while a snapshot is being written: wait for it before, `ticket.wait()`")
    for name, parameter in run.model.named_given_parameters():
        if parameter.grad is not None:
            raise StateError(f"{VERB} with gradients ({name} has one): call optimizer.zero_grad() before")


def _write(run: TrainingSession, step: int) -> None:
    """Write what only memory has, and commit it if the run commits."""
    run.model.passes.abandon()
    run.committer.finish()
    if run.committer.committed != step:
        run.committer.write_all(step)
    run.pager.flush()
    run.committer.before_change_of_layout(VERB)
    run.publisher.raise_failure()


def _unpark(current: SessionSlot, plan: Plan, origin: Origin, parameters: ParkedParameters) -> None:
    if current.is_over:  # closed in the context, or another process's
        return
    parameters.release()
    try:
        current.open(plan, origin)
    except BaseException as error:
        parameters.leave()
        current.drop()
        current.leave(f"the manager could not take its memory back after manager.parked() ({error}): {REOPEN}")
        raise
    current.leave("")


def _without_data(parameter: nn.Parameter) -> torch.Tensor:
    """Return a tensor of the parameter's form whose storage is empty, so that code past the guard finds no memory."""
    with without_torch_functions():
        tensor = torch.empty_like(parameter.detach(), memory_format=torch.contiguous_format)
    tensor.untyped_storage().resize_(0)
    return tensor

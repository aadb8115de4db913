"""Begins forwards and backwards of an offloaded model, and forgets those that never ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import InitVar, dataclass
from typing import Any

import torch

from swapper.errors import DeviceError, StateError, UnsupportedError
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.runtime.stats import StepClock
from swapper.tensors.torch_private import backward_task, dispatch_modes, innermost_transform
from swapper.train.gradients.grads import Gradients
from swapper.train.groups.parameter_group import GroupParameters
from swapper.train.groups.session_guard import SessionGuard
from swapper.train.groups.train_device import TrainingDevice
from swapper.train.layout.inventory import Inventory
from swapper.train.passes.accumulation_pass import (
    REMEDY,
    AccumulationOrder,
    AccumulationPass,
    forget_failed_backward,
)
from swapper.train.passes.fault_handler import ParameterFaultHandler
from swapper.train.passes.gathering import LoadHooks, Masters
from swapper.train.passes.train_hooks import TrainingHooks
from swapper.train.state.conditions import check_not_averaged
from swapper.train.steps.executor import UpdateExecutor
from swapper.train.updates.sweep import Sweep


@dataclass(eq=False, repr=False)
class PassLifecycle:
    """Owns the hooks of one model, and installs them.

    Args:
        sweep: an abandoned pass drops its leases too.
        masters: follow what `load_state_dict` changes.
        order: of the gradients of micro-batches that run together.
        without_averaging: why DDP cannot average gradients: see `averaging_refused`; "" if it can.

    Attributes:
        hooks: of forwards and backwards.
    """

    _inventory: Inventory
    _groups: list[GroupParameters]
    _updates: UpdateExecutor
    _sweep: Sweep
    _pager: Pager
    _fault_handler: ParameterFaultHandler
    _session_guard: SessionGuard
    _clock: StepClock
    _on_device: TrainingDevice | None
    _gradients: Gradients
    _masters: InitVar[Masters]
    _order: AccumulationOrder
    _without_averaging: str

    def __post_init__(self, masters: Masters) -> None:
        guard, units = self._session_guard, self._inventory.units
        self.hooks = TrainingHooks(
            units, self._groups, self.enter_forward, self._drop_leases, self._clock.enter, self._updates, guard.turns,
            self._on_device,
        )  # fmt: skip
        self._load_hooks = LoadHooks(units, self._groups, guard.check_to_write, masters)

    def remove(self) -> None:
        self.hooks.remove()
        self._load_hooks.remove()
        self._order.remove()
        forget_failed_backward()

    @property
    def is_open(self) -> bool:
        """True while a forward or a backward holds leases."""
        return self.hooks.pass_is_open

    def abandon(self) -> None:
        """Forget a forward, a backward or a load_state_dict that never ended, and leases that an exception left without a holder.

        Raises:
            StateError: called by a loss_fn.
        """
        if self.hooks.is_batched:
            raise StateError("loss_fn called what must wait for the end of accumulate_batches, as a step or snapshot")
        self._abandon()
        kept = self._kept_accesses()
        has_more = self._pager.leased_pages > sum(len(access.pages) for access in kept)
        if has_more and self._on_device is None:  # copies to a device have leases, too
            for group in self._groups:
                group.forget_leases()
            self._drop_leases(kept)

    def _abandon(self) -> None:
        self._updates.pass_begins()
        self._load_hooks.forget()
        self.hooks.abandon_pass()

    def forget_leases(self) -> None:
        """Abandon the pass, and drop all leases of the pager and the device except pins, even if no pass is open."""
        self._abandon()
        self._drop_leases(self._kept_accesses())

    def _kept_accesses(self) -> list[Access]:
        return [access for group in self._groups for access in group.home.kept_accesses]

    def accumulate(self, loss_fn: Callable[[Any], torch.Tensor], batches: Sequence[Any]) -> list[torch.Tensor]:
        """See SwapManager.accumulate_batches. Failed backwards leave no gradients."""
        with self._session_guard.turns.turn():
            self.abandon()
            self._session_guard.check()
            if len(batches) < 2 or not any(group.paged for group in self._groups):
                return self._accumulate_one_by_one(loss_fn, batches)
            self._check_together()
            together = AccumulationPass(
                self.hooks, self._order, loss_fn, batches, lambda: self._fault_handler.changes_itself
            )
            self.hooks.share(together)
            self._order.running = together
            try:
                with self._updates.together(together.adds_to, together.make_room):
                    return together.run()
            except BaseException:
                self.hooks.abandon_batches()
                self.forget_leases()
                if together.has_losses:
                    for parameter in self._order.parameters:
                        parameter.grad = None
                raise
            finally:
                self._order.running = None
                self.hooks.share(None)

    def _accumulate_one_by_one(
        self, loss_fn: Callable[[Any], torch.Tensor], batches: Sequence[Any]
    ) -> list[torch.Tensor]:
        losses = []
        for number, batch in enumerate(batches, 1):
            with ExitStack() as stack:
                if number < len(batches):
                    stack.enter_context(self._updates.accumulating())
                loss = loss_fn(batch)
                loss.backward()
                losses.append(loss.detach())
        return losses

    def _check_together(self) -> None:
        """Raise UnsupportedError unless micro-batches can run together."""
        for is_so, why in (
            (self._on_device is not None, "a model on an accelerator, whose backwards run in one thread of autograd's"),
            (self._fault_handler.changes_itself, "forwards that change parameters, as Embedding(max_norm=...) does"),
            (_has_modes(), "the modes and transforms that are active here (torch.func, TorchDispatchMode)"),
        ):
            if is_so:
                raise UnsupportedError(f"accumulate_batches does not go with {why}; {REMEDY}")

    def enter_forward(self) -> None:
        """Begin a forward. Raises if the manager cannot be used."""
        if backward_task() != -1:  # a backward, or a forward within one
            self._updates.finish(in_order=True)
            self._session_guard.check()
            return
        self._updates.pass_begins()
        self._sweep.pass_begins()
        if self._fault_handler.changes_itself:
            self._session_guard.check_to_write()
        self._session_guard.check()
        if self._without_averaging:
            check_not_averaged(self._inventory.names, self._without_averaging)
        self._inventory.check_files()
        self._gradients.entered()
        if self._on_device is not None and not self.is_open:
            self._on_device.pass_begins()

    def _drop_leases(self, kept: Iterable[Access]) -> None:
        """Drop all leases but `kept`, after waiting for copies that use them. What a sweep has updated is changed."""
        with contextlib.suppress(DeviceError):
            try:
                self._sweep.drain()
            finally:
                self._sweep.give_back()  # its last slice may be of a group that is done, which nobody undoes
        if self._on_device is not None:
            self._on_device.finish()
            self._on_device.forget_uses()
        self._pager.drop_leases(kept)


def _has_modes() -> bool:
    """Return True if modes are active that other threads would not have."""
    return innermost_transform() is not None or dispatch_modes() > 0

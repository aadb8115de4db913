"""Begins forwards and backwards of an offloaded model, and forgets those that never ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from swapper.errors import DeviceError
from swapper.modules.own_hook import outside_transforms
from swapper.paging.pager import Pager
from swapper.paging.planning.schedule import Access
from swapper.runtime.stats import StepClock
from swapper.train.device.train_device import TrainingDevice
from swapper.train.gradients.grads import Gradients
from swapper.train.layout.inventory import Inventory
from swapper.train.parameters.fault_handler import ParameterFaultHandler
from swapper.train.parameters.gathering import Followers, LoadHooks
from swapper.train.parameters.parameter_group import GroupParameters
from swapper.train.parameters.train_hooks import TrainingHooks
from swapper.train.session.session_slot import SessionGuard
from swapper.train.updates.at_step import Updates
from swapper.train.updates.sweep import Sweep


class PassLifecycle:
    """Owns the hooks of one model, and installs them.

    Args:
        sweep: an abandoned pass drops its leases too.
        masters: follow what `load_state_dict` changes.
    """

    def __init__(
        self,
        inventory: Inventory,
        groups: list[GroupParameters],
        updates: Updates,
        sweep: Sweep,
        pager: Pager,
        fault_handler: ParameterFaultHandler,
        session_guard: SessionGuard,
        clock: StepClock,
        on_device: TrainingDevice | None,
        gradients: Gradients,
        masters: Followers,
    ) -> None:
        self._inventory = inventory
        self._groups = groups
        self._updates = updates
        self._sweep = sweep
        self._pager = pager
        self._fault_handler = fault_handler
        self._session_guard = session_guard
        self._on_device = on_device
        self._gradients = gradients
        self._hooks = fault_handler.hooks = TrainingHooks(
            inventory.units, groups, self.enter_forward, self._drop_leases, clock.enter, updates, session_guard.turns, on_device
        )  # fmt: skip
        self._load_hooks = LoadHooks(inventory.units, groups, session_guard.check_to_write, masters)

    def remove(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()
        self._load_hooks.remove()
        _forget_failed_backward()

    @property
    def is_open(self) -> bool:
        """True while a forward or a backward holds leases."""
        return self._hooks.pass_is_open

    def abandon(self) -> None:
        """Forget a forward, a backward or a load_state_dict that never ended."""
        self._updates.pass_begins()
        self._load_hooks.forget()
        self._hooks.abandon_pass()

    def forget_leases(self) -> None:
        """Abandon the pass, and drop all leases of the pager and the device except pins, even if no pass is open."""
        self.abandon()
        self._drop_leases([access for group in self._groups for access in group.kept_accesses])

    def enter_forward(self) -> None:
        """Begin a forward. Raises if the manager cannot be used."""
        if torch._C._current_graph_task_id() != -1:  # a backward, or a forward within one
            self._updates.finish(in_order=True)
            self._session_guard.check()
            return
        self._updates.pass_begins()
        if self._fault_handler.changes_itself:
            self._session_guard.check_to_write()
        self._session_guard.check()
        self._inventory.check_files()
        self._gradients.entered()
        if self._on_device is not None and not self.is_open:
            self._on_device.pass_begins()

    def _drop_leases(self, kept: Iterable[Access]) -> None:
        """Drop all leases but `kept`, after waiting for copies that use them."""
        with contextlib.suppress(DeviceError):
            self._sweep.settle()
        if self._on_device is not None:
            self._on_device.finish()
            self._on_device.forget_uses()
        self._pager.drop_leases(kept)


def _forget_failed_backward() -> None:
    """Run an empty backward: autograd's engine keeps the rest of a failed one in its queue until the next one."""
    if torch._C._current_graph_task_id() == -1:
        with outside_transforms(), torch.inference_mode(False), torch.enable_grad():
            torch.zeros((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]

"""Forwards, backwards and load_state_dicts of an offloaded model: what one begins with, and how one that never ended is forgotten.

What they lease, and when that ends, is for the hooks (hooks.py, loading.py), which are put in when gradients have their places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch

from swapper.errors import DeviceError
from swapper.modules.groups import Unit
from swapper.modules.own_hook import outside_transforms
from swapper.paging.pager import Pager
from swapper.paging.planning.schedule import Access
from swapper.runtime.stats import StepClock
from swapper.train.device.train_device import TrainingDevice
from swapper.train.gradients.grads import Gradients
from swapper.train.parameters.fault_handler import ParameterFaultHandler
from swapper.train.parameters.parameter_group import GroupParameters
from swapper.train.parameters.state_loading import LoadHooks
from swapper.train.parameters.train_hooks import TrainingHooks
from swapper.train.session.session_guard import SessionGuard
from swapper.train.updates.at_step import Updates
from swapper.train.updates.sweep import Sweep


class PassLifecycle:
    """Owns the hooks of one model.

    Args:
        groups: all groups, by index; they may come later.
        updates: told what passes do.
        sweep: its leases go with those of a pass that is abandoned.
        pager: what leases go to.
        fault_handler: brings parameters in for the forward that runs.
        session_guard: where the user comes in.
        clock: told what phase of a step begins.
        on_device: where forwards and backwards run on an accelerator.
        check_files: raises where files that parameters are read from were changed.
    """

    _hooks: TrainingHooks | None = None
    _load_hooks: LoadHooks | None = None

    def __init__(
        self,
        groups: list[GroupParameters],
        updates: Updates,
        sweep: Sweep,
        pager: Pager,
        fault_handler: ParameterFaultHandler,
        session_guard: SessionGuard,
        clock: StepClock,
        on_device: TrainingDevice | None,
        check_files: Callable[[], None],
    ) -> None:
        self._groups = groups
        self._check_files = check_files
        self._updates = updates
        self._sweep = sweep
        self._pager = pager
        self._fault_handler = fault_handler
        self._session_guard = session_guard
        self._clock = clock
        self._on_device = on_device

    def start(
        self, units: Sequence[Unit], gradients: Gradients, loaded: Callable[[Iterable[GroupParameters]], None]
    ) -> None:
        """Put the hooks in.

        Args:
            units: the modules to hook.
            gradients: told when a forward begins.
            loaded: called with groups that were loaded into.
        """
        self._gradients = gradients
        self._hooks = TrainingHooks(
            units,
            self._groups,
            self.enter_forward,
            self._drop_leases,
            self._clock.enter,
            self._updates,
            self._session_guard.turns,
        )
        self._fault_handler.bring_in, self._fault_handler.follow = self._hooks.bring, self._hooks.follow
        if self._on_device is not None:
            self._hooks.check_inputs = self._on_device.check_inputs
        self._load_hooks = LoadHooks(units, self._groups, self._session_guard.check_to_write, loaded)

    def remove(self) -> None:
        """Take the hooks out."""
        if self._hooks is not None and self._load_hooks is not None:
            self._hooks.remove()
            self._load_hooks.remove()
            _forget_failed_backward()

    @property
    def is_open(self) -> bool:
        """Whether a forward or a backward has groups leased."""
        return self._hooks is not None and self._hooks.pass_is_open

    def abandon(self) -> None:
        """Forget a forward, a backward or a load_state_dict that never ended."""
        self._updates.pass_begins()
        if self._hooks is not None and self._load_hooks is not None:
            self._load_hooks.forget()
            self._hooks.abandon_pass()

    def forget_leases(self) -> None:
        """As `abandon`; and the pager and the device forget what was leased, whether a pass is open or not. Gathered ones stay."""
        self.abandon()
        self._drop_leases([access for group in self._groups for access in group.kept_accesses])

    def enter_forward(self) -> None:
        """A forward begins: raise if the manager cannot be used."""
        is_backward = torch._C._current_graph_task_id() != -1  # or a forward within one
        if is_backward:
            self._updates.finish(in_order=True)
        else:
            self._updates.pass_begins()
        if self._fault_handler.changes_itself and not is_backward:
            self._session_guard.check_to_write()
        self._session_guard.check()
        if not is_backward:
            self._check_files()
            self._gradients.entered()
        if self._on_device is not None and not is_backward and not self.is_open:
            self._on_device.pass_begins()

    def _drop_leases(self, kept: Iterable[Access]) -> None:
        """All leases of passes are gone, and so are those of copies, which are waited for."""
        with contextlib.suppress(DeviceError):
            self._sweep.settle()
        if self._on_device is not None:
            self._on_device.finish()
            self._on_device.forget_uses()
        self._pager.drop_leases(kept)


def _forget_failed_backward() -> None:
    """Have a backward of nothing: what is left of one that failed is in the queue of autograd's engine until the next."""
    if torch._C._current_graph_task_id() == -1:
        with outside_transforms(), torch.inference_mode(False), torch.enable_grad():
            torch.zeros((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]

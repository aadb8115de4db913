"""Begins forwards and backwards of an offloaded model, and forgets those that never ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from swapper.errors import DeviceError, StateError, UnsupportedError
from swapper.paging.schedule import Access
from swapper.tensors.torch_private import dispatch_modes, innermost_transform
from swapper.train.gradients.grads import Gradients
from swapper.train.passes.accumulation_pass import (
    REMEDY,
    AccumulationOrder,
    AccumulationPass,
    forget_failed_backward,
)
from swapper.train.passes.gathering import LoadHooks, Masters
from swapper.train.passes.train_hooks import TrainingHooks
from swapper.train.session.placed_model import PlacedModel
from swapper.train.state.conditions import check_not_averaged
from swapper.train.steps.executor import UpdateExecutor


class PassLifecycle:
    """Owns the hooks of one model, and installs them. Answers what they ask of their owner: see PassOwner (train_hooks.py).

    Args:
        placed: the model at its locations.
        masters: follow what `load_state_dict` changes.
        order: of the gradients of micro-batches that run together.
        without_averaging: why DDP cannot average gradients: see `averaging_refused`; "" if it can.

    Attributes:
        hooks: of forwards and backwards.
    """

    def __init__(
        self,
        placed: PlacedModel,
        updates: UpdateExecutor,
        gradients: Gradients,
        masters: Masters,
        order: AccumulationOrder,
        without_averaging: str,
    ) -> None:
        self.clock = placed.events.clock
        self._inventory = placed.plan.inventory
        self._names = self._inventory.names
        self._groups = placed.groups
        self._updates = updates
        self._pager = placed.pager
        self._fault_handler = placed.fault_handler
        self._guard = placed.guard
        self._processor = placed.processor
        self._gradients = gradients
        self._order = order
        self._without_averaging = without_averaging
        units = self._inventory.units
        self.hooks = TrainingHooks(units, placed.groups, self, updates, placed.guard, placed.processor)
        self._load_hooks = LoadHooks(units, placed.groups, placed.guard, masters)

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
        leased = self._pager.leased_pages
        if not leased or self._processor.is_device:  # copies to a device have leases, too
            return
        kept = self._kept_accesses()
        if leased > sum(len(access.pages) for access in kept):
            for group in self._groups:
                group.forget_leases()
            self.drop_leases(kept)

    def _abandon(self) -> None:
        self._updates.pass_begins()
        self._load_hooks.forget()
        self.hooks.abandon_pass()

    def forget_leases(self) -> None:
        """Abandon the pass, and drop all leases of the pager and the device except pins, even if no pass is open."""
        self._abandon()
        self.drop_leases(self._kept_accesses())

    def _kept_accesses(self) -> list[Access]:
        return [access for group in self._groups for access in group.home.kept_accesses]

    def accumulate(self, loss_fn: Callable[[Any], torch.Tensor], batches: Sequence[Any]) -> list[torch.Tensor]:
        """See SwapManager.accumulate_batches. Failed backwards leave no gradients."""
        with self._guard.turns.turn():
            self.abandon()
            self._guard.events.check()
            if len(batches) < 2 or not any(group.paged for group in self._groups):
                return self._accumulate_one_by_one(loss_fn, batches)
            self._check_together()
            together = AccumulationPass(self.hooks, self._order, loss_fn, batches, self._fault_handler)
            self.hooks.share(together)
            try:
                with self._order.of(together), self._updates.together(together):
                    return together.run()
            except BaseException:
                self.hooks.abandon_batches()
                self.forget_leases()
                if together.has_losses:
                    for parameter in self._order.parameters:
                        parameter.grad = None
                raise
            finally:
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
            (self._processor.is_device, "a model on an accelerator, whose backwards run in one thread of autograd's"),
            (self._fault_handler.changes_itself, "forwards that change parameters, as Embedding(max_norm=...) does"),
            (_has_modes(), "the modes and transforms that are active here (torch.func, TorchDispatchMode)"),
        ):
            if is_so:
                raise UnsupportedError(f"accumulate_batches does not go with {why}; {REMEDY}")

    def enter_forward(self, is_outermost: bool = True) -> None:
        self._updates.forward_begins(is_outermost)
        if self._fault_handler.changes_itself:
            self._guard.events.check_to_write()
        self._guard.events.check()
        if not is_outermost:
            return
        if self._without_averaging:
            check_not_averaged(self._names, self._without_averaging)
        self._inventory.check_files()
        self._gradients.entered()
        if not self.is_open:
            self._processor.pass_begins()

    def drop_leases(self, kept: Iterable[Access]) -> None:
        with contextlib.suppress(DeviceError):
            self._updates.drop_leases()
        self._processor.finish()
        self._processor.forget_uses()
        self._pager.drop_leases(kept)


def _has_modes() -> bool:
    """Return True if modes are active that other threads would not have."""
    return innermost_transform() is not None or dispatch_modes() > 0

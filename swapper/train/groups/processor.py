"""Runs a model's forwards and backwards: the CPU here, an accelerator in train_device.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import nn

from swapper.modules.groups import Group
from swapper.modules.home import GroupHome, HostHome
from swapper.paging.layout import Slot
from swapper.paging.pager import Pager
from swapper.paging.section import Section


class Processor:
    """Runs the kernels of one model's passes. Here: the CPU, which works on the pages themselves: nothing is copied.

    Attributes:
        is_device: it is an accelerator.
        alone: held by a hook, while no other thread of its backward may run one.
    """

    is_device: ClassVar[bool] = False
    alone: AbstractContextManager[object]

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self.alone = nullcontext()  # no lock: micro-batches hand over the turn within a hook

    def home(self, group: Group, places: Sequence[tuple[Section, Slot]]) -> tuple[GroupHome, list[torch.Tensor]]:
        """Return the home of a group whose parameters are at `places`, and a view of it for each."""
        pages = [page for section in dict.fromkeys(section for section, _ in places) for page in section.pages]
        return HostHome(self._pager, group.index, pages), [section.own_tensor(slot) for section, slot in places]

    def start(self) -> None:
        """Expect a forward and a backward, when all homes are made."""

    def move(self, model: nn.Module) -> None:
        """Move the model's buffers there."""

    # --- passes and steps ---------------------------------------------------------------------------------------------

    def pass_begins(self) -> None:
        """Note that a forward begins, outside of a backward."""

    def check_inputs(self, module: nn.Module, inputs: object) -> None:
        """Raise ConfigError if a forward gets tensors, and all of them are on other devices."""

    def before_update(self, group: int) -> None:
        """Invalidate copies of a group's parameters before these are updated in host memory."""

    def after_update(self) -> None:
        """Note that an optimizer's step was taken."""

    def sync_to_host(self) -> None:
        """Copy to host memory what was updated here since. Raises IoError, DeviceError."""

    def discard_changes(self, groups: Collection[int] | None = None) -> None:
        """Have copies of these groups, or all, be made again: host memory was restored."""

    # --- failures and closing -----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for all copies, also of failed passes. Copies from a failed device are lost."""

    def forget_uses(self) -> None:
        """Do not predict the next step from an abandoned pass."""

    def close(self) -> None:
        """End all copies, and give back what was moved."""

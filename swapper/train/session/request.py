"""What the user asks of `offload` and `plan`, checked: which model and optimizer, and where everything shall live."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from swapper.device.device import Device
from swapper.device.device_budget import DeviceBudget
from swapper.errors import ConfigError
from swapper.formats.naming import Rename
from swapper.io.tuning import Tuning
from swapper.modules.models import as_one
from swapper.options import PLACEMENTS, UPDATE_PLACES, UPDATERS, UPDATES, parse_choice
from swapper.train.layout.frozen import FrozenFiles
from swapper.train.layout.inventory import Inventory, take_inventory
from swapper.train.optimizer.conditions import check_update
from swapper.train.optimizer.optim import NoOptimizer
from swapper.train.session.plan import Plan, plan_run
from swapper.train.updates.adamw_kernel import AdamWKernel
from swapper.train.updates.update_rates import faster_place


@dataclass(frozen=True)
class Request:
    """The user's wishes. See `SwapManager` and `SwapManager.offload`.

    Attributes:
        model: one, or one that contains all.
        optimizer: the user's own, or one that has nothing to do.
        update: when parameters are updated.
        commit_policy: `commit_every`.
        weights: of the drives that hold the run.
        device: where forwards and backwards run, if not on the CPU, and of its memory.
        update_on: "cpu", or "device" where the optimizer's update is made there.
        kernel: what updates there in place of the optimizer, or None.
        frozen: files of the user's that have what is not trained, and keep it; or None.
    """

    model: nn.Module
    optimizer: Optimizer
    params: str
    optimizer_state: str
    gradients: str
    master_weights: torch.dtype | None
    update: str
    host_bytes: int
    commit_policy: str | int | None
    weights: tuple[float, ...] = (1.0,)
    device: DeviceBudget | None = None
    update_on: str = "cpu"
    kernel: AdamWKernel | None = None
    frozen: FrozenFiles | None = None

    @classmethod
    def parse(
        cls,
        model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
        optimizer: Optimizer | None,
        params: str,
        optimizer_state: str,
        gradients: str,
        master_weights: torch.dtype | None,
        update: str,
        host_bytes: int,
        commit_policy: str | int | None,
        weights: tuple[float, ...] = (1.0,),
        device: str | torch.device | Device = "cpu",
        device_memory: int | str = "auto",
        update_on: str = "cpu",
        update_with: str = "optimizer",
        stochastic_rounding: int | None = None,
        frozen_from: str | os.PathLike[str] | None = None,
        rename: Rename = None,
    ) -> Request:
        """Raises: ConfigError, DeviceError, UnsupportedError; CheckpointError, IoError: of `frozen_from`."""
        for option, value in (("params", params), ("optimizer_state", optimizer_state), ("gradients", gradients)):
            parse_choice(value, option, PLACEMENTS)
        parse_choice(update, "update", UPDATES)
        budget = DeviceBudget.parse(device, device_memory)
        if budget is None and params == "device":
            raise ConfigError("params='device' needs a device: say manager.offload(..., device='cuda')")
        whole, used = as_one(model), NoOptimizer() if optimizer is None else optimizer
        parse_choice(update_on, "update_on", UPDATE_PLACES)
        if update_on == "device" and budget is None:
            raise ConfigError("update_on='device' needs a device: say manager.offload(..., device='cuda')")
        kernel = _parse_updater(update_with, stochastic_rounding)
        if (
            ("device" in (gradients, optimizer_state) or kernel is not None)
            and update_on == "auto"
            and budget is not None
        ):
            update_on = "device"
        if update_on == "auto":
            update_on = "cpu" if budget is None else faster_place(used, budget.device)
        for option, value in (("optimizer_state", optimizer_state), ("gradients", gradients)):
            if value == "device" and update_on != "device":
                raise ConfigError(
                    f"{option}='device' goes with an update there: with update_on={update_on!r} it is needed in host memory. Say "
                    "update_on='device'"
                )
        if optimizer_state == "device" and update != "step":
            raise ConfigError(
                f"optimizer_state='device' goes with update='step': with update={update!r} groups are of two steps at times, and "
                "one that fails is put back to what its place has. Say update='step', or optimizer_state='auto'"
            )
        if kernel is not None and (budget is None or update_on != "device"):
            raise ConfigError("update_with='kernel' updates on a device: say device='cuda', update_on='device' with it")
        if kernel is not None and budget is not None:
            kernel.check(used, master_weights, budget.device.device)
        places = params, optimizer_state, gradients
        return cls(
            whole, used, *places, master_weights, update, host_bytes, commit_policy, weights, budget, update_on, kernel,
            FrozenFiles.parse(frozen_from, rename),
        )  # fmt: skip

    @property
    def kind(self) -> str:
        """The optimizer's class."""
        return f"{type(self.optimizer).__module__}.{type(self.optimizer).__qualname__}"

    def inventory(self, may_be_meta: bool = False, before: Inventory | None = None) -> Inventory:
        """List what there is. See `take_inventory`."""
        where = None if self.device is None else self.device.device.device
        found = take_inventory(self.model, self.optimizer, self.master_weights, may_be_meta, before, where, self.frozen)
        if self.kernel is not None:
            parameters = [entry for group in found.groups for entry in group.parameters]
            self.kernel.check_parameters({name: p.dtype for name, p in parameters if name in found.forms})
        check_update(self.update, self.model, found.forms.values(), type(self.optimizer).__name__)
        return found

    def plan(
        self,
        inventory: Inventory,
        places: tuple[str, str] | None = None,
        tuning: Tuning | None = None,
        page_bytes: int | None = None,
        existing_files: Collection[int] = (),
    ) -> Plan:
        """Decide what lives where. See `plan_run`.

        Args:
            places: of parameters and optimizer state, where they are not as the user wants them to be.
        """
        params, optimizer_state = places or (self.params, self.optimizer_state)
        optimizer_state = "nvme" if optimizer_state == "device" else optimizer_state  # its place beside that
        plan = plan_run(
            inventory, params, optimizer_state, self.gradients, self.host_bytes, self.commit_policy, tuning,
            self.update, page_bytes, existing_files, self.weights, self.device,
            sum(buffer.nbytes for buffer in self.model.buffers()), self.update_on,
            self.optimizer_state,
        )  # fmt: skip
        return replace(plan, kernel=self.kernel)


def _parse_updater(update_with: str, stochastic_rounding: int | None) -> AdamWKernel | None:
    parse_choice(update_with, "update_with", UPDATERS)
    if update_with == "kernel":
        return AdamWKernel(stochastic_rounding)
    if stochastic_rounding is not None:
        raise ConfigError("stochastic_rounding goes with update_with='kernel': torch's optimizers round to nearest")
    return None

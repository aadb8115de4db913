"""Checks the user's model, optimizer and options, as given to the manager, to `offload` and to `plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from swapper.device.device import Device
from swapper.device.device_placement import DeviceBudget
from swapper.device.kernels.compiler import ACCELERATORS, kernel, uses_kernel
from swapper.errors import ConfigError, StateError, UnsupportedError
from swapper.io.drives import Drives
from swapper.modules.groups import as_one
from swapper.options import PLACEMENTS, UPDATES, Accelerator, ExternalWeights, parse_choice
from swapper.train.layout.frozen import FrozenFiles
from swapper.train.layout.inventory import Inventory, take_inventory
from swapper.train.layout.state_codecs import MASTER, StateCodecs
from swapper.train.optimizer.optimizer_set import OptimizerSet, members_of_given
from swapper.train.passes.given_model import GivenModel
from swapper.train.planning.update_times import faster_place
from swapper.train.sharded.sharded_model import ShardedModel
from swapper.train.sharded.shards import is_sharded
from swapper.train.state.conditions import check_update
from swapper.train.state.optim import NoOptimizer
from swapper.train.updates.adamw_kernel import AdamWKernel


@dataclass(frozen=True, kw_only=True)
class ManagerOptions:
    """The options of a manager. See `SwapManager`.

    Attributes:
        commit_every: "free", a number of steps, or None.
        fsync: commits survive a power loss.
        check_reads: reads from swap files are compared with checksums.
        operates: operations on cold parameters are done; else they are refused.
        stall_s: seconds of one wait until the watchdog logs a dump; None: it never does.
    """

    host_bytes: int
    commit_every: str | int | None
    fsync: bool
    drives: Drives
    backend: str
    check_reads: bool
    operates: bool
    stall_s: float | None


@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """The keywords of `SwapManager.offload` and `SwapManager.plan`.

    Raises:
        ConfigError: a choice is not known.
    """

    params: str = "auto"
    optimizer_state: str = "auto"
    gradients: str = "auto"
    master_weights: torch.dtype | None = None
    update: str = "step"
    device: str | torch.device | Device = "cpu"
    device_memory: int | str = "auto"
    accelerator: Accelerator | None = None
    external: ExternalWeights | None = None
    state_codec: str | Mapping[str, str] = "exact"

    def __post_init__(self) -> None:
        for option in ("params", "optimizer_state", "gradients"):
            parse_choice(getattr(self, option), option, PLACEMENTS)
        parse_choice(self.update, "update", UPDATES)
        _ = self.state_codecs
        for option, kind, example in (("accelerator", Accelerator, "..."), ("external", ExternalWeights, "path=...")):
            value = getattr(self, option)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{option}={value!r} is not known: say {option}=swapper.{kind.__name__}({example})")

    @property
    def state_codecs(self) -> StateCodecs:
        return StateCodecs.parse(self.state_codec, self.master_weights)

    def check_none_given(self) -> None:
        """Raise ConfigError if any is given in addition to a plan."""
        given = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        if given:
            raise ConfigError(
                f"{', '.join(given)} with a plan: what was planned is what is done. Give the plan alone, or plan again with "
                f"manager.plan(..., {given[0]}=...)"
            )


@dataclass(frozen=True)
class Request:
    """The checked arguments of `offload` or `plan`.

    Attributes:
        given: the user's model, or several, and the optimizer, a list, or an object with several.
        given_optimizers: the user's own, or a NoOptimizer.
        model: what of it is paged.
        device: the accelerator of forwards and backwards, and its budget; None: the CPU.
        updates_there: so are updates.
        kernel: updates there instead of the optimizer, or None.
        frozen: the user's files of frozen parameters, or None.
    """

    given: tuple[Any, Any]
    given_optimizers: tuple[Optimizer, ...]
    model: GivenModel
    optimizers: OptimizerSet
    options: OffloadOptions
    manager: ManagerOptions
    device: DeviceBudget | None
    updates_there: bool
    kernel: AdamWKernel | None
    frozen: FrozenFiles | None

    @classmethod
    def of(
        cls,
        model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
        optimizer: Any,
        options: OffloadOptions,
        manager: ManagerOptions,
    ) -> Request:
        """Check the arguments, and open the named files.

        Raises:
            ConfigError: options do not go together.
            DeviceError: there is no such device.
            UnsupportedError: `model` is no model, or several optimizers cannot have an option.
            CheckpointError: what `external` names is no checkpoint, or damaged.
            IoError: it cannot be read.
        """
        device = DeviceBudget.parse(options.device, options.device_memory)
        given = [NoOptimizer()] if optimizer is None else members_of_given(optimizer)
        accelerator = options.accelerator or Accelerator()
        if len(given) > 1:
            _check_several(options, accelerator, is_sharded(model))
        if is_sharded(model):
            _check_sharded(options, device)
        of = (ShardedModel if is_sharded(model) else GivenModel)(as_one(model))
        used = of.optimizers_of(given)
        if options.state_codecs.of_key:
            of.check_rows(options.state_codecs.said)
        updates_there = _check_accelerator(options, accelerator, device, used)
        if device is not None and options.state_codecs.of_key and updates_there:
            _check_codecs_there(options, accelerator, device.device.device)
        kernel = None
        if accelerator.update_with == "kernel":
            if device is None or not updates_there:
                raise ConfigError(
                    "update_with='kernel' updates on a device: say device='cuda', accelerator=swapper.Accelerator("
                    "update_on='device', update_with='kernel')"
                )
            kernel = AdamWKernel(accelerator.stochastic_rounding)
            kernel.check(used[0], options.master_weights, device.device.device)
        frozen = None if options.external is None else FrozenFiles.of(options.external)
        return cls(
            (model, optimizer), tuple(given), of, OptimizerSet(used), options, manager, device, updates_there, kernel, frozen
        )  # fmt: skip

    def check_is_for(self, model: Any, optimizer: Any, manager: ManagerOptions) -> None:
        """Raise StateError unless the plan was made for these."""
        if self.manager is not manager:
            raise StateError(
                f"the plan is of the manager of {self.manager.drives.directories[0]}, and this one has "
                f"{manager.drives.directories[0]}: plan with the manager that offloads"
            )
        for what, planned, given in zip(("model", "optimizer"), self.given, (model, optimizer), strict=True):
            if planned is not given and not (isinstance(planned, dict | list | tuple) and planned == given):
                raise StateError(
                    f"the plan is for another {what} ({type(planned).__name__}) than the one that is given "
                    f"({type(given).__name__}): give what was planned, or plan again"
                )

    def inventory(self, may_be_meta: bool = False, before: Inventory | None = None) -> Inventory:
        """List the contents of the model and the optimizers. See `take_inventory`."""
        where = self.model.device if self.device is None else self.device.device.device
        masters = self.options.master_weights
        codecs = self.options.state_codecs
        found = take_inventory(self.model, self.optimizers, masters, may_be_meta, before, where, self.frozen, codecs)
        if before is None:
            codecs.warn_of_stalls(group for member in self.optimizers.members for group in member.param_groups)
        if self.kernel is not None:
            parameters = [entry for group in found.groups for entry in group.parameters]
            self.kernel.check_parameters({name: p.dtype for name, p in parameters if name in found.forms})
        self.model.check_optimizer(found.forms.values(), self.optimizers.name)
        check_update(self.options.update, self.model.module, found.forms.values(), self.optimizers.name)
        return found


def _check_several(options: OffloadOptions, accelerator: Accelerator, is_sharded: bool) -> None:
    """Raise UnsupportedError for options that several optimizers do not support."""
    asked = {
        "a model that fully_shard has sharded": is_sharded,
        "update_with='kernel'": accelerator.update_with == "kernel",
    }
    for option in (option for option, is_asked in asked.items() if is_asked):
        raise UnsupportedError(
            f"{option} does not go with several optimizers: have one optimizer, with param_groups"
            + ("" if is_sharded else ", or leave the option out")
        )


def _check_sharded(options: OffloadOptions, device: DeviceBudget | None) -> None:
    """Raise UnsupportedError for options that a model sharded by fully_shard does not support yet."""
    asked = {
        "device": device is not None,
        "accelerator": options.accelerator is not None,
        "master_weights": options.master_weights is not None,
    }
    for option in (option for option, is_asked in asked.items() if is_asked):
        raise UnsupportedError(
            f"{option} does not go with a model that fully_shard has sharded: leave it out. (It computes where its mesh is, and is "
            "updated on the CPU; with a mixed-precision policy the shards are the fp32 masters.)"
        )


def _check_codecs_there(options: OffloadOptions, accelerator: Accelerator, device: torch.device) -> None:
    """Raise UnsupportedError or ConfigError if encoded state cannot be updated on the device."""
    said = options.state_codecs.said
    if uses_kernel(device):
        kernel("codecs")
    elif device.type != "cpu":
        raise UnsupportedError(
            f"{said}: state is decoded on {' and '.join(ACCELERATORS)}, not on {device.type}: say "
            "swapper.Accelerator(update_on='cpu')"
        )
    if MASTER in options.state_codecs.of_key and accelerator.stochastic_rounding is not None:
        raise ConfigError(
            f"{said} stores masters as what is missing to parameters that are rounded to nearest: leave stochastic_rounding out, "
            f"or keep the masters exact, state_codec={{{MASTER!r}: 'exact', ...}}"
        )


def _numel(optimizer: Optimizer) -> int:
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])


def _check_accelerator(
    options: OffloadOptions, accelerator: Accelerator, device: DeviceBudget | None, optimizers: Sequence[Optimizer]
) -> bool:
    """Return True if updates run on the device. Raises ConfigError if options do not go together."""
    update_on = accelerator.update_on
    if device is None:
        for option, value in (("params", options.params), ("update_on", update_on)):
            if value == "device":
                raise ConfigError(f"{option}='device' needs a device: say manager.offload(..., device='cuda')")
    elif update_on == "auto":
        wants = "device" in (options.gradients, options.optimizer_state) or accelerator.update_with == "kernel"
        update_on = "device" if wants else faster_place(max(optimizers, key=_numel), device.device)
    for option in ("optimizer_state", "gradients"):
        if getattr(options, option) == "device" and update_on != "device":
            raise ConfigError(
                f"{option}='device' goes with an update there: with update_on={accelerator.update_on!r} it is needed in host "
                "memory. Say accelerator=swapper.Accelerator(update_on='device')"
            )
    if options.optimizer_state == "device" and options.update != "step":
        raise ConfigError(
            f"optimizer_state='device' goes with update='step': with update={options.update!r} groups are of two steps at times, "
            "and one that fails is put back to what its place has. Say update='step', or optimizer_state='auto'"
        )
    return update_on == "device"

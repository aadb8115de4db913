"""Checks the user's model, optimizer and options, as given to the manager, to `offload` and to `plan`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from swapper.capabilities import Feature, check
from swapper.device.device import Device, open_device
from swapper.device.kernels import ACCELERATORS, kernel, uses_kernel
from swapper.device.model_device import DeviceBudget
from swapper.errors import ConfigError, DeviceError, StateError, UnsupportedError
from swapper.io.drives import Drives
from swapper.modules.groups import as_one
from swapper.options import PLACEMENTS, UPDATES, Accelerator, ExternalWeights, parse_choice
from swapper.tensors.torch_private import is_sharded
from swapper.train.layout.given_values import FrozenFiles
from swapper.train.layout.inventory import Inventory, take_inventory
from swapper.train.layout.state_codecs import MASTER, StateCodecs
from swapper.train.optimizer.optimizer_set import OptimizerSet, members_of_given
from swapper.train.passes.given_model import GivenModel
from swapper.train.planning.update_place import check_updates_there, faster_place
from swapper.train.sharded.sharded_model import ShardedModel
from swapper.train.sharded.shards import device_of
from swapper.train.state.conditions import check_averaging, check_update
from swapper.train.state.optim import NoOptimizer
from swapper.train.updates.one_pass import AdamWKernel

log = logging.getLogger("swapper")


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
        device: the accelerator of forwards and backwards, and its budget; None: the CPU. Of a sharded model: of updates.
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
            DeviceError: there is no such device, or a sharded model computes on another one.
            UnsupportedError: `model` is no model, or several optimizers cannot have an option.
            CheckpointError: what `external` names is no checkpoint, or damaged.
            IoError: it cannot be read.
        """
        accelerator = options.accelerator or Accelerator()
        device = _device_of(model, options, accelerator)
        given = [NoOptimizer()] if optimizer is None else members_of_given(optimizer)
        check(_asked(options, device, several=len(given) > 1, sharded=is_sharded(model)))
        of = (ShardedModel if is_sharded(model) else GivenModel)(as_one(model))
        used = of.optimizers_of(given)
        if options.state_codecs.of_key:
            of.check_rows(options.state_codecs.said)
        updates_there = device is not None and _updates_there(options, accelerator, device.device, used)
        if of.is_sharded and not updates_there:
            device = None  # FSDP2 has it
        kernel = None
        if accelerator.update_with == "kernel" and device is not None:
            kernel = AdamWKernel(accelerator.stochastic_rounding)
            kernel.check(used[0], options.master_weights, device.device.device)
        frozen = None if options.external is None else FrozenFiles.of(options.external)
        return cls(
            (model, optimizer), tuple(given), of, OptimizerSet(used), options, manager, device, updates_there, kernel, frozen
        )  # fmt: skip

    @property
    def features(self) -> frozenset[Feature]:
        """What was asked for, of the table in capabilities.py."""
        return _asked(self.options, self.device, len(self.given_optimizers) > 1, self.model.is_sharded)

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

    def inventory(
        self, may_be_meta: bool = False, before: Inventory | None = None, trained_before: Collection[str] | None = None
    ) -> Inventory:
        """List the contents of the model and the optimizers. See `take_inventory`."""
        where = self.model.device if self.device is None else self.device.device.device
        masters = self.options.master_weights
        codecs = self.options.state_codecs
        found = take_inventory(
            self.model, self.optimizers, masters, may_be_meta, before, where, self.frozen, codecs, trained_before
        )
        if before is None:
            codecs.warn_of_stalls(group for member in self.optimizers.members for group in member.param_groups)
        if self.kernel is not None:
            parameters = [entry for group in found.groups for entry in group.parameters]
            self.kernel.check_parameters({name: p.dtype for name, p in parameters if name in found.forms})
        self.model.check_optimizer(found.forms.values(), self.optimizers.name)
        check_update(self.options.update, found.forms.values(), self.optimizers.name)
        leave = self.options.gradients == "nvme" and self.device is None  # what leaves a device is known later
        check_averaging(self.model.given, self.options.update, leave)
        return found


def _device_of(model: Any, options: OffloadOptions, accelerator: Accelerator) -> DeviceBudget | None:
    """Return the device of the options, or of a sharded model's mesh, if updates may run there, and its budget.

    Raises:
        ConfigError, DeviceError: see `Request.of`.
    """
    device: str | torch.device | Device = options.device
    if is_sharded(model):
        given, where = open_device(device), device_of(model)
        if given is not None and given.device != where:
            raise DeviceError(f"device={str(device)!r}, and fully_shard's mesh computes on {where}: leave device= out")
        if given is None and accelerator.update_on != "cpu":
            device = where
    return DeviceBudget.parse(device, options.device_memory)


def _asked(options: OffloadOptions, device: DeviceBudget | None, several: bool, sharded: bool) -> frozenset[Feature]:
    """Return the features that these options ask for, of one or `several` optimizers and a whole or `sharded` model."""
    accelerator = options.accelerator or Accelerator()
    wants_there = accelerator.update_on == "device" or (accelerator.update_on != "cpu" and device is not None)
    asked = {
        Feature.DEVICE: device is not None,
        Feature.PARAMS_ON_DEVICE: options.params == "device",
        Feature.STATE_ON_DEVICE: options.optimizer_state == "device",
        Feature.GRADIENTS_ON_DEVICE: options.gradients == "device",
        Feature.UPDATE_ON_DEVICE: wants_there,
        Feature.KERNEL: accelerator.update_with == "kernel",
        Feature.STOCHASTIC_ROUNDING: accelerator.stochastic_rounding is not None,
        Feature.ENCODED_MASTERS: MASTER in options.state_codecs.of_key,
        Feature.MASTERS: options.master_weights is not None,
        Feature.IN_FORWARD: options.update == "deferred",
        Feature.IN_BACKWARD: options.update == "backward",
        Feature.SEVERAL: several,
        Feature.SHARDED: sharded,
    }
    return frozenset(feature for feature, is_so in asked.items() if is_so)


def _check_codecs_there(options: OffloadOptions, there: Device) -> None:
    """Raise UnsupportedError if encoded state cannot be updated on the device."""
    said, device = options.state_codecs.said, there.device
    if not options.state_codecs.of_key:
        return
    if uses_kernel(device):
        kernel("codecs")
    elif there.is_there and device.type != "cpu":
        raise UnsupportedError(
            f"{said}: state is decoded on {' and '.join(ACCELERATORS)}, not on {device.type}: say "
            "swapper.Accelerator(update_on='cpu')"
        )


def _numel(optimizer: Optimizer) -> int:
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])


def _updates_there(
    options: OffloadOptions, accelerator: Accelerator, there: Device, optimizers: Sequence[Optimizer]
) -> bool:
    """Return True if updates run on the device: as asked; with "auto" if that is faster; by default if it is possible. Something
    else that is asked for may need it.

    Raises:
        UnsupportedError: it is asked for, or needed, and impossible.
    """
    if accelerator.update_on == "cpu":
        return False
    needed = "device" in (options.gradients, options.optimizer_state) or accelerator.update_with == "kernel"
    try:
        _check_codecs_there(options, there)
        for optimizer in optimizers if accelerator.update_with != "kernel" else ():
            check_updates_there(optimizer, there)
    except UnsupportedError as error:
        if accelerator.update_on == "device" or needed:
            raise
        log.info("updates are on the CPU, since those on %s are impossible: %s", there, str(error))
        return False
    if accelerator.update_on == "auto" and not needed:
        return faster_place(max(optimizers, key=_numel), there) == "device"
    return True

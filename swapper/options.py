"""Defines the user's options: sizes, choices, and option objects. Each error names the option.

Sizes are bytes or strings such as "8GiB".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from swapper.capabilities import Feature, check
from swapper.errors import ConfigError
from swapper.runtime.free_memory import headroom_bytes
from swapper.runtime.sizes import parse_bytes

PLACEMENTS = ("device", "host", "nvme", "auto")
UPDATES = ("step", "deferred", "backward")
"""When parameters are updated: in `optimizer.step()`, at their first use after it, or before it, during backward."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """How a model on an accelerator is updated. `manager.offload(..., device="cuda", accelerator=Accelerator(...))`.

    Args:
        update_on: "device" does the optimizer's arithmetic on the accelerator, as plain torch does: state that is elsewhere
            is copied there and back, slice by slice. "cpu" does it on the CPU; results may differ from the device's in the
            last bits. "auto" measures both, and takes the faster one. None (the default): "device", or, where that is
            impossible (state_codec on a device without the kernels that decode it), "cpu", and the log says so.
        update_with: "optimizer" (the default) runs your optimizer, bit for bit. "kernel", for torch.optim.AdamW with
            fp32 masters and updates on the device, runs swapper's own AdamW: the same formula in one pass over a slice,
            with results that differ from torch's in the last bits, and are the same on every device.
        stochastic_rounding: a seed, for update_with="kernel" and bf16 parameters: masters are rounded up or down at
            random, with probabilities by distance, instead of to nearest. None (the default): to nearest.

    Raises:
        ConfigError: a value is unknown, or they do not go together.
    """

    update_on: str | None = None
    update_with: str = "optimizer"
    stochastic_rounding: int | None = None

    def __post_init__(self) -> None:
        if self.update_on is not None:
            parse_choice(self.update_on, "update_on", ("cpu", "device", "auto"))
        parse_choice(self.update_with, "update_with", ("optimizer", "kernel"))
        on_device = {Feature.DEVICE, Feature.UPDATE_ON_DEVICE}  # not known here
        by_kernel = {Feature.KERNEL} if self.update_with == "kernel" else set()
        check(
            on_device | by_kernel | ({Feature.STOCHASTIC_ROUNDING} if self.stochastic_rounding is not None else set())
        )


@dataclass(frozen=True, kw_only=True)
class CommitPolicy:
    """When a run is committed, so that it can be resumed after a crash. `SwapManager(..., commits=CommitPolicy(...))`.

    Args:
        every: "free" (the default) commits each step if that costs no extra write, which is so if parameters and
            optimizer state are on NVMe, and else never. A number commits every that many steps, and writes content in
            memory too. None: never.
        crash_resume: False takes half the space, one file that is written in place: the run is never committed, and can
            be resumed from a snapshot only. Default: True.
        fsync: commits survive a power loss too. Default: False.

    Raises:
        ConfigError: a value is unknown, or they do not go together.
    """

    every: str | int | None = "free"
    crash_resume: bool = True
    fsync: bool = False

    def __post_init__(self) -> None:
        if self.every not in ("free", None) and (type(self.every) is not int or self.every < 1):
            raise ConfigError(
                f"CommitPolicy(every={self.every!r}) is not known: use 'free', a number of steps, or None"
            )
        if not self.crash_resume and self.every not in ("free", None):
            raise ConfigError(f"CommitPolicy(every={self.every!r}) needs crash_resume=True: leave one of them out")


@dataclass(frozen=True, kw_only=True)
class ExternalWeights:
    """The files of all frozen parameters (requires_grad=False). `manager.offload(..., external=ExternalWeights(...))`.

    They are read in place, and not copied to the run's directory. The files are never written, and must not change as
    long as a run reads them. The model may be on the meta device; values that it has are compared with the file's.

    Args:
        path: a safetensors file, a Hugging Face directory, or a torch checkpoint.
        rename: maps the file's names to the model's, or is a function that returns the model's name, or None to leave
            a tensor out. Default: the names are equal.
    """

    path: str | os.PathLike[str]
    rename: Mapping[str, str] | Callable[[str], str | None] | None = None


def parse_host_memory(value: int | str, ranks_here: int | None = None) -> int:
    """Return the host budget of this process in bytes.

    Args:
        value: a size; or "64GiB/node", for all ranks of this machine, which share it equally; or "auto", half of the free
            memory of the machine and of this control group, shared in the same way.
        ranks_here: how many ranks run on this machine; None: as LOCAL_WORLD_SIZE says.

    Raises:
        ConfigError: it is no size, or nothing tells the number of ranks.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE") if ranks_here is None else str(ranks_here)
    if value == "auto":
        return headroom_bytes() // 2 // (int(ranks) if _is_count(ranks) else 1)
    if not isinstance(value, str) or not value.endswith("/node"):
        return parse_bytes(value, "host_memory")
    if not _is_count(ranks):
        raise ConfigError(
            f"host_memory={value!r} is shared by the ranks of a machine, and LOCAL_WORLD_SIZE="
            f"{'' if ranks is None else ranks} does not tell how many these are: start them with torchrun, which sets it, "
            "call init_process_group first, or give each rank its own part, without /node"
        )
    return max(parse_bytes(value.removesuffix("/node"), "host_memory") // int(ranks), 1)


def check_at_once(at_once: int | None) -> None:
    """Check a number of micro-batches that run together.

    Raises:
        ConfigError: it is not a positive number, nor None for all.
    """
    if at_once is not None and (type(at_once) is not int or at_once < 1):
        raise ConfigError(f"at_once={at_once!r} must be a positive number of micro-batches, or None for all")


def _is_count(value: str | None) -> TypeGuard[str]:
    return value is not None and value.isdecimal() and int(value) > 0


def parse_choice(value: str, option: str, allowed: Sequence[str]) -> str:
    """Return `value`. Raises ConfigError unless it is one of `allowed`."""
    if value not in allowed:
        names = ", ".join(repr(name) for name in allowed)
        raise ConfigError(f"{option}={value!r} is not known: use one of {names}")
    return value

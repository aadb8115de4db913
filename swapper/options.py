"""What a user may say: sizes, choices, and what belongs together and is rare, as one object each. Every mistake names the option.

Sizes are bytes or strings such as "8GiB".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swapper.errors import ConfigError
from swapper.runtime.free_memory import headroom_bytes
from swapper.runtime.sizes import parse_bytes

PLACEMENTS = ("device", "host", "nvme", "auto")
UPDATES = ("step", "deferred", "backward")
"""When parameters are updated: in `optimizer.step()`, when the next forward reaches them, or as backward has done with them."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """How a model that runs on a device is updated. `manager.offload(..., device="cuda", accelerator=Accelerator(...))`.

    Args:
        update_on: where the optimizer's arithmetic is done: on the "cpu" (the default), where the state is; on the "device", to
            which slices of it go and from which they come back (as plain torch's, its results may differ from the CPU's in the
            last bits); or "auto", where that is faster by a trial of both.
        update_with: "optimizer" (the default) does what yours does, bit for bit. "kernel", for torch.optim.AdamW with fp32
            masters that is updated on the device, is swapper's own AdamW: one pass over a slice, the same formula in another
            order, so that results differ from torch's in the last bits. They are the same on every device.
        stochastic_rounding: with update_with="kernel" and bf16 parameters, a seed: masters are rounded up or down by chance, in
            proportion to what is nearer, instead of to nearest. None (the default): to nearest.

    Raises:
        ConfigError: a value is not known, or they do not go together.
    """

    update_on: str = "cpu"
    update_with: str = "optimizer"
    stochastic_rounding: int | None = None

    def __post_init__(self) -> None:
        parse_choice(self.update_on, "update_on", ("cpu", "device", "auto"))
        parse_choice(self.update_with, "update_with", ("optimizer", "kernel"))
        if self.stochastic_rounding is not None and self.update_with != "kernel":
            raise ConfigError("stochastic_rounding goes with update_with='kernel': torch's optimizers round to nearest")


@dataclass(frozen=True, kw_only=True)
class CommitPolicy:
    """When a run is committed, so that it can be gone on from, whatever kills it. `SwapManager(..., commits=CommitPolicy(...))`.

    Args:
        every: "free" (the default): each step where that costs no extra write, that is where parameters and optimizer state live
            on NVMe, else never; a number: every so many steps, writing what is in memory too; None: never.
        crash_resume: False takes half the space, one file that is written in place: the run is never committed, and cannot be
            gone on from but from a snapshot. Default: True.
        fsync: commits survive a power loss too. Default: False.

    Raises:
        ConfigError: a value is not known, or they do not go together.
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
    """Where the frozen parameters (requires_grad=False) are, all of them. `manager.offload(..., external=ExternalWeights(...))`.

    They are read from there, in place, and never copied to the run's directory. The files are not written, and must stay as they
    are for as long as there is a run that reads them. The model may be on the meta device; values that it has are compared with
    the file's.

    Args:
        path: a safetensors file, a Hugging Face directory, or a torch checkpoint.
        rename: a map from its names to the model's, or a function that gives the model's name or None (leave out). Default: they
            are the model's.
    """

    path: str | os.PathLike[str]
    rename: Mapping[str, str] | Callable[[str], str | None] | None = None


def parse_host_memory(value: int | str) -> int:
    """Return the host budget in bytes; "auto" is half of what the machine and this process's control groups leave free."""
    if value == "auto":
        return headroom_bytes() // 2
    return parse_bytes(value, "host_memory")


def parse_choice(value: str, option: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        names = ", ".join(repr(name) for name in allowed)
        raise ConfigError(f"{option}={value!r} is not known: use one of {names}")
    return value

"""What a user may say, parsed once.

Sizes are bytes or strings such as "8GiB"; every mistake names the option and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence

from swapper.errors import ConfigError
from swapper.runtime.headroom import headroom_bytes
from swapper.runtime.sizes import parse_bytes

PLACEMENTS = ("device", "host", "nvme", "auto")
UPDATES = ("step", "deferred", "backward")
"""When parameters are updated: in `optimizer.step()`, when the next forward reaches them, or as backward has done with them."""

UPDATE_PLACES = ("cpu", "device", "auto")
"""Where the optimizer's arithmetic is done, for a model that runs on a device."""

UPDATERS = ("optimizer", "kernel")
"""What does the optimizer's arithmetic: the user's own instance, or swapper's AdamW."""


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

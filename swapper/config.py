"""What a user may say, parsed once.

Sizes are bytes or strings such as "8GiB"; every mistake names the option and what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from swapper.errors import ConfigError
from swapper.headroom import headroom_bytes

PLACEMENTS = ("device", "host", "nvme", "auto")
UPDATES = ("step", "deferred", "backward")
"""When parameters are updated: in `optimizer.step()`, when the next forward reaches them, or as backward has done with them."""

UPDATE_PLACES = ("cpu", "device", "auto")
"""Where the optimizer's arithmetic is done, for a model that runs on a device."""

UPDATERS = ("optimizer", "kernel")
"""What does the optimizer's arithmetic: the user's own instance, or swapper's AdamW."""

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: int | str, option: str) -> int:
    """Return `value` in bytes.

    Args:
        value: an int in bytes, or a string like "8GiB" (2**30) or "500MB" (10**6).
        option: the option's name, for the error message.

    Raises:
        ConfigError: not a size, or not positive.
    """
    allowed = f'{option}={value!r} is not a size: give bytes as an int, or a string like "8GiB" or "500MB"'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(allowed)
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(allowed)
        value = int(float(match[1]) * _UNITS[match[2].lower()])
    if value <= 0:
        raise ConfigError(f"{option}={value!r} must be more than 0 bytes")
    return value


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


def format_bytes(nbytes: int | float) -> str:
    """Return a size as people read it: 1536 -> "1.5 KiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

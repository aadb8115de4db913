"""Sizes in bytes, as a user writes and reads them."""

from __future__ import annotations

import re

from swapper.errors import ConfigError

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


def format_bytes(nbytes: int | float) -> str:
    """Return a size as people read it: 1536 -> "1.5 KiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

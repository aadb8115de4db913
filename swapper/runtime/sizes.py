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
_BITS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?b|[kmgt]i?b|[KMGTkmgt]i?)(?:/s|ps)?\s*")


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


def refuse_bits(value: str, option: str) -> None:
    """Raise ConfigError for a size that could be in bits."""
    found = _BITS.fullmatch(value)
    if found:
        unit = found[2][0].upper() + ("i" if "i" in found[2] else "") + "B"
        raise ConfigError(
            f"{option} {value}: {found[2]} could mean bits or bytes, of 1000 or 1024: say {found[1]}{unit} for bytes"
            + ("" if "i" in unit else f" of 1000, {found[1]}{unit[0]}iB for those of 1024")
        )


def parse_bytes_a_second(value: int | str, option: str) -> int:
    """Return `value` as `parse_bytes` does, also of "7GB/s". Raises ConfigError for what could be bits, too."""
    if isinstance(value, str):
        refuse_bits(value, option)
        value = re.sub(r"\s*/s\s*$", "", value)
    return parse_bytes(value, option)


def format_bytes(nbytes: int | float) -> str:
    """Return a size as people read it: 1536 -> "1.5 KiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

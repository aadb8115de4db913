"""Sizes in bytes, as a user writes and reads them."""

from __future__ import annotations

import re

from swapper.errors import ConfigError

_MULTIPLES = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d{1,24}(?:\.\d{1,24})?)\s*((?:[kmgt]i?)?)(b?)\s*", re.IGNORECASE)


def parse_bytes(value: int | str, option: str) -> int:
    """Return `value` in bytes: the one way to read a size, of Python's options and of the commands'.

    Args:
        value: an int in bytes, or a string like "8GiB" (2**30) or "500MB" (10**6). A string whose unit could mean two things is
            refused: "8G" (bytes or bits, of 1000 or 1024), "8Gb" (a small b is a bit), "8" alone.
        option: the option's name, for the error message.

    Raises:
        ConfigError: not a size, or one that could mean two things, or not positive.
    """
    given = value
    if isinstance(value, str):
        value = _bytes_in(value, option)
    elif isinstance(value, bool) or not isinstance(value, int):
        raise _no_size(value, option)
    if value <= 0:
        raise ConfigError(f"{option}={given!r} must be more than 0 bytes")
    return value


def _bytes_in(text: str, option: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise _no_size(text, option)
    number, multiple, unit = match.groups()
    if not multiple and not unit:
        raise ConfigError(f"{option}={text!r} has no unit: say {number}GiB, or {number}B for single bytes")
    if unit != "B":
        letter, binary = multiple[:1].upper(), multiple[1:].lower()
        is_decimal = bool(letter) and not binary
        raise ConfigError(
            f"{option}={text!r}: {multiple}{unit} could mean bits or bytes{', of 1000 or 1024' if is_decimal else ''}: say "
            f"{number}{letter}{binary}B for bytes"
            + (f" of 1000, {number}{letter}iB for those of 1024" if is_decimal else "")
        )
    return int(float(number) * _MULTIPLES[multiple.lower()])


def _no_size(value: object, option: str) -> ConfigError:
    return ConfigError(f'{option}={value!r} is not a size: give bytes as an int, or a string like "8GiB" or "500MB"')


def parse_bytes_a_second(value: int | str, option: str) -> int:
    """Return `value` as `parse_bytes` does, also of "7GB/s"."""
    return parse_bytes(re.sub(r"\s*(/s|ps)\s*$", "", value) if isinstance(value, str) else value, option)


def format_bytes(nbytes: int | float) -> str:
    """Return a size as people read it: 1536 -> "1.5 KiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

"""Reads small untrusted files: JSON, checksums, and shapes that a value is checked against.

A shape is a function that raises ValueError for a value of another shape. `fields`, `listing` and `mapping` combine shapes; the
error then says where in the whole the wrong part is.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

Shape = Callable[[object], object]

MAX_RECORD_BYTES = 64 << 20
"""Of a record as JSON: a list of a hundred thousand names takes 25 MB."""
MAX_NAME_BYTES = 255
"""Of a file's name, on every filesystem of Linux."""


def parse_json(data: bytes, *, finite: bool = True) -> Any:
    """Return what `data`, JSON in UTF-8, says. Without `finite` it may have NaN and Infinity, as Python's own writer has.

    Raises ValueError for what is not JSON, has a key twice at any depth, or a string that is not text.
    """
    constant = _refuse_constant if finite else float
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_object_of, parse_constant=constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        for string in (name, value):
            if isinstance(string, str) and not string.isascii():
                string.encode()  # half of a surrogate pair raises a ValueError
        if name in found:
            raise ValueError(f"it has the key {name[:80]!r} twice")
        found[name] = value
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


# --- records with a checksum ----------------------------------------------------------------------------------------------


def seal(content: Mapping[str, object]) -> bytes:
    """Return `content` as JSON, with the CRC-32 of the rest."""
    return _text_of({**content, "crc32": zlib.crc32(_text_of(content))})


def unseal(data: bytes, shape: Shape) -> dict[str, Any]:
    """Return what `seal` was given. Raises ValueError unless `data` is what it made, and of that shape."""
    found = parse_json(data)
    if not isinstance(found, dict) or "crc32" not in found:
        raise ValueError("it is not a record with a checksum")
    if found.pop("crc32") != zlib.crc32(_text_of(found)):
        raise ValueError("its bytes do not have the CRC-32 that they were written with")
    shape(found)
    return found


def _text_of(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, sort_keys=True) + "\n").encode()


# --- shapes ---------------------------------------------------------------------------------------------------------------


def anything(value: object) -> None:
    """A value of any shape."""


def exactly(expected: object) -> Shape:
    """Exactly this value, and of this type."""

    def check(value: object) -> None:
        if type(value) is not type(expected) or value != expected:
            raise ValueError(f"it is {short(value)}, not {expected!r}")

    return check


def whole(least: int = 0, most: int = (1 << 63) - 1) -> Shape:
    """An integer within bounds, both included."""

    def check(value: object) -> None:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"it is {short(value)}, not a whole number from {least} to {most}")

    return check


def positive(value: object) -> None:
    """A finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"it is {short(value)}, not a number above 0")


def text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"it is {short(value)}, not text")
    return value


def path(value: object) -> str:
    """What can be a file's path."""
    found = text(value)
    is_long = any(len(part.encode(errors="replace")) > MAX_NAME_BYTES for part in found.split("/"))
    if not found or "\0" in found or is_long:
        raise ValueError(f"it is {short(value)}, not a path")
    return found


def name(value: object) -> str:
    """The plain name of a file in the record's directory."""
    found = path(value)
    if "/" in found or found in (".", ".."):
        raise ValueError(f"it is {short(value)}, not the plain name of a file beside it")
    return found


def nullable(shape: Shape) -> Shape:
    """None, or a value of the shape."""
    return lambda value: None if value is None else shape(value)


def listing(shape: Shape, least: int = 0, most: int | None = None) -> Shape:
    """A list of `least` to `most` entries of one shape.

    Args:
        shape: of each entry.
        least, most: how many; None: any number.
    """

    def check(value: object) -> None:
        if not isinstance(value, list) or len(value) < least or (most is not None and len(value) > most):
            raise ValueError(f"it is {short(value)}, not a list of {least} entries or more")
        for number, each in enumerate(value):
            _within(f"[{number}]", shape, each)

    return check


def row(*shapes: Shape) -> Shape:
    """A list or tuple with one entry for each shape, in order."""

    def check(value: object) -> None:
        if not isinstance(value, list | tuple) or len(value) != len(shapes):
            raise ValueError(f"it is {short(value)}, not {len(shapes)} entries")
        for number, (shape, each) in enumerate(zip(shapes, value, strict=True)):
            _within(f"[{number}]", shape, each)

    return check


def mapping(keys: Shape, values: Shape) -> Shape:
    """A dictionary whose keys have one shape and whose values another."""

    def check(value: object) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"it is {short(value)}, not a dictionary")
        for key, each in value.items():
            keys(key)
            _within(f"[{short(key)}]", values, each)

    return check


def fields(required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None) -> Shape:
    """A dictionary with these keys, each with its shape, and no others."""
    known = {**required, **(optional or {})}

    def check(value: object) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"it is {short(value)}, not a dictionary")
        for key in value:
            if not isinstance(key, str) or key not in known:
                raise ValueError(f"nothing is known of {short(key)}")
        for key, shape in known.items():
            if key in value:
                _within(key, shape, value[key])
            elif key in required:
                raise ValueError(f"{key} is missing")

    return check


def _within(place: str, shape: Shape, value: object) -> None:
    try:
        shape(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def short(value: object) -> str:
    """Return the value as text, in bounded time. A nested value is named by its type."""
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, int) and not -(1 << 64) < value < 1 << 64:
        return "a large number"
    return repr(value) if value is None or isinstance(value, bool | int | float) else f"a {type(value).__name__}"

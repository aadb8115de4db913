"""JSON from a file that nobody vouches for: an object, none of whose keys comes twice at any depth, and whose texts are text."""

from __future__ import annotations

import json
from typing import Any

from swapper.errors import CheckpointError


class _Duplicate(Exception):
    pass


def parse_object(what: str, text: bytes) -> dict[str, Any]:
    """Return the object that `text`, UTF-8, is. `what` names it in errors.

    Raises:
        CheckpointError: it is not JSON, not an object, or has a key twice: which one counted would be the reader's taste.
    """
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_object_of)
    except _Duplicate as error:
        raise CheckpointError(f"{what} has the key {str(error)[:200]!r} twice") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} is not a JSON object")
    return found


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        for text in (name, value):
            if isinstance(text, str) and not text.isascii():
                text.encode()  # half of a surrogate pair raises a ValueError
        if name in found:
            raise _Duplicate(name)
        found[name] = value
    return found

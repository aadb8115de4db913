"""JSON from a file that nobody vouches for: an object, none of whose keys comes twice at any depth, and whose texts are text."""

from __future__ import annotations

from typing import Any

from swapper.errors import CheckpointError
from swapper.runtime.records import parse_json


def parse_object(what: str, text: bytes) -> dict[str, Any]:
    """Return the object that `text`, UTF-8, is. `what` names it in errors.

    Raises:
        CheckpointError: it is not JSON, not an object, or has a key twice: which one counted would be the reader's taste.
    """
    try:
        found = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{what} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} is not a JSON object")
    return found

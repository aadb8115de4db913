"""Checkpoints that are swap files, and swap files that are checkpoints; and fast files for everything else.

`save` and `load` are torch.save and torch.load through the engine. What needs torch is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swapper.checkpoint.container import ALIGNMENT, ContainerLayout, Record, StorageRef, build_tail
    from swapper.checkpoint.loading import load
    from swapper.checkpoint.saving import save

__all__ = ["ALIGNMENT", "ContainerLayout", "Record", "StorageRef", "build_tail", "load", "save"]

_HOMES = {
    "ALIGNMENT": "swapper.checkpoint.container",
    "ContainerLayout": "swapper.checkpoint.container",
    "Record": "swapper.checkpoint.container",
    "StorageRef": "swapper.checkpoint.container",
    "build_tail": "swapper.checkpoint.container",
    "load": "swapper.checkpoint.loading",
    "save": "swapper.checkpoint.saving",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'swapper.checkpoint' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value

"""Checkpoints that are swap files, and swap files that are checkpoints; and fast files for everything else.

`save` and `load` are torch.save and torch.load through the engine. What needs torch is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swapper.checkpoint.torch_load import load
    from swapper.checkpoint.torch_save import save
    from swapper.formats.torch_zip.container import ALIGNMENT, ContainerLayout, Record, StorageRef, build_tail

__all__ = ["ALIGNMENT", "ContainerLayout", "Record", "StorageRef", "build_tail", "load", "save"]

_HOMES = {
    "ALIGNMENT": "swapper.formats.torch_zip.container",
    "ContainerLayout": "swapper.formats.torch_zip.container",
    "Record": "swapper.formats.torch_zip.container",
    "StorageRef": "swapper.formats.torch_zip.container",
    "build_tail": "swapper.formats.torch_zip.container",
    "load": "swapper.checkpoint.torch_load",
    "save": "swapper.checkpoint.torch_save",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'swapper.checkpoint' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value

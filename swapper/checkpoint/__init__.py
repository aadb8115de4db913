"""Saves, loads, exports, inspects and verifies checkpoints of any format as files, without a run or a manager.

`save` and `load` are torch.save and torch.load through the engine. Modules that need torch are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swapper.checkpoint import dcp
    from swapper.checkpoint.exporting import export
    from swapper.checkpoint.inspecting import inspect
    from swapper.checkpoint.torch_load import load
    from swapper.checkpoint.torch_save import save
    from swapper.durability.verify import verify

__all__ = ["dcp", "export", "inspect", "load", "save", "verify"]

_MODULES = {
    "export": "swapper.checkpoint.exporting",
    "inspect": "swapper.checkpoint.inspecting",
    "load": "swapper.checkpoint.torch_load",
    "save": "swapper.checkpoint.torch_save",
    "verify": "swapper.durability.verify",
}


def __getattr__(name: str) -> object:
    if name == "dcp":
        return import_module("swapper.checkpoint.dcp")
    if name not in _MODULES:
        raise AttributeError(f"module 'swapper.checkpoint' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Checkpoints of any format as files: saved, loaded, exported, inspected, verified. No run and no manager is needed.

`save` and `load` are torch.save and torch.load through the engine. What needs torch is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name == "dcp":
        return import_module("swapper.checkpoint.dcp")
    if name not in _MODULES:
        raise AttributeError(f"module 'swapper.checkpoint' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

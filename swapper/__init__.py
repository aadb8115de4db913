"""Exports swapper's public names. swapper pages PyTorch tensors between memory and NVMe.

Modules that need torch are imported on first use: the command line, and processes that only move bytes, start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swapper.errors import (
    BudgetError,
    CheckpointError,
    ChecksumError,
    ColdParameterError,
    ConfigError,
    DeviceError,
    DirectoryError,
    InvariantError,
    IoError,
    StateError,
    SwapperError,
    UnsupportedError,
)
from swapper.runtime import process as _process  # noqa: F401 - refuses an environment that says what is not known
from swapper.runtime.counters import Counters

if TYPE_CHECKING:
    from swapper import checkpoint
    from swapper.durability.publication import SnapshotTicket
    from swapper.infer.adoption import without_weights
    from swapper.infer.load_model import load, shared_memory
    from swapper.infer.loaded_model import LoadedModel, loaded
    from swapper.infer.planning.load_plan import LoadPlan, plan_load
    from swapper.infer.planning.planned_load import ExpertUse, LoadPrediction
    from swapper.integrations.transformers_cache import KVCache as KVCache
    from swapper.io import AioHandle, GdsFile, GdsHandle, Operation, gds_deregister_buffer, gds_register_buffer
    from swapper.manager import SwapManager
    from swapper.options import Accelerator, CommitPolicy, ExternalWeights
    from swapper.runtime.stats import StepStats
    from swapper.train.activations.saved_tensor_hooks import offload_activations
    from swapper.train.planning.plan import Plan
    from swapper.train.state.optim import PagedOptimizer

# KVCache is not in it: it needs transformers, which `from swapper import *` must not.
__all__ = [
    "Accelerator",
    "AioHandle",
    "BudgetError",
    "CheckpointError",
    "ChecksumError",
    "ColdParameterError",
    "CommitPolicy",
    "ConfigError",
    "Counters",
    "DeviceError",
    "DirectoryError",
    "ExpertUse",
    "ExternalWeights",
    "GdsFile",
    "GdsHandle",
    "InvariantError",
    "IoError",
    "LoadPlan",
    "LoadPrediction",
    "LoadedModel",
    "Operation",
    "PagedOptimizer",
    "Plan",
    "SnapshotTicket",
    "StateError",
    "StepStats",
    "SwapManager",
    "SwapperError",
    "UnsupportedError",
    "__version__",
    "checkpoint",
    "gds_deregister_buffer",
    "gds_register_buffer",
    "load",
    "loaded",
    "offload_activations",
    "plan_load",
    "shared_memory",
    "without_weights",
]

_BY_MODULE = {
    "swapper.durability.publication": "SnapshotTicket",
    "swapper.infer.adoption": "without_weights",
    "swapper.infer.planning.load_plan": "LoadPlan plan_load",
    "swapper.infer.planning.planned_load": "ExpertUse LoadPrediction",
    "swapper.integrations.transformers_cache": "KVCache",
    "swapper.infer.load_model": "load shared_memory",
    "swapper.infer.loaded_model": "LoadedModel loaded",
    "swapper.io": "AioHandle GdsFile GdsHandle Operation gds_deregister_buffer gds_register_buffer",
    "swapper.manager": "SwapManager",
    "swapper.options": "Accelerator CommitPolicy ExternalWeights",
    "swapper.runtime.stats": "StepStats",
    "swapper.train.activations.saved_tensor_hooks": "offload_activations",
    "swapper.train.state.optim": "PagedOptimizer",
    "swapper.train.planning.plan": "Plan",
}
_LATER = {name: module for module, names in _BY_MODULE.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "checkpoint":
        return import_module("swapper.checkpoint")
    if name == "__version__":
        return import_module("importlib.metadata").version("torch-swapper")  # itself most of the time of this import
    if name not in _LATER:
        raise AttributeError(f"module 'swapper' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "KVCache"})

"""swapper pages PyTorch tensors between memory and NVMe. This file holds the public names and nothing else."""

from swapper.errors import (
    BudgetError,
    CheckpointError,
    ColdParameterError,
    ConfigError,
    DirectoryError,
    InvariantError,
    IoError,
    StateError,
    SwapperError,
    UnsupportedError,
)
from swapper.io import AioHandle, GdsHandle, Operation
from swapper.manager import SwapManager
from swapper.stats import Stats

__all__ = [
    "AioHandle",
    "BudgetError",
    "CheckpointError",
    "ColdParameterError",
    "ConfigError",
    "DirectoryError",
    "GdsHandle",
    "InvariantError",
    "IoError",
    "Operation",
    "StateError",
    "Stats",
    "SwapManager",
    "SwapperError",
    "UnsupportedError",
]

"""Tensors to files and back: handles in DeepNVMe's shape over the engine, with a future for each operation."""

from swapper.io.gds import GdsHandle
from swapper.io.handle import AioHandle
from swapper.io.operation import Operation

__all__ = ["AioHandle", "GdsHandle", "Operation"]

"""Tensors to files and back: handles in DeepNVMe's shape over the engine, with a future for each operation."""

from swapper.io.gds import GdsHandle
from swapper.io.gdsfile import GdsFile, gds_deregister_buffer, gds_register_buffer
from swapper.io.handle import AioHandle
from swapper.io.operation import Operation

__all__ = ["AioHandle", "GdsFile", "GdsHandle", "Operation", "gds_deregister_buffer", "gds_register_buffer"]

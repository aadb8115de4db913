"""Moves tensors to files and back: handles with DeepNVMe's surface, and a future for each operation."""

from swapper.io.handle.aio import AioHandle
from swapper.io.handle.gds_file import GdsFile, gds_deregister_buffer, gds_register_buffer
from swapper.io.handle.gds_handle import GdsHandle
from swapper.io.handle.operation import Operation

__all__ = ["AioHandle", "GdsFile", "GdsHandle", "Operation", "gds_deregister_buffer", "gds_register_buffer"]

"""Checkpoints that are swap files, and swap files that are checkpoints."""

from swapper.checkpoint.container import ALIGNMENT, ContainerLayout, Record, StorageRef, build_tail

__all__ = ["ALIGNMENT", "ContainerLayout", "Record", "StorageRef", "build_tail"]

"""Serves torch.distributed.checkpoint: a StorageWriter and a StorageReader for `dcp.save`, `async_save` and `load`.

    dcp.save(state, storage_writer=swapper.checkpoint.dcp.StorageWriter("step-100"))
    dcp.load(state, storage_reader=swapper.checkpoint.dcp.StorageReader("step-100"))

The files are those of torch's own FileSystemWriter, and each side reads what the other writes. Differences: tensors
move directly between memory and the drive, aligned, many transfers at a time; an overwritten checkpoint stays whole
until the new one is; and a class that a `.metadata` names is not run unless it belongs to such a file.
"""

from swapper.checkpoint.dcp.storage_reader import StorageReader
from swapper.checkpoint.dcp.storage_writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]

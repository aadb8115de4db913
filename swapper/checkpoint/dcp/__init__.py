"""torch.distributed.checkpoint through the engine: a StorageWriter and a StorageReader for `dcp.save`, `async_save` and `load`.

    dcp.save(state, storage_writer=swapper.checkpoint.dcp.StorageWriter("step-100"))
    dcp.load(state, storage_reader=swapper.checkpoint.dcp.StorageReader("step-100"))

The files are those of torch's own FileSystemWriter, and each side reads what the other writes. What differs: tensors go to the
drive from where they lie and come straight to where they belong, aligned, many transfers at a time; a checkpoint that is
overwritten is whole until the new one is; and what a `.metadata` names is not run unless it is part of such a file.
"""

from swapper.checkpoint.dcp.storage_reader import StorageReader
from swapper.checkpoint.dcp.storage_writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]

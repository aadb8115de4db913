"""Serves torch.distributed.checkpoint: a StorageWriter and a StorageReader for `dcp.save`, `async_save` and `load`.

    dcp.save(state, storage_writer=swapper.checkpoint.dcp.StorageWriter("step-100"))
    dcp.load(state, storage_reader=swapper.checkpoint.dcp.StorageReader("step-100"))

The files are those of torch's own FileSystemWriter, and each side reads what the other writes. Differences: tensors
move directly between memory and the drive, aligned, many transfers at a time; an overwritten checkpoint stays whole
until the new one is; and a class that a `.metadata` names is not run unless it belongs to such a file.

Each thread of each rank writes a file; the metadata names the valid ones. Host tensors are written from where they lie;
small ones, and those on a device, through a stream's ring (stream.py). An overwritten checkpoint stays whole until the
new one's metadata replaces its own, in one step.
"""

from __future__ import annotations

import contextlib
import heapq
import io
import os
import pickle
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config

from swapper.checkpoint.dcp_reader import StorageReader
from swapper.checkpoint.stream import BLOCK_BYTES, LARGE_BYTES, StreamWriter, append_item
from swapper.errors import CheckpointError, ConfigError, IoError
from swapper.formats.dcp_format import METADATA_NAME, METADATA_VERSION, item_of, read_directory
from swapper.io import beneath
from swapper.io.replacing import sync
from swapper.io.tensor_bytes import flat_bytes
from swapper.tensors.torch_private import storage_info

__all__ = ["StorageReader", "StorageWriter"]

SUFFIX = ".distcp"
_MIN_BLOCKS = 2


class StorageWriter(FileSystemWriter):
    """Writes as torch's FileSystemWriter does, with its arguments.

    Args:
        path: the checkpoint's directory; made if it is missing.
        single_file_per_rank: one file for each thread of each rank; False: one for each tensor.
        sync_files: sync files and directory to the drive before the checkpoint counts as complete.
        thread_count: threads that make and write files at once, with shares of about equal size.
        per_thread_copy_ahead: bytes of device tensors that each thread may have copied and not yet written; the same
            memory gathers small tensors. At least 4 MiB.
        cache_staged_state_dict: for async_save; see torch's.
        overwrite: allow an existing checkpoint. It stays whole until the new one is, and its files are removed then.

    Raises:
        ConfigError: `thread_count` is not 1 or more. `torch.distributed.checkpoint.save` raises later errors:
            CheckpointError, IoError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
    ) -> None:
        if not isinstance(thread_count, int) or thread_count < 1:
            raise ConfigError(f"thread_count={thread_count!r} must be 1 or more")
        super().__init__(
            path,
            single_file_per_rank,
            sync_files,
            thread_count,
            per_thread_copy_ahead,
            cache_staged_state_dict,
            overwrite,
        )
        self._ring_bytes = per_thread_copy_ahead

    @property
    def directory(self) -> Path:
        return Path(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._metadata_exists() and not self.overwrite:
            raise CheckpointError(f"{self.path} holds a checkpoint already: choose another, or pass overwrite=True")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
            return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of a plan.

        Raises:
            IoError: a transfer failed, or the drive is full. The files of this call are removed.
        """
        bins = self.thread_count if self.single_file_per_rank else len(plan.items)
        shares = split_by_size(plan.items, bins)
        names = self._new_names(plan.storage_data.prefix, len(shares))
        results: list[WriteResult] = []
        try:
            with ThreadPoolExecutor(self.thread_count, "swapper-dcp") as threads:
                for part in threads.map(self._write_file, names, shares, [planner] * len(shares)):
                    results += part
        except BaseException:
            for name in names:
                with contextlib.suppress(OSError):
                    (self.directory / name).unlink(missing_ok=True)
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the metadata, in one step, and remove the previous checkpoint's files."""
        metadata.version = METADATA_VERSION
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = self.storage_meta()
        target = Path(self._get_metadata_path(None if self.use_collectives else self.rank))
        replaced = _files_of(self.directory) if target.name == METADATA_NAME else set()
        beneath.replace_file(target, pickle.dumps(metadata), durable=self.sync_files, mode=0o666)
        for name in replaced - {info.relative_path for info in metadata.storage_data.values()}:
            (self.directory / name).unlink(missing_ok=True)

    def _new_names(self, prefix: str, count: int) -> list[str]:
        """Return unused file names: the files of an overwritten checkpoint are needed until the end."""
        names = [f"{prefix}{number}{SUFFIX}" for number in range(count)]
        if any((self.directory / name).exists() for name in names):
            names = [f"{prefix}{number}_{self.save_id}{SUFFIX}" for number in range(count)]
        return names

    def _write_file(self, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        path = self.directory / name
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except OSError as error:
            raise IoError("open", str(path), 0, 0, error.errno or 0) from error
        blocks = max(-(-self._ring_bytes // BLOCK_BYTES), _MIN_BLOCKS)
        checksums = bool(config.save.compute_crc32)
        with StreamWriter(path, sum(map(_nbytes, items)), checksums=checksums, blocks=blocks) as writer:
            bytes_first = sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)
            results = [_write_item(writer, name, item, planner.resolve_data(item)) for item in bytes_first]
        if self.sync_files:
            sync(path)
        return results


def split_by_size(items: Sequence[WriteItem], count: int) -> list[list[WriteItem]]:
    """Return up to `count` shares of about equal size; none is empty, unless all are."""
    shares: list[list[WriteItem]] = [[] for _ in range(max(min(count, len(items)), 1))]
    sizes = [(0, number) for number in range(len(shares))]
    for item in sorted(items, key=_nbytes, reverse=True):
        size, number = heapq.heappop(sizes)
        shares[number].append(item)
        heapq.heappush(sizes, (size + _nbytes(item), number))
    return shares


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.size.numel() * item.tensor_data.properties.dtype.itemsize


def _write_item(writer: StreamWriter, name: str, item: WriteItem, data: Any) -> WriteResult:
    if isinstance(data, torch.Tensor):
        tensor = data.detach()
        offset, nbytes = _write_tensor(writer, tensor) if _is_plain(tensor) else _write_bytes(writer, _saved(tensor))
    else:
        offset, nbytes = _write_bytes(writer, data.getbuffer())
    return WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=storage_info()(name, offset, nbytes))


def _write_bytes(writer: StreamWriter, data: bytes | memoryview) -> tuple[int, int]:
    offset = writer.position
    writer.append(bytes(data))
    return offset, writer.position - offset


def _saved(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor.cpu(), file)
    return file.getvalue()


def _is_plain(tensor: torch.Tensor) -> bool:
    lazy = tensor.is_conj() or tensor.is_neg()
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not (lazy or tensor.is_quantized)


def _write_tensor(writer: StreamWriter, tensor: torch.Tensor) -> tuple[int, int]:
    item, flat = item_of(tensor.dtype, tuple(tensor.shape)), tensor.contiguous()
    if tensor.device.type == "cpu" and flat is tensor:
        append = partial(writer.append_memory, flat.data_ptr(), item.nbytes, flat)
    else:
        append = partial(writer.append_device, flat_bytes(flat))
    return append_item(writer, item, append, aligns=item.nbytes >= LARGE_BYTES)


def _files_of(directory: Path) -> set[str]:
    """Return the names of the data files of the checkpoint in `directory`."""
    with contextlib.suppress(Exception):  # missing, or damaged
        return {chunk.stored.path.name for t in read_directory(directory).tensors.values() for chunk in t.chunks}
    return set()

"""torch.distributed.checkpoint through the engine: a StorageWriter and a StorageReader for `dcp.save`, `async_save` and `load`.

    dcp.save(state, storage_writer=swapper.checkpoint.dcp.StorageWriter("step-100"))
    dcp.load(state, storage_reader=swapper.checkpoint.dcp.StorageReader("step-100"))

The files are those of torch's own FileSystemWriter, and each side reads what the other writes. What differs: tensors go to the
drive from where they lie and come straight to where they belong, aligned, many transfers at a time; a checkpoint that is
overwritten is whole until the new one is; and what a `.metadata` names is not run unless it is part of such a file.
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
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config

from swapper.checkpoint.dcpread import METADATA_NAME, read, read_directory
from swapper.checkpoint.engines import drain, engine_for, open_for, reserve
from swapper.checkpoint.items import Item
from swapper.checkpoint.skeleton import TensorView
from swapper.checkpoint.stored import StoredTensor
from swapper.checkpoint.stream import BLOCK_BYTES, StreamWriter
from swapper.checkpoint.torchfile import opened, read_item
from swapper.errors import CheckpointError, ConfigError, IoError

__all__ = ["StorageReader", "StorageWriter", "read"]

VERSION = "1.0.0"
SUFFIX = ".distcp"
_LEAST_BLOCKS = 4


class StorageWriter(FileSystemWriter):
    """Writes as torch's FileSystemWriter does, with its arguments.

    Args:
        path: the checkpoint's directory; made if it is missing.
        single_file_per_rank: one file for each thread of each rank; False: one for each tensor.
        sync_files: have files and directory on the drive before the checkpoint counts as complete.
        thread_count: threads that make and write files at once, with shares of about equal size.
        per_thread_copy_ahead: bytes of tensors on devices that each thread may have copied and not yet written; the same memory
            gathers small tensors. At least 4 MiB.
        cache_staged_state_dict: for async_save; see torch's.
        overwrite: whether a checkpoint may be there. It stays whole until the new one is, and its files are removed then.
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
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            thread_count=thread_count,
            per_thread_copy_ahead=per_thread_copy_ahead,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
        )
        self._ring_bytes = per_thread_copy_ahead

    @property
    def directory(self) -> Path:
        return Path(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._metadata_exists() and not self.overwrite:
            raise CheckpointError(
                f"{self.path} holds a checkpoint already: choose another directory, or say overwrite=True"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
            return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """
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
        """Publish the metadata, in one step, and remove the files of the checkpoint that was there."""
        metadata.version = VERSION
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = self.storage_meta()
        target = Path(self._get_metadata_path(None if self.use_collectives else self.rank))
        replaced = _files_of(self.directory) if target.name == METADATA_NAME else set()
        temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(pickle.dumps(metadata))
            if self.sync_files:
                _sync(temporary)
            temporary.replace(target)
            if self.sync_files:
                _sync(self.directory)
        except OSError as error:
            raise IoError("publish", str(target), 0, 0, error.errno or 0) from error
        finally:
            temporary.unlink(missing_ok=True)
        for name in replaced - {info.relative_path for info in metadata.storage_data.values()}:
            (self.directory / name).unlink(missing_ok=True)

    def _new_names(self, prefix: str, count: int) -> list[str]:
        """Names of files that are not there: those of a checkpoint that is overwritten are needed until the end."""
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
        file = open_for(path, read_only=False)
        try:
            blocks = max(-(-self._ring_bytes // BLOCK_BYTES), _LEAST_BLOCKS)
            checksums = bool(config.save.compute_crc32)
            writer = StreamWriter(engine_for(path), file, checksums=checksums, blocks=blocks)
            try:
                reserve(file, sum(map(_nbytes, items)))
                results = [_write_item(writer, name, item, planner.resolve_data(item)) for item in _bytes_first(items)]
                writer.finish()
            finally:
                writer.close()
            file.truncate(writer.position)
            if self.sync_files:
                file.sync()
        finally:
            file.close()
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


def _bytes_first(items: Sequence[WriteItem]) -> list[WriteItem]:
    return sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)


def _write_item(writer: StreamWriter, name: str, item: WriteItem, data: Any) -> WriteResult:
    if isinstance(data, torch.Tensor):
        tensor = data.detach()
        offset, nbytes = _write_tensor(writer, tensor) if _is_plain(tensor) else _write_bytes(writer, _saved(tensor))
    else:
        offset, nbytes = _write_bytes(writer, data.getbuffer())
    return WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=_StorageInfo(name, offset, nbytes))


def _write_bytes(writer: StreamWriter, data: Any) -> tuple[int, int]:
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


@lru_cache(maxsize=4096)
def _item_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Item:
    return Item.of(dtype, shape)


def _write_tensor(writer: StreamWriter, tensor: torch.Tensor) -> tuple[int, int]:
    item = _item_of(tensor.dtype, tuple(tensor.shape))
    if item.nbytes >= BLOCK_BYTES // 4:
        writer.append(bytes(item.head_gap(writer.position)))
    offset = writer.position
    writer.append(item.head)
    flat = tensor.contiguous()
    if item.nbytes == 0:
        checksum = 0
    elif tensor.device.type == "cpu" and flat is tensor:
        checksum = writer.append_memory(flat.data_ptr(), item.nbytes, flat)
    else:
        checksum = writer.append_device(flat.view(-1).view(torch.uint8))
    writer.append(item.tail(checksum))
    return offset, item.total_nbytes


def _files_of(directory: Path) -> set[str]:
    """Names of the data files of the checkpoint that is in `directory`."""
    with contextlib.suppress(Exception):  # none there, or damaged
        return {chunk.stored.path.name for t in read_directory(directory).tensors.values() for chunk in t.chunks}
    return set()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading -------------------------------------------------------------------------------------------------------------


@dataclass
class _Read:
    """A tensor that is being read: `memory` is where its bytes go, `copy` what is left to do then."""

    request: ReadItem
    target: torch.Tensor
    ticket: Any
    memory: torch.Tensor | None = None  # None: straight into the target
    part: torch.Tensor | None = None  # of `memory`, what goes to the target

    def finish(self, planner: LoadPlanner) -> None:
        self.ticket.wait()
        if self.part is not None:
            self.target.copy_(self.part)
        planner.commit_tensor(self.request, self.target)


class StorageReader(FileSystemReader):
    """Reads what torch's FileSystemWriter or `StorageWriter` wrote.

    Args:
        path: the checkpoint's directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)

    def read_metadata(self, *args: Any, **named: Any) -> Metadata:
        """
        Raises:
            CheckpointError: the metadata is damaged, or names what is no part of such a file.
            IoError: it cannot be read.
        """
        path = Path(self._get_metadata_path(named.get("rank")))
        try:
            data = path.read_bytes()
        except OSError as error:
            raise IoError("read", str(path), 0, 0, error.errno or 0) from error
        try:
            metadata = _MetadataReader(io.BytesIO(data)).load()
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except Exception as error:  # a damaged pickle makes it raise whatever there is
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} is not the metadata of a checkpoint")
        if getattr(metadata, "storage_meta", None) is not None:
            metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """
        Raises:
            CheckpointError: a file does not hold what the metadata says.
            IoError: a file cannot be read.
        """
        per_file: dict[str, list[ReadItem]] = {}
        for request in plan.items:
            per_file.setdefault(self.storage_data[request.storage_index].relative_path, []).append(request)
        for name, requests in per_file.items():
            if Path(name).name != name:
                raise CheckpointError(f"{self.path}: the metadata names {name!r}, which is not a file beside it")
            requests.sort(key=lambda request: self.storage_data[request.storage_index].offset)
            with _OpenFile(Path(self.path) / name) as file:
                for request in requests:
                    file.read(request, self.storage_data[request.storage_index], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _OpenFile:
    """One file of a checkpoint, with reads under way. A context: at its end all is read and handed over."""

    MOST_READS = 64

    def __init__(self, path: Path) -> None:
        self._path = path
        self._engine = engine_for(path)
        self._stack = contextlib.ExitStack()
        self._descriptor = self._stack.enter_context(opened(path))
        self._file = open_for(path, read_only=True)
        self._reads: list[_Read] = []
        self._planner: LoadPlanner | None = None

    def __enter__(self) -> _OpenFile:
        return self

    def __exit__(self, kind: Any, *exception: object) -> None:
        try:
            if kind is None:
                self._finish(0)
        finally:
            for one in self._reads:
                drain(one.ticket)
            self._file.close()
            self._stack.close()

    def read(self, request: ReadItem, info: Any, planner: LoadPlanner) -> None:
        self._planner = planner
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{self._path}: an item was transformed ({info.transform_descriptors}) when it was saved: use torch's reader"
            )
        if request.type == LoadItemType.BYTE_IO:
            planner.load_bytes(request, io.BytesIO(self._bytes(info)))
            return
        target = planner.resolve_tensor(request).detach()
        stored = self._locate(info)
        if stored is None:
            whole = torch.load(io.BytesIO(self._bytes(info)), map_location="cpu", weights_only=True)
            target.copy_(_narrowed(whole, request))
            planner.commit_tensor(request, target)
        else:
            self._begin(request, target, stored)
            self._finish(self.MOST_READS)

    def _begin(self, request: ReadItem, target: torch.Tensor, stored: StoredTensor) -> None:
        lengths = tuple(request.lengths)
        if target.shape != torch.Size(lengths):
            raise CheckpointError(
                f"{self._path}: {request.dest_index.fqn} is {tuple(target.shape)}, to be read as {lengths}"
            )
        if stored.stride is not None:
            self._begin_part(request, target, stored, stored.offset, stored.nbytes, 0)
            return
        row_bytes = stored.nbytes // stored.shape[0] if stored.shape and stored.shape[0] else stored.nbytes
        first, rows = (request.storage_offsets[0], lengths[0]) if lengths else (0, 1)
        if stored.shape and first + rows > stored.shape[0]:
            raise CheckpointError(f"{self._path}: {request.dest_index.fqn} is wanted beyond its end")
        offset, nbytes = stored.offset + first * row_bytes, rows * row_bytes
        whole_rows = lengths[1:] == stored.shape[1:]
        direct = target.device.type == "cpu" and target.is_contiguous() and target.dtype == stored.dtype
        if whole_rows and direct:
            ticket = self._engine.read(self._file, offset, target.data_ptr(), nbytes, keep=target)
            self._reads.append(_Read(request, target, ticket))
        else:
            self._begin_part(request, target, stored, offset, nbytes, first)

    def _begin_part(
        self, request: ReadItem, target: torch.Tensor, stored: StoredTensor, offset: int, nbytes: int, first: int
    ) -> None:
        """Read rows from `first` on beside the target, and take from them what it wants."""
        memory = torch.empty(nbytes, dtype=torch.uint8)
        rows = memory.view(stored.dtype)
        if stored.stride is not None:
            rows = rows.as_strided(stored.shape, stored.stride)
        else:
            rows = rows.view(-1, *stored.shape[1:]) if stored.shape else rows.view(())
        for dim, (begin, length) in enumerate(zip(request.storage_offsets, request.lengths, strict=True)):
            rows = rows.narrow(dim, begin - (first if dim == 0 else 0), length)
        ticket = self._engine.read(self._file, offset, memory.data_ptr(), nbytes, keep=memory)
        self._reads.append(_Read(request, target, ticket, memory, rows))

    def _finish(self, leave: int) -> None:
        """Hand over the oldest reads, until `leave` are under way."""
        while len(self._reads) > leave and self._planner is not None:
            self._reads[0].finish(self._planner)
            del self._reads[0]

    def _locate(self, info: Any) -> StoredTensor | None:
        """Where the payload of an item is; None if torch has to load it."""
        item = read_item(self._descriptor, self._path, info.offset, info.length)
        view = item.skeleton.tree
        order_is_ours = item.byteorder in (None, "little" if torch.tensor([1]).view(torch.uint8)[0] else "big")
        return item.stored("", view) if isinstance(view, TensorView) and order_is_ours else None

    def _bytes(self, info: Any) -> bytes:
        memory = torch.empty(info.length, dtype=torch.uint8)
        self._engine.read(self._file, info.offset, memory.data_ptr(), info.length, keep=memory).wait()
        return memory.numpy().tobytes()


def _narrowed(tensor: torch.Tensor, request: ReadItem) -> torch.Tensor:
    for dim, (begin, length) in enumerate(zip(request.storage_offsets, request.lengths, strict=True)):
        tensor = tensor.narrow(dim, begin, length)
    return tensor


class _MetadataReader(pickle.Unpickler):
    """Reads a `.metadata`, of the classes that such a file is made of."""

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _OTHERS = frozenset(
        {
            *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
            *(("builtins", name) for name in ("set", "frozenset", "slice", "complex", "bytearray")),
            *((module, kind) for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "PurePosixPath")),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        found = (
            super().find_class(module, name)
            if module in (*self._MODULES, "torch") or (module, name) in self._OTHERS
            else None
        )
        is_record = module in self._MODULES and isinstance(found, type) and found.__module__ == module
        if is_record or isinstance(found, torch.dtype) or (module, name) in self._OTHERS:
            return found
        raise CheckpointError(
            f"it names {module}.{name}, which is no part of a checkpoint's metadata: it is hostile, or of a planner of your "
            "own; if you trust it, load it with torch's FileSystemReader"
        )

"""Implements load: torch.load with payloads read through the engine, many at a time, straight to their targets.

torch itself unpickles, and decides what `weights_only` refuses: it gets the checkpoint without its payloads
(`torch.serialization.skip_data`, `map_location`), and whenever it asks for the location of a storage, it gets one that
is being read. The skeleton (pickle_reader.py) predicts the requested storages and their order, so all reads are in
flight before the first is needed.

[Note: what torch loads] Some files and options are passed to torch.load: files that are no zip (before torch 1.6),
TorchScript, compressed records, another byte order, `mmap=True`, the meta device, fake tensors, safetensors.
"""

from __future__ import annotations

import contextlib
import mmap as memory_map
import os
import sys
import tarfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.serialization import config

from swapper import _C
from swapper.checkpoint.encoded_state import decode_state, in_nameless_file
from swapper.checkpoint.mapped_files import guard_saves
from swapper.checkpoint.stream import Checksum
from swapper.errors import CheckpointError, IoError
from swapper.formats.pickle_reader import StorageId, check_pickles
from swapper.formats.sources import PICKLE_MAGIC, ZIP_MAGIC, FileStamp, opened, read_at
from swapper.formats.torch_file import TorchFile, read_torch_file, repacked
from swapper.formats.zip_reader import ZipRecord, unpacked_crc32
from swapper.io.copying import CopyRange, checksums_of
from swapper.io.engines import drain, open_for, shared_engine, wait_for_all
from swapper.io.staging import Staging
from swapper.io.tensor_bytes import SECTOR_BYTES
from swapper.runtime.process import naming_limits

MapLocation = Callable[[Any, str], Any] | Mapping[str, str] | torch.device | str | None

MAPPED_BYTES = 1 << 20
"""Bytes from which a storage gets its own mapping, aligned like its place in the file."""
STEP_BYTES = 16 << 20  # populated at once: a choice
_MADV_POPULATE_WRITE = 23  # of madvise(2), Linux 5.14
MAX_AHEAD_BYTES = 256 << 20
"""Bytes that are being read and not yet requested by torch."""
_MAX_AHEAD_READS = 1024  # bounds their number for small storages: a choice
_MAX_TRIES = 20  # to open a file that keeps changing: a choice
_OLD_PICKLES = 5
"""Number of pickles in an old file: magic number, version, the system's sizes, the object, the keys of its storages."""
_NEEDS_PLAIN_LOCATION = (b"_rebuild_wrapper_subclass", b"_rebuild_device_tensor_from")
"""Rebuild functions of torch's that do not work with a function as map_location."""

_restore: Any = torch.serialization.default_restore_location
_Storage: Any = torch.UntypedStorage


def load(
    path: str | os.PathLike[str],
    map_location: MapLocation = None,
    mmap: bool | None = None,
    weights_only: bool = True,
    *,
    verify: bool = False,
) -> Any:
    """Load any torch checkpoint as torch.load does, all of it, into memory; the result is the same, bit for bit.

    This reads a file; `swapper.load` runs a model whose weights are read from their file as they are needed.

    `torch.utils.serialization.config.load` is honored (`mmap`, `mmap_flags`, `endianness`,
    `calculate_storage_offsets`). Storages of 1 MiB and more cannot be resized, as those of `mmap=True` cannot.

    Args:
        path: a file.
        map_location: as torch.load's. A function is called with each storage when its data is there.
        mmap: True reads nothing: tensors are mapped from the file, and read on access.
        weights_only: refuse everything except plain data, before anything of the file is run. False runs the file's
            code: for trusted files.
        verify: compare every payload with its checksum.

    The optimizer state of a snapshot that holds it encoded is decoded to fp32 (encoded_state.py).

    Raises:
        CheckpointError: the file is not what it claims to be, a checksum is wrong, or `weights_only` refuses it.
        IoError: it cannot be read.
    """
    file = Path(path)
    wants_mapping = bool(config.load.mmap if mmap is None else mmap)
    content = _load_as_it_is(file, map_location, wants_mapping, weights_only, verify)
    make = in_nameless_file(file.absolute().parent) if wants_mapping else torch.empty
    return decode_state(content, str(file), make)


def _load_as_it_is(
    file: Path, map_location: MapLocation, wants_mapping: bool, weights_only: bool, verify: bool
) -> object:
    if not _is_zip(file):
        if weights_only:
            _check_old_file(file)
        return _load_by_torch(file, map_location, wants_mapping, weights_only)
    checkpoint, payloads = _open(file)
    with contextlib.closing(payloads):
        return _load(checkpoint, payloads, map_location, wants_mapping, weights_only, verify)


def _open(path: Path) -> tuple[TorchFile, _C.File]:
    """Return a checkpoint's directory and the open file, both of one file: its name may be replaced meanwhile."""
    for _ in range(_MAX_TRIES):
        checkpoint = read_torch_file(path, calculate=bool(config.load.calculate_storage_offsets))
        file = open_for(path, read_only=True)
        if FileStamp.of(path) == checkpoint.stamp:
            return checkpoint, file
        file.close()
    raise CheckpointError(f"{path} keeps changing: load it when nobody writes to it")


def _load(
    checkpoint: TorchFile,
    payloads: _C.File,
    map_location: MapLocation,
    wants_mapping: bool,
    weights_only: bool,
    verify: bool,
) -> object:
    records = {storage.key: checkpoint.record(storage) for storage in checkpoint.skeleton.storages}
    if wants_mapping or _needs_torch(checkpoint, records, map_location):
        if verify:
            verify_records(checkpoint, records, payloads)
        return _load_by_torch(checkpoint.path, map_location, wants_mapping, weights_only)
    with _Loader(checkpoint, records, payloads, map_location, verify) as loader:
        return loader.load(weights_only)


def verify_records(checkpoint: TorchFile, records: Mapping[str, ZipRecord], file: _C.File) -> None:
    """Read these payloads and raise CheckpointError if one does not have its checksum.

    Args:
        checkpoint: for messages.
        records: to read, by key.
        file: open for transfers.
    """
    path = checkpoint.path
    stored = [record for record in records.values() if not record.compressed]
    runs = [CopyRange(file, record.offset, record.nbytes, None, record.name) for record in stored]
    found = checksums_of(shared_engine(path), runs)
    for record in stored:
        _check_checksum(path, record, found[record.offset] if record.nbytes else 0)
    for record in [record for record in records.values() if record.compressed]:
        with opened(path) as descriptor:
            _check_checksum(path, record, unpacked_crc32(descriptor, path, record))


def _is_zip(path: Path) -> bool:
    with opened(path) as descriptor:
        return read_at(descriptor, path, 0, len(ZIP_MAGIC)) == ZIP_MAGIC


def _check_old_file(path: Path) -> None:
    """Refuse files of torch before 1.6 with pickles that would run endlessly, and archives.

    torch makes a directory for an archive before it refuses it.
    """
    with naming_limits("open", path), path.open("rb") as file:
        if file.read(len(PICKLE_MAGIC)) == PICKLE_MAGIC:
            file.seek(0)
            check_pickles(file, _OLD_PICKLES, path.stat().st_size, str(path))
            return
    if tarfile.is_tarfile(path):
        raise CheckpointError(f"{path} cannot be loaded: it is a tar of torch before 0.1.10, or filled with zeros")


def _needs_torch(checkpoint: TorchFile, records: Mapping[str, ZipRecord], map_location: MapLocation) -> bool:
    """Return True if torch must load the file. See [Note: what torch loads]."""
    order = checkpoint.byteorder
    if order is None:
        default = torch.serialization.get_default_load_endianness()
        order = "big" if default is torch.serialization.LoadEndianness.BIG else "little"
        order = sys.byteorder if default is torch.serialization.LoadEndianness.NATIVE else order
    return (
        order != sys.byteorder
        or f"{checkpoint.root}/constants.pkl" in checkpoint.zip.records
        or any(record.compressed for record in records.values())
        or str(map_location).startswith("meta")
        or any(name in checkpoint.pickle for name in _NEEDS_PLAIN_LOCATION)
        or type(torch.empty(0, device="cpu")) is not torch.Tensor  # within a FakeTensorMode
    )


def _load_by_torch(path: Path, map_location: Any, mmap: bool, weights_only: bool) -> object:
    if mmap:
        guard_saves()
    try:
        return torch.load(path, map_location, weights_only=weights_only, mmap=mmap)
    except Exception as error:  # a damaged file can make it raise anything
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error


def _check_checksum(path: Path, record: ZipRecord, checksum: int | None) -> None:
    if checksum is None:
        raise CheckpointError(f"{path}: {record.name} does not unpack to {record.unpacked_nbytes} bytes: it is damaged")
    if checksum != record.crc32:
        absent = " (none was saved: config.save.compute_crc32 was off)" if record.crc32 == 0 else ""
        raise CheckpointError(
            f"{path}: {record.name} has the CRC-32 {checksum:08x} and not {record.crc32:08x}{absent}: its "
            f"{record.nbytes} bytes at {record.offset} are damaged. Take another copy of the file"
        )


class _Loader:
    """Loads one checkpoint. A context: at its end nothing is in flight any more."""

    def __init__(
        self,
        checkpoint: TorchFile,
        records: Mapping[str, ZipRecord],
        file: _C.File,
        map_location: MapLocation,
        verify: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._records = records
        self._map_location = map_location
        self._verify = verify
        self._path = checkpoint.path
        self._engine = shared_engine(self._path)
        self._file = file
        self._staging: Staging | None = None
        self._reads: dict[str, tuple[torch.UntypedStorage, list[_C.Ticket]]] = {}  # by key, begun and not requested yet
        self._bytes_ahead = 0
        once = {storage.key: storage for storage in checkpoint.skeleton.storages}
        self._order = deque(s for s in once.values() if s.nbytes and self._stays_on_host(s.location))

    def __enter__(self) -> _Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        for _, tickets in self._reads.values():
            for ticket in tickets:
                drain(ticket)
        if self._staging is not None:
            self._staging.close()

    def load(self, weights_only: bool) -> object:
        """Let torch unpickle, and give it storages that are being read."""
        requested = iter(self._checkpoint.skeleton.storages)
        known: set[str] = set()

        def place(memory: torch.UntypedStorage, location: str) -> object:
            # torch calls this for the storages of the pickle in order, but only once for one that has an address.
            storage = next(storage for storage in requested if storage.key not in known)
            if storage.location != location or storage.nbytes != memory.nbytes():
                raise CheckpointError(f"{self._path}: torch and swapper read data.pkl differently: a bug in swapper")
            placed = self._place(storage, memory)
            if placed.device.type != "meta" and placed.data_ptr() != 0:
                known.add(storage.key)
            return placed

        self._read_ahead()
        try:
            with torch.serialization.skip_data():
                return torch.load(
                    repacked(self._checkpoint, {}), cast(Any, place), weights_only=weights_only, mmap=False
                )
        except (CheckpointError, IoError, KeyboardInterrupt):
            raise
        except Exception as error:
            if weights_only:
                raise CheckpointError(f"{self._path} cannot be loaded: {error}") from error
            raise

    def _place(self, storage: StorageId, memory: torch.UntypedStorage) -> Any:
        """Return the storage with its data, in its final location."""
        target = self._target(storage.location)
        if target is None or callable(target):
            loaded = self._read_to_host(storage, memory)
            return loaded if target is None else _mapped(target, loaded, storage.location)
        device = _restore(_Storage(0), target).device
        if device.type == "cpu":
            return _restore(self._read_to_host(storage, memory), target)
        return self._read_to_device(storage, device)

    def _target(self, location: str) -> object:
        """Return the target for a storage's location: None for host memory, a location, or the user's function."""
        wanted = self._map_location
        if callable(wanted):
            return wanted
        if wanted is None or isinstance(wanted, Mapping):
            target = wanted.get(location, location) if wanted else location
        else:
            target = wanted.decode() if isinstance(wanted, bytes) else str(wanted)
        return None if target == "cpu" else target

    def _stays_on_host(self, location: str) -> bool:
        target = self._target(location)
        return target is None or callable(target)

    # --- to host memory

    def _read_to_host(self, storage: StorageId, memory: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage.nbytes == 0:
            return memory
        if storage.key not in self._reads:
            self._begin(storage)
        loaded, tickets = self._reads[storage.key]
        wait_for_all(tickets)
        del self._reads[storage.key]
        self._bytes_ahead -= storage.nbytes
        self._read_ahead()
        record = self._records[storage.key]
        if self._verify and storage.nbytes == record.nbytes:
            _check_checksum(self._path, record, Checksum(tickets).value)
        return loaded

    def _read_ahead(self) -> None:
        """Begin reads that will be requested next."""
        while self._order and self._bytes_ahead < MAX_AHEAD_BYTES and len(self._reads) < _MAX_AHEAD_READS:
            self._begin(self._order.popleft())

    def _begin(self, storage: StorageId) -> None:
        record = self._records[storage.key]
        memory = _HostMemory(storage.nbytes, record.offset % SECTOR_BYTES)
        tickets: list[_C.Ticket] = []
        self._reads[storage.key] = (memory.storage, tickets)
        self._bytes_ahead += storage.nbytes
        address = memory.storage.data_ptr()
        for begin, end in memory.steps():
            place = record.offset + begin, address + begin, end - begin
            tickets.append(self._engine.read(self._file, *place, keep=memory.storage, checksum=self._verify))

    # --- to a device

    def _read_to_device(self, storage: StorageId, device: torch.device) -> torch.UntypedStorage:
        """Read through a ring of page-locked memory: the host never holds the whole storage."""
        record = self._records[storage.key]
        memory: torch.UntypedStorage = _Storage(storage.nbytes, device=device)
        if storage.nbytes == 0:
            return memory
        checksum = Checksum()

        def move(offset: int, address: int, nbytes: int) -> Iterator[_C.Ticket]:
            ticket = self._engine.read(self._file, offset, address, nbytes, checksum=self._verify)
            checksum.add(ticket)
            yield ticket

        if self._staging is None:
            self._staging = Staging()
        view = torch.empty(0, dtype=torch.uint8, device=device).set_(memory)
        self._staging.begin("read", view, record.offset, str(self._path), move).wait()
        if self._verify and storage.nbytes == record.nbytes:
            _check_checksum(self._path, record, checksum.value)
        return memory


def _mapped(map_location: Callable[[object, str], object], storage: torch.UntypedStorage, location: str) -> object:
    """Apply a map_location that is a function, as torch does."""
    mapped = map_location(storage, location)
    return _restore(storage, location) if mapped is None else mapped


class _HostMemory:
    """Host memory for one storage.

    A large one lies in huge pages, and begins `phase` bytes after a multiple of 4096, as its record does in the file:
    then a drive can transfer into it directly.
    """

    def __init__(self, nbytes: int, phase: int) -> None:
        self._nbytes = nbytes
        self._phase = phase
        self._mapping: Any = None
        self.storage: torch.UntypedStorage
        if nbytes < MAPPED_BYTES:
            self.storage = _Storage(nbytes)
            return
        self._mapping = memory_map.mmap(-1, nbytes + phase, memory_map.MAP_PRIVATE | memory_map.MAP_ANONYMOUS)
        if hasattr(memory_map, "MADV_HUGEPAGE"):
            self._mapping.madvise(memory_map.MADV_HUGEPAGE)
        flat = torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=phase)
        self.storage = flat.untyped_storage()

    def steps(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of bytes that together are the storage, each when its memory is populated.

        Populating here, step by step, leaves the engine's thread free to keep the drive busy.
        """
        begin = 0
        while begin < self._nbytes:
            end = min((begin + self._phase) // STEP_BYTES * STEP_BYTES + STEP_BYTES - self._phase, self._nbytes)
            if self._mapping is not None:
                first = (begin + self._phase) // SECTOR_BYTES * SECTOR_BYTES
                with contextlib.suppress(OSError):  # Linux before 5.14: a touch populates pages
                    self._mapping.madvise(_MADV_POPULATE_WRITE, first, end + self._phase - first)
            yield begin, end
            begin = end

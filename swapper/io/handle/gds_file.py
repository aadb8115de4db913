"""GdsFile: torch.cuda.gds.GdsFile's surface, in parallel pieces, and optionally asynchronous.

torch's moves a storage by one blocking call. Here all files of a process share one GdsHandle: a storage is many pieces,
and `submit_load` and `submit_save` return at once. Without cuFile, or for a file that it refuses, storages go through
host memory, and `reason` says so. **Not run on a GPU yet**: only against a stand-in for the library.
"""

from __future__ import annotations

import errno
import functools
import os
from typing import NoReturn

import torch

from swapper.errors import ConfigError, IoError, StateError, UnsupportedError
from swapper.io.handle.cufile import CuFile
from swapper.io.handle.gds_handle import GdsHandle
from swapper.io.handle.operation import Operation

THREADS = 8  # a choice
Storage = torch.UntypedStorage | torch.TypedStorage


@functools.lru_cache(maxsize=4)
def _handle(process: int, cufile: CuFile | None) -> GdsHandle:
    """Return the process's handle; a forked child, which lacks the threads, gets its own. Python closes it."""
    return GdsHandle(intra_op_parallelism=THREADS, queue_depth=32, strict=False, cufile=cufile)


def gds_register_buffer(storage: Storage, *, cufile: CuFile | None = None) -> None:
    """Register a storage on a CUDA device with cuFile until `gds_deregister_buffer`. Without cuFile it does nothing.

    Raises:
        UnsupportedError: it is not on a CUDA device.
        IoError: cuFile refuses.
    """
    _handle(os.getpid(), cufile).pin_device_tensor(_bytes_of(storage))


def gds_deregister_buffer(storage: Storage, *, cufile: CuFile | None = None) -> None:
    """End the registration.

    Raises:
        StateError: there is none.
    """
    handle = _handle(os.getpid(), cufile)
    if handle.is_gds and not handle.unpin_device_tensor(_bytes_of(storage)):
        raise StateError("this storage is not registered: call gds_register_buffer first")


class GdsFile:
    """An open file for storages, with torch.cuda.gds's surface.

    Attributes:
        filename, flags, fd: of the open file; flags has os.O_DIRECT if the filesystem supports it.
        handle: a number while the file is registered, None otherwise.
        reason: "cuFile", or the reason why storages go through host memory.
    """

    def __init__(
        self, filename: str | os.PathLike[str], flags: int, *, strict: bool = False, cufile: CuFile | None = None
    ) -> None:
        """Open and register the file.

        Args:
            filename: the file.
            flags: of os.open. os.O_CREAT makes a file with mode 0600.
            strict: refuse to go through host memory.
            cufile: the library, by default this machine's.

        Raises:
            IoError: the file cannot be opened.
            UnsupportedError: `strict`, and cuFile does not support the file.
        """
        self.handle: int | None = None
        self.filename = os.fspath(filename)
        self.flags = flags
        self.fd = -1
        self.reason = ""
        self._strict = strict
        self._cufile = cufile
        self._process = os.getpid()
        self._in_flight: list[Operation] = []
        self.fd = _open(self.filename, flags)
        try:
            self.register_handle()
        except BaseException:
            self._close_descriptor()
            raise

    @property
    def is_gds(self) -> bool:
        """True if storages bypass host memory."""
        return self.reason == "cuFile"

    def register_handle(self) -> None:
        """Register the file with cuFile.

        Raises:
            StateError: it is registered.
            UnsupportedError: `strict`, and cuFile does not support the file.
        """
        if self.handle is not None:
            raise StateError("this file is registered already: call deregister_handle first")
        engine = self._engine()
        self.handle, self.reason = self.fd, engine.gds_reason
        if engine.is_gds:
            self._adopt(engine)
        if self._strict and not self.is_gds:
            self.deregister_handle()
            raise UnsupportedError(f"{self.filename} cannot be read and written by GPUDirect Storage: {self.reason}")

    def deregister_handle(self) -> None:
        """Wait for transfers in flight and end the registration. The file stays open.

        Raises:
            StateError: there is none.
        """
        self._check_registered()
        for operation in self._in_flight:
            operation.settle()
        self._in_flight = []
        engine = self._engine()
        file = engine.forget_registered(self._path)
        if file is not None:
            file.close()
        self.handle = None

    def load_storage(self, storage: Storage, offset: int = 0) -> None:
        """Fill a storage from the file's byte `offset` on, and return when that is done.

        Raises:
            StateError: the file is not registered.
            IoError: it ends too early, is not open for reading, or the drive fails.
        """
        self.submit_load(storage, offset).wait()

    def save_storage(self, storage: Storage, offset: int = 0) -> None:
        """Write a storage to the file's byte `offset` on, and return when that is done; otherwise as `load_storage`."""
        self.submit_save(storage, offset).wait()

    def submit_load(self, storage: Storage, offset: int = 0) -> Operation:
        """Begin `load_storage`; do not use the storage before the operation is over."""
        self._check_registered()
        return self._keep(self._engine().submit_read(_bytes_of(storage), self.fd, offset))

    def submit_save(self, storage: Storage, offset: int = 0) -> Operation:
        """Begin `save_storage`; do not change the storage before the operation is over."""
        self._check_registered()
        return self._keep(self._engine().submit_write(_bytes_of(storage), self.fd, offset))

    def close(self) -> None:
        """Wait for transfers in flight and close the file. May be called again."""
        if self.handle is not None:
            self.deregister_handle()
        self._close_descriptor()

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(f"{type(self).__name__} cannot be copied or pickled: its descriptor is its own")

    def __enter__(self) -> GdsFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if os is not None and getattr(self, "_process", None) == os.getpid() and self.fd >= 0:  # else Python ends
            self.close()

    @property
    def _path(self) -> str:
        """Return the file's name for the handle, which knows it by its descriptor."""
        return f"/proc/self/fd/{self.fd}"

    def _engine(self) -> GdsHandle:
        if self._process != os.getpid():
            raise StateError(f"{self.filename} was opened by the process that forked this one: open it here")
        return _handle(self._process, self._cufile)

    def _adopt(self, engine: GdsHandle) -> None:
        """Pass cuFile a descriptor of its own, closed with the registration."""
        copy = os.dup(self.fd)
        try:
            file = engine.register_file(self._path, copy)
        except IoError as error:
            os.close(copy)
            if error.errno != errno.ENOTSUP:
                raise
            engine.keep_staged(self._path)
            self.reason = f"{self.filename} goes through host memory: {error.detail}"
        else:
            self.handle = file.handle

    def _check_registered(self) -> None:
        if self.handle is None:
            raise StateError("this file is not registered: call register_handle first")

    def _keep(self, operation: Operation) -> Operation:
        self._in_flight = [other for other in self._in_flight if not other.done]
        self._in_flight.append(operation)
        return operation

    def _close_descriptor(self) -> None:
        descriptor, self.fd = self.fd, -1
        if descriptor >= 0:
            os.close(descriptor)


def _open(path: str, flags: int) -> int:
    try:
        try:
            return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return os.open(path, flags | os.O_CLOEXEC, 0o600)  # no direct I/O on this filesystem
    except OSError as error:
        raise IoError("open", path, 0, 0, error.errno or errno.EIO) from error


def _bytes_of(storage: Storage) -> torch.Tensor:
    """Return a tensor of all bytes of a storage."""
    if isinstance(storage, torch.TypedStorage):
        storage = storage.untyped()
    if not isinstance(storage, torch.UntypedStorage):
        raise ConfigError(f"a storage is needed, as tensor.untyped_storage() gives it, not {type(storage).__name__}")
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

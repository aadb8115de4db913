"""Defines DeepNVMe's methods as thin wrappers of futures: its names, argument orders and return values.

Separate from `AioHandle`, which does the work, so that DeepNVMe's part and swapper's own are readable alone. Page-locked
tensors have one registry for the whole process, shared by all handles. Such a tensor's memory is an arena of its own,
which returns to the system when the tensor and all its views are gone, freed or not. Freeing earlier only removes it
from the registry, so that no view is ever left without memory.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import threading
import weakref
from collections.abc import Callable

import torch

from swapper import _C
from swapper.errors import ConfigError, IoError, StateError
from swapper.io.files import Target
from swapper.io.handle.operation import Operation
from swapper.io.registered import CudaRegistrar, Registrar, Registration

logger = logging.getLogger("swapper.io")

ALIGNMENT = 512  # bytes; DeepNVMe's own
_HUGE_BYTES = 2 << 20  # a huge page of x86-64
_locked_bytes: dict[int, int] = {}
"""Address -> bytes. Changed only by single dict operations: a finalizer may run between any two."""


class DeepNvmeMethods:
    """The methods of DeepNVMe's `aio_handle`. A subclass submits."""

    def __init__(
        self,
        block_size: int,
        queue_depth: int,
        single_submit: bool,
        overlap_events: bool,
        parallelism: int,
        strict: bool,
    ) -> None:
        """Store DeepNVMe's options; with `strict` off, methods log a failure and return -1."""
        self._block_size = block_size
        self._queue_depth = queue_depth
        self._single_submit = single_submit
        self._overlap_events = overlap_events
        self._parallelism = parallelism
        self.strict = strict
        self._awaited: list[Operation] = []  # operations that `wait` counts
        self._awaited_lock = threading.Lock()

    def _submit_checked(
        self, kind: str, tensor: torch.Tensor, target: Target, validate: bool, file_offset: int | None
    ) -> Operation:
        """Begin to "read" or "write"; with `validate`, the operation's wait compares the file with the tensor."""
        raise NotImplementedError

    def get_block_size(self) -> int:
        """Return the bytes of one request, at most, as given."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Return the kernel calls in flight, for each unit of parallelism, as given."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """Return DeepNVMe's option as given: here it changes nothing."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """Return DeepNVMe's option as given: here it changes nothing."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Return DeepNVMe's option as given."""
        return self._parallelism

    def get_thread_count(self) -> int:
        """An older name of `get_intra_op_parallelism`."""
        return self._parallelism

    def get_alignment(self) -> int:
        """Return the multiple to which DeepNVMe's users round sizes. Multiples of 4096 save a copy here."""
        return ALIGNMENT * self._parallelism

    def read(self, buffer: torch.Tensor, filename: Target, validate: bool, file_offset: int | None = None) -> int:
        """Read now. Returns 0.

        Args:
            buffer: receives its bytes: of any shape, dtype and strides.
            filename: a file's name, or an open descriptor.
            validate: read the file a second time, another way, and compare.
            file_offset: in bytes; None (the default): the whole file.

        Raises:
            IoError: the transfer failed, or what was compared differs. With `strict` off it is logged, and -1 returned.
            UnsupportedError: not a tensor with bytes.
        """
        return self._answer(lambda: self._do_alone("read", buffer, filename, validate, file_offset))

    def write(self, buffer: torch.Tensor, filename: Target, validate: bool, file_offset: int | None = None) -> int:
        """Write now. Returns 0.

        Args: as of `read`; a missing file is made.

        Raises: as `read` does.
        """
        return self._answer(lambda: self._do_alone("write", buffer, filename, validate, file_offset))

    def pread(
        self,
        buffer: torch.Tensor,
        filename: Target,
        validate: bool,
        async_op: bool | None = None,
        file_offset: int | None = None,
        **named: object,
    ) -> int:
        """Read as `async_pread` if the fourth argument (`async`, a keyword of Python) is true, else as `sync_pread`.

        Args: as of `read`.

        Raises: as `read` does, of what it waits for.
        """
        is_async = _async_of(async_op, named)
        return self._answer(lambda: self._do("read", buffer, filename, validate, is_async, file_offset))

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: Target,
        validate: bool,
        async_op: bool | None = None,
        file_offset: int | None = None,
        **named: object,
    ) -> int:
        """Write; otherwise as `pread`.

        Args: as of `read`.

        Raises: as `read` does, of what it waits for.
        """
        is_async = _async_of(async_op, named)
        return self._answer(lambda: self._do("write", buffer, filename, validate, is_async, file_offset))

    def sync_pread(self, buffer: torch.Tensor, filename: Target, file_offset: int | None = None) -> int:
        """Read, and wait for it and everything asynchronous before it. Returns their number: 1 if it is alone.

        Args: as of `read`.

        Raises: as `read` does, of all of them.
        """
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: Target, file_offset: int | None = None) -> int:
        """Write; otherwise as `sync_pread`.

        Args: as of `read`.

        Raises: as `read` does, of all of them.
        """
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: Target, file_offset: int | None = None) -> int:
        """Begin to read. Returns 0.

        Args: as of `read`.

        Raises: as `read` does, if it cannot begin.
        """
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: Target | None = None,
        file_offset: int | None = None,
        *,
        fd: int | None = None,
    ) -> int:
        """Begin to write. Returns 0.

        A descriptor (`fd=`, or instead of the name) stays the caller's, to close at once; its file is never truncated.

        Args: as of `read`.

        Raises:
            ConfigError: neither `filename` nor `fd`, or both.
            As `read`, if it cannot begin.
        """
        target = filename if fd is None else fd
        if target is None or (fd is not None and filename is not None):
            raise ConfigError("name one of filename= and fd=")
        if isinstance(target, int) and file_offset is None:
            file_offset = 0
        return self.pwrite(buffer, target, False, True, file_offset)

    def wait(self) -> int:
        """Wait for everything asynchronous. Returns the number of operations: 0 if none.

        Raises:
            IoError: one of them failed; the first, when all are over. The count then starts at 0 again.
        """
        return self._answer(self._drain_awaited)

    def new_cpu_locked_tensor(self, num_elem: int, example_tenosr: torch.Tensor, **named: object) -> torch.Tensor:
        """Return a page-locked tensor of zeros.

        Args:
            num_elem: how many.
            example_tenosr: a tensor of their dtype (DeepNVMe's spelling).
            named: DeepNVMe's other options, which change nothing here.

        Raises:
            ConfigError: a negative number of elements.
            IoError: there is no such memory, or, with `strict`, the system refuses to lock it.
        """
        return new_locked_tensor(num_elem, example_tenosr.dtype, must_lock=self.strict)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Release a locked tensor; its memory is freed with its last view. Returns False if it is not one."""
        return free_locked(tensor.data_ptr())

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Return True if the tensor is in page-locked memory: torch's, or of any handle's `new_cpu_locked_tensor`."""
        return is_locked(buffer) or (torch.cuda.is_available() and buffer.is_pinned())

    def _do_alone(
        self, kind: str, tensor: torch.Tensor, target: Target, validate: bool, file_offset: int | None
    ) -> int:
        self._submit_checked(kind, tensor, target, validate, file_offset).wait()
        return 0

    def _do(
        self, kind: str, tensor: torch.Tensor, target: Target, validate: bool, is_async: bool, file_offset: int | None
    ) -> int:
        operation = self._submit_checked(kind, tensor, target, validate, file_offset)
        if not is_async:
            return self._drain_awaited(operation)
        with self._awaited_lock:
            self._awaited.append(operation)
        return 0

    def _drain_awaited(self, last: Operation | None = None) -> int:
        with self._awaited_lock:
            awaited, self._awaited = self._awaited, []
        if last is not None:
            awaited.append(last)
        failures: list[Exception] = []
        for n, operation in enumerate(awaited):
            try:
                operation.wait()
            except Exception as failure:
                failures.append(failure)
            except BaseException:  # Ctrl-C: the rest must still be waited for
                with self._awaited_lock:
                    self._awaited[:0] = awaited[n:]
                raise
        for other in failures[1:]:
            logger.error("another operation failed too: %s", other)
        if failures:
            raise failures[0]
        return len(awaited)

    def _answer(self, act: Callable[[], int]) -> int:
        """Return what DeepNVMe's methods return: with `strict` off, a failure is logged and gives -1."""
        try:
            return act()
        except (IoError, StateError) as error:
            if self.strict:
                raise
            logger.error("%s", error)
            return -1


def _async_of(async_op: bool | None, named: dict[str, object]) -> bool:
    is_async = named.pop("async", async_op)
    if named or is_async is None:
        raise TypeError(f"unknown arguments {sorted(named)}" if named else "the argument 'async' is missing")
    return bool(is_async)


def new_locked_tensor(elements: int, dtype: torch.dtype, *, must_lock: bool = True) -> torch.Tensor:
    """Return a tensor of `elements` zeros in page-locked memory, which CUDA knows too once the program has used it.

    Args:
        elements: how many.
        dtype: of the tensor.
        must_lock: refuse memory that is not locked. Default: True.

    Raises:
        ConfigError: a negative number of elements.
        IoError: there is no such memory, or, with `must_lock`, the system refuses to lock it.
    """
    if isinstance(elements, bool) or not isinstance(elements, int) or elements < 0:
        raise ConfigError(f"num_elem={elements!r} must be a number of elements, 0 or more")
    nbytes = elements * dtype.itemsize
    if nbytes == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    arena = _C.Arena(nbytes, huge_pages=nbytes >= _HUGE_BYTES)
    if must_lock and not arena.locked:
        reason = arena.lock_reason
        arena.close()
        remedy = "raise the limit (ulimit -l, LimitMEMLOCK=, docker --ulimit memlock=-1), or use strict=False"
        raise IoError("mlock", "", 0, nbytes, errno.ENOMEM, f"{reason}; {remedy}")
    memory = (ctypes.c_char * nbytes).from_buffer(arena.view(0, nbytes))
    address, registrar = arena.address, registrar_in_use()
    if registrar is not None:  # as a whole: its user copies it by torch
        registration = Registration(registrar, arena, [(0, nbytes)])
        registration.wait()
        weakref.finalize(memory, registration.close).atexit = False  # the memory is still there
    arena.close()  # the view keeps the memory
    _locked_bytes[address] = nbytes
    weakref.finalize(memory, free_locked, address).atexit = False
    return torch.frombuffer(memory, dtype=dtype)


def registrar_in_use() -> Registrar | None:
    """Return CUDA's registrar if the program has used CUDA: a first use takes memory of the device."""
    return CudaRegistrar() if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def free_locked(address: int) -> bool:
    """Remove a tensor of `new_locked_tensor`, which begins there, from the registry; return False if it is not there."""
    return _locked_bytes.pop(address, None) is not None


def is_locked(tensor: torch.Tensor) -> bool:
    """Return True if the tensor, or its base, came from `new_locked_tensor` and is not freed."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    address = tensor.data_ptr()
    return any(base <= address < base + nbytes for base, nbytes in list(_locked_bytes.items()))

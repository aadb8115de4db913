"""AioHandle: tensors to files and back, in DeepNVMe's shape, strict.

Every operation is a future underneath (`submit_read`, `submit_write`); DeepNVMe's methods are thin sayings over them, with
its names, argument orders and return values. A failure raises `swapper.IoError`, whichever way the operation was asked for.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch

from swapper import _C
from swapper.config import parse_choice
from swapper.errors import ConfigError, IoError, StateError
from swapper.io.elements import byte_count, check_tensor, run_address
from swapper.io.files import OpenFile, OpenFiles, Target
from swapper.io.locked import free_locked_tensor, is_locked, new_locked_tensor
from swapper.io.operation import Operation, Part
from swapper.io.staging import Move, Staging
from swapper.io.validation import compare

logger = logging.getLogger("swapper.io")

BACKENDS = ("auto", "uring", "aio", "threads")
ALIGNMENT = 512
PIECE = 4096
MOST_PIECE_BYTES = 1 << 30
MOST_DEPTH = 4096
ALLOCATE_FROM_BYTES = 1 << 20
"""Larger writes into new space allocate it first: direct writes that extend a file are taken one at a time by ext4."""


class AioHandle:
    """Reads and writes tensors of any shape, size, dtype, strides and file offset. May be used by several threads.

    `file_offset=None`, which is what a call that leaves it out says, writes the whole file: a longer old one is cut to the tensor's
    size. With an offset given, 0 too, the rest of the file stays as it is.

    A tensor is kept alive until its transfer is over; until then a source must not be changed and a destination not be used.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
        *,
        num_threads: int | None = None,
        backend: str = "auto",
        strict: bool = True,
        debug: bool | None = None,
        chaos: Mapping[str, float] | None = None,
    ) -> None:
        """Starts an engine, whose one thread keeps the drive busy.

        Args:
            block_size: bytes of one kernel call; rounded up to 4096.
            queue_depth: kernel calls in flight, for each unit of `intra_op_parallelism`.
            single_submit: taken for DeepNVMe's sake, without effect: the engine submits in batches, and as it comes.
            overlap_events: likewise: the engine always refills as calls finish.
            intra_op_parallelism: multiplies `queue_depth`; one thread is enough for a drive.
            num_threads: an older name of `intra_op_parallelism`.
            backend: "auto", "uring", "aio" or "threads".
            strict: False makes DeepNVMe's methods log a failure and return -1, and lets locked tensors go unlocked.
            debug: fail an operation whose tensor is changed while it is in flight. The default is whether SWAPPER_IO_DEBUG
                is set. Costs time.
            chaos: troubles to put in the way of transfers, for tests; see `swapper._C.Engine`.

        Raises:
            ConfigError: an option is out of range, or the backend does not work here.
        """
        if num_threads is not None:
            intra_op_parallelism = num_threads
        self._block_size = _positive(block_size, "block_size", MOST_PIECE_BYTES)
        self._queue_depth = _positive(queue_depth, "queue_depth", 1 << 20)
        self._parallelism = _positive(intra_op_parallelism, "intra_op_parallelism", 1 << 16)
        self._single_submit = bool(single_submit)
        self._overlap_events = bool(overlap_events)
        self.strict = bool(strict)
        self.debug = bool(os.environ.get("SWAPPER_IO_DEBUG")) if debug is None else bool(debug)
        self._engine = _C.Engine(
            backend=parse_choice(backend, "backend", BACKENDS),
            depth=min(self._queue_depth * self._parallelism, MOST_DEPTH),
            piece_bytes=-(-self._block_size // PIECE) * PIECE,
            debug=self.debug,
            chaos=chaos,
        )
        self._files = OpenFiles()
        self._staging: Staging | None = None
        self._lock = threading.Lock()
        self._in_flight: deque[Operation] = (
            deque()
        )  # oldest first; those that are over are let go at the next submission
        self._awaited: list[Operation] = []  # what `wait` counts
        self._is_closed = False
        self._process = os.getpid()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(block_size={self._block_size}, queue_depth={self._queue_depth}, "
            f"intra_op_parallelism={self._parallelism}, backend={self.backend!r})"
        )

    # --- what it is -----------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> str:
        return self._engine.backend

    @property
    def reason(self) -> str:
        """Why this backend, and what it got on this machine."""
        return self._engine.reason

    @property
    def bytes_read(self) -> int:
        return self._engine.bytes_read

    @property
    def bytes_written(self) -> int:
        return self._engine.bytes_written

    def get_block_size(self) -> int:
        return self._block_size

    def get_queue_depth(self) -> int:
        return self._queue_depth

    def get_single_submit(self) -> bool:
        return self._single_submit

    def get_overlap_events(self) -> bool:
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        return self._parallelism

    def get_thread_count(self) -> int:
        """An older name of `get_intra_op_parallelism`."""
        return self._parallelism

    def get_alignment(self) -> int:
        """What DeepNVMe's users round sizes up to. Nothing here needs it; multiples of 4096 spare a copy."""
        return ALIGNMENT * self._parallelism

    # --- operations as futures ------------------------------------------------------------------------------------------

    def submit_read(self, tensor: torch.Tensor, path: Target, file_offset: int | None = None) -> Operation:
        """Begins to read `tensor`'s bytes from `path`, from `file_offset` or the beginning.

        Raises:
            IoError: the file cannot be opened, or ends before the tensor would be full.
            ConfigError: a negative offset. UnsupportedError: not a tensor that can receive bytes.
        """
        offset = _offset(file_offset)
        check_tensor(tensor, writes_into=True)
        self._check_open("read")
        nbytes = byte_count(tensor)
        opened = self._files.open(path, writing=False)
        return self._begin("read", [(tensor, offset)], opened, nbytes)

    def submit_write(self, tensor: torch.Tensor, path: Target, file_offset: int | None = None) -> Operation:
        """Begins to write `tensor`'s bytes to `path`: as the whole file, or from `file_offset` on.

        Raises:
            IoError: the file cannot be opened or made, or there is no space for it.
            ConfigError: a negative offset. UnsupportedError: not a tensor with bytes.
        """
        offset = _offset(file_offset)
        check_tensor(tensor, writes_into=False)
        self._check_open("write")
        nbytes = byte_count(tensor)
        opened = self._open_for_write(path, offset, nbytes, is_whole=file_offset is None)
        return self._begin("write", [(tensor, offset)], opened, nbytes)

    def submit_read_batch(
        self, tensors: Sequence[torch.Tensor], path: Target, file_offset: int | None = None
    ) -> Operation:
        """Begins to read many tensors that lie one after the other in one file, as one operation."""
        placed = _placed(tensors, _offset(file_offset), writes_into=True)
        self._check_open("read")
        return self._begin("read", placed, self._files.open(path, writing=False), _batch_bytes(tensors))

    def submit_write_batch(
        self, tensors: Sequence[torch.Tensor], path: Target, file_offset: int | None = None
    ) -> Operation:
        """Begins to write many tensors one after the other into one file, as one operation."""
        offset = _offset(file_offset)
        placed = _placed(tensors, offset, writes_into=False)
        self._check_open("write")
        nbytes = _batch_bytes(tensors)
        opened = self._open_for_write(path, offset, nbytes, is_whole=file_offset is None)
        return self._begin("write", placed, opened, nbytes)

    # --- DeepNVMe's methods ---------------------------------------------------------------------------------------------

    def read(self, buffer: torch.Tensor, filename: Target, validate: bool, file_offset: int | None = None) -> int:
        """Reads now. Returns 0. `validate` reads the file a second time, another way, and compares."""
        return self._answer(lambda: self._do_alone("read", buffer, filename, validate, file_offset))

    def write(self, buffer: torch.Tensor, filename: Target, validate: bool, file_offset: int | None = None) -> int:
        """Writes now. Returns 0."""
        return self._answer(lambda: self._do_alone("write", buffer, filename, validate, file_offset))

    def pread(
        self,
        buffer: torch.Tensor,
        filename: Target,
        validate: bool,
        async_op: bool | None = None,
        file_offset: int | None = None,
        **named: Any,
    ) -> int:
        """Reads. With the fourth argument (`async`, which is a word of Python's) as `async_pread`, else as `sync_pread`."""
        is_async = _async_of(async_op, named)
        return self._answer(lambda: self._do("read", buffer, filename, validate, is_async, file_offset))

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: Target,
        validate: bool,
        async_op: bool | None = None,
        file_offset: int | None = None,
        **named: Any,
    ) -> int:
        """Writes; otherwise as `pread`."""
        is_async = _async_of(async_op, named)
        return self._answer(lambda: self._do("write", buffer, filename, validate, is_async, file_offset))

    def sync_pread(self, buffer: torch.Tensor, filename: Target, file_offset: int | None = None) -> int:
        """Reads, and waits for it and everything asynchronous before it. Returns how many those are: 1 if it is alone."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: Target, file_offset: int | None = None) -> int:
        """Writes; otherwise as `sync_pread`."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: Target, file_offset: int | None = None) -> int:
        """Begins to read. Returns 0."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: Target | None = None,
        file_offset: int | None = None,
        *,
        fd: int | None = None,
    ) -> int:
        """Begins to write. Returns 0.

        A descriptor (`fd=`, or in the place of the name) stays the caller's, who may close it at once; its file is never cut.
        """
        target = filename if fd is None else fd
        if target is None or (fd is not None and filename is not None):
            raise ConfigError("name one of filename= and fd=")
        if isinstance(target, int) and file_offset is None:
            file_offset = 0
        return self.pwrite(buffer, target, False, True, file_offset)

    def wait(self) -> int:
        """Waits for everything asynchronous. Returns how many operations that are: 0 if none.

        Raises:
            IoError: one of them failed; the first, when all are over. What follows counts anew.
        """
        return self._answer(self._drain_awaited)

    def new_cpu_locked_tensor(self, num_elem: int, example_tenosr: torch.Tensor, **named: Any) -> torch.Tensor:
        """A page-locked tensor of `num_elem` zeros, of the example's dtype. (`example_tenosr` is DeepNVMe's spelling.)"""
        return new_locked_tensor(num_elem, example_tenosr.dtype, must_lock=self.strict)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Gives a locked tensor back; its memory goes when the last view of it does. False if it is not one."""
        return free_locked_tensor(tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether the tensor is in page-locked memory: torch's, or from any handle's `new_cpu_locked_tensor`."""
        return is_locked(buffer) or (torch.cuda.is_available() and buffer.is_pinned())

    # --- the end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finishes what is under way, then ends the thread. May be called again.

        Raises:
            IoError: an asynchronous operation failed that nobody waited for.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self._staging is not None:
            self._staging.close()
        self._engine.close()
        while self._in_flight:
            self._in_flight.popleft().settle()
        self._drain_awaited()

    def __enter__(self) -> AioHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except IoError as failure:
            if error is None:
                raise
            logger.error("%s (while closing after another error)", failure)

    def __del__(self) -> None:
        if getattr(self, "_process", None) != os.getpid():
            return
        try:
            self.close()
        except Exception as failure:  # nobody to raise it to
            logger.error("closing a forgotten %s: %s", type(self).__name__, failure)

    # --- how ------------------------------------------------------------------------------------------------------------

    def _check_open(self, op: str) -> None:
        if self._process != os.getpid():
            raise IoError(op, "", 0, 0, 0, "used in a forked child, which has none of the handle's threads")
        if self._is_closed:
            raise IoError(op, "", 0, 0, errno.EBADF, "the handle is closed")

    def _open_for_write(self, path: Target, offset: int, nbytes: int, is_whole: bool) -> OpenFile:
        opened = self._files.open(path, writing=True)
        try:
            if opened.is_regular:
                size = opened.file.nbytes
                if is_whole and size > nbytes:
                    self._finish_others(opened)
                    opened.file.truncate(nbytes)
                elif size < offset + nbytes and nbytes >= ALLOCATE_FROM_BYTES:
                    opened.file.allocate(offset + nbytes)
        except BaseException:
            self._files.release(opened)
            raise
        return opened

    def _finish_others(self, opened: OpenFile) -> None:
        """Waits for what this handle does to a file that is about to be cut: a write still under way would make it long again."""
        if opened.users > 1:
            for operation in list(self._in_flight):
                if operation.opened is opened:
                    operation.settle()

    def _begin(self, kind: str, placed: Sequence[tuple[torch.Tensor, int]], opened: OpenFile, nbytes: int) -> Operation:
        """Submits tensors at their file offsets; `opened` is given back when they are over."""
        parts: list[Part] = []
        release = partial(self._files.release, opened)  # not `self`: an operation must not keep a forgotten handle
        operation = Operation(kind, opened.file.path, nbytes, parts, [tensor for tensor, _ in placed], release)
        operation.opened = opened
        try:
            if kind == "read":
                _check_size(opened, placed)
            for tensor, offset in placed:
                parts.append(self._part(kind, tensor, offset, opened))
        except BaseException:
            operation.settle()
            raise
        with self._lock:
            self._in_flight.append(operation)
            while self._in_flight and self._in_flight[0].done:
                self._in_flight.popleft()
        return operation

    def _part(self, kind: str, tensor: torch.Tensor, offset: int, opened: OpenFile) -> Part:
        move = self._move(kind, opened)
        address = run_address(tensor)
        if kind == "read" and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        if address is not None:
            return move(offset, address if tensor.numel() else 0, byte_count(tensor))
        with self._lock:
            if self._staging is None:
                self._staging = Staging()
        stage = self._staging.read if kind == "read" else self._staging.write
        return stage(tensor, offset, opened.file.path, move)

    def _move(self, kind: str, opened: OpenFile) -> Move:
        submit = self._engine.read if kind == "read" else self._engine.write

        def move(offset: int, address: int, nbytes: int) -> _C.Ticket:
            return submit(opened.file, offset, address, nbytes)

        return move

    def _submit(
        self, kind: str, tensor: torch.Tensor, target: Target, validate: bool, file_offset: int | None
    ) -> Operation:
        submit = self.submit_read if kind == "read" else self.submit_write
        operation = submit(tensor, target, file_offset)
        if validate:
            operation.check_last(lambda: compare(operation.path, _offset(file_offset), tensor, kind))
        return operation

    def _do_alone(
        self, kind: str, tensor: torch.Tensor, target: Target, validate: bool, file_offset: int | None
    ) -> int:
        self._submit(kind, tensor, target, validate, file_offset).wait()
        return 0

    def _do(
        self, kind: str, tensor: torch.Tensor, target: Target, validate: bool, is_async: bool, file_offset: int | None
    ) -> int:
        operation = self._submit(kind, tensor, target, validate, file_offset)
        if not is_async:
            return self._drain_awaited(operation)
        with self._lock:
            self._awaited.append(operation)
        return 0

    def _drain_awaited(self, last: Operation | None = None) -> int:
        with self._lock:
            awaited, self._awaited = self._awaited, []
        if last is not None:
            awaited.append(last)
        failures: list[Exception] = []
        for n, operation in enumerate(awaited):
            try:
                operation.wait()
            except Exception as failure:
                failures.append(failure)
            except BaseException:  # Ctrl-C: the rest is still to be waited for
                with self._lock:
                    self._awaited[:0] = awaited[n:]
                raise
        for other in failures[1:]:
            logger.error("another operation failed too: %s", other)
        if failures:
            raise failures[0]
        return len(awaited)

    def _answer(self, act: Callable[[], int]) -> int:
        """What DeepNVMe's methods return: with `strict` off, -1 and a line in the log for a failure."""
        try:
            return act()
        except (IoError, StateError) as error:
            if self.strict:
                raise
            logger.error("%s", error)
            return -1


def _positive(value: int, option: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{option}={value!r} must be a number from 1 to {most}")
    return value


def _offset(file_offset: int | None) -> int:
    if file_offset is None:
        return 0
    if isinstance(file_offset, bool) or not isinstance(file_offset, int) or not 0 <= file_offset < 1 << 63:
        raise ConfigError(f"file_offset={file_offset!r} must be a number of bytes, 0 or more")
    return file_offset


def _placed(tensors: Sequence[torch.Tensor], offset: int, writes_into: bool) -> list[tuple[torch.Tensor, int]]:
    """Each tensor with its file offset, one after the other."""
    placed = []
    for tensor in tensors:
        check_tensor(tensor, writes_into)
        placed.append((tensor, offset))
        offset += byte_count(tensor)
    return placed


def _batch_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(byte_count(tensor) for tensor in tensors)


def _check_size(opened: OpenFile, placed: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Refuses a read past the end at once. A file that shrinks later fails the transfer itself."""
    if not opened.is_regular or not placed:
        return
    size = opened.file.nbytes
    begin = placed[0][1]
    end = placed[-1][1] + byte_count(placed[-1][0])
    if end > max(size, begin):  # of nothing, there is enough everywhere
        detail = f"the file has {size} bytes, {end} are needed"
        raise IoError("read", opened.file.path, begin, end - begin, 0, detail)


def _async_of(async_op: bool | None, named: dict[str, Any]) -> bool:
    is_async = named.pop("async", async_op)
    if named or is_async is None:
        raise TypeError(f"unknown arguments {sorted(named)}" if named else "the argument 'async' is missing")
    return bool(is_async)

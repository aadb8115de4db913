"""AioHandle: moves tensors to files and back, strictly.

Every operation is a future (`submit_read`, `submit_write`, and both for batches); `deepnvme.py` has DeepNVMe's methods
over them. A failure always raises `swapper.IoError`.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch

from swapper import _C
from swapper.errors import ConfigError, DeviceError, IoError, UnsupportedError
from swapper.io.engines import Engines
from swapper.io.files import STRIPE_BYTES, Opened, OpenFile, OpenFiles, Stripes, Target
from swapper.io.handle.deepnvme import DeepNvmeMethods
from swapper.io.handle.operation import Operation, TransferPart
from swapper.io.staging import Move, StagedTransfer, Staging
from swapper.io.tensor_bytes import byte_count, check_tensor, copy_out, run_address
from swapper.options import parse_choice

logger = logging.getLogger("swapper.io")

BACKENDS = ("auto", "uring", "aio", "threads")
PIECE = 4096  # bytes; the engine's unit of a kernel call
MAX_PIECE_BYTES = 1 << 30  # the engine's limit
MAX_DEPTH = 4096  # the engine's limit
ALLOCATE_FROM_BYTES = 1 << 20
"""Bytes from which writes into new space allocate it first: ext4 serializes direct writes that extend a file."""


class AioHandle(DeepNvmeMethods):
    """Reads and writes tensors of any shape, size, dtype, strides and file offset. Thread-safe.

    `file_offset=None`, the default, writes the whole file: a longer old one is truncated to the tensor's size. With an
    offset, 0 too, the rest of the file stays as it is.

    A tensor is kept alive until its transfer is over; until then do not change a source or use a destination.
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
        directories: Sequence[str | os.PathLike[str]] | None = None,
        stripe_bytes: int = STRIPE_BYTES,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Start an engine, whose one thread keeps the drive busy; each further drive gets one at its first use.

        Args:
            block_size: bytes of one kernel call; rounded up to 4096.
            queue_depth: kernel calls in flight, for each unit of `intra_op_parallelism`.
            single_submit: accepted for DeepNVMe's sake, without effect: the engine submits in batches.
            overlap_events: likewise: the engine always refills as calls finish.
            intra_op_parallelism: multiplies `queue_depth`; one thread is enough for a drive.
            num_threads: an older name of `intra_op_parallelism`.
            backend: "auto", "uring", "aio" or "threads".
            strict: False makes DeepNVMe's methods log a failure and return -1, and lets locked tensors be unlocked.
            debug: fail an operation whose tensor is changed while it is in flight. Default: True if SWAPPER_IO_DEBUG is
                set. Costs time.
            chaos: faults to inject, for tests; see `swapper._C.Engine`.
            directories: one on each of several drives: a relative path then names a file that is striped over them.
                Other paths, and descriptors, work as usual.
            stripe_bytes: bytes of a stripe, a multiple of 4096.
            weights: speeds of the drives, in any unit: each drive's share of the bytes. Equal by default.

        Raises:
            ConfigError: an option is out of range, or the backend does not work here.
        """
        if num_threads is not None:
            intra_op_parallelism = num_threads
        block_size = _positive(block_size, "block_size", MAX_PIECE_BYTES)
        queue_depth = _positive(queue_depth, "queue_depth", 1 << 20)
        parallelism = _positive(intra_op_parallelism, "intra_op_parallelism", 1 << 16)
        super().__init__(block_size, queue_depth, bool(single_submit), bool(overlap_events), parallelism, bool(strict))
        self.debug = bool(os.environ.get("SWAPPER_IO_DEBUG")) if debug is None else bool(debug)
        self._stripes = None if directories is None else Stripes(directories, stripe_bytes, weights)
        self._engines = Engines(
            {
                "backend": parse_choice(backend, "backend", BACKENDS),
                "depth": min(queue_depth * parallelism, MAX_DEPTH),
                "piece_bytes": -(-block_size // PIECE) * PIECE,
                "debug": self.debug,
                "chaos": chaos,
            }
        )
        self._files = OpenFiles()
        self._staging: Staging | None = None
        self._lock = threading.Lock()
        self._in_flight: deque[Operation] = deque()  # oldest first; submissions release finished ones
        self._is_closed = False
        self._process = os.getpid()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(block_size={self._block_size}, queue_depth={self._queue_depth}, "
            f"intra_op_parallelism={self._parallelism}, backend={self.backend!r})"
        )

    # --- properties

    @property
    def backend(self) -> str:
        return self._engines.first.backend

    @property
    def reason(self) -> str:
        """The reason for this backend, and its features on this machine."""
        return self._engines.first.reason

    @property
    def bytes_read(self) -> int:
        return self._engines.bytes_read

    @property
    def bytes_written(self) -> int:
        return self._engines.bytes_written

    # --- operations as futures

    def submit_read(self, tensor: torch.Tensor, path: Target, file_offset: int | None = None) -> Operation:
        """Begin to read `tensor`'s bytes from `path`.

        Args:
            tensor: receives them: of any shape, dtype and strides.
            path: a file's name, or an open descriptor.
            file_offset: in bytes; None (the default): the beginning.

        Raises:
            IoError: the file cannot be opened, or ends before the tensor would be full.
            ConfigError: a negative offset.
            UnsupportedError: not a tensor that can receive bytes.
        """
        return self._submit("read", [tensor], path, file_offset)

    def submit_write(self, tensor: torch.Tensor, path: Target, file_offset: int | None = None) -> Operation:
        """Begin to write `tensor`'s bytes to `path`.

        Args:
            tensor: has them: of any shape, dtype and strides.
            path: a file's name, or an open descriptor; a missing file is made.
            file_offset: in bytes; None (the default): as the whole file.

        Raises:
            IoError: the file cannot be opened or made, or there is no space for it.
            ConfigError: a negative offset.
            UnsupportedError: not a tensor with bytes.
        """
        return self._submit("write", [tensor], path, file_offset)

    def submit_read_batch(
        self, tensors: Sequence[torch.Tensor], path: Target, file_offset: int | None = None
    ) -> Operation:
        """Begin to read many tensors that lie one after the other in one file, as one operation.

        Args:
            tensors: receive their bytes, in this order.
            path, file_offset: as of `submit_read`; the offset is the first one's.

        Raises: as `submit_read` does.
        """
        return self._submit("read", tensors, path, file_offset)

    def submit_write_batch(
        self, tensors: Sequence[torch.Tensor], path: Target, file_offset: int | None = None
    ) -> Operation:
        """Begin to write many tensors one after the other into one file, as one operation.

        Args:
            tensors: have their bytes, in this order.
            path, file_offset: as of `submit_write`; the offset is the first one's.

        Raises: as `submit_write` does.
        """
        return self._submit("write", tensors, path, file_offset)

    # --- closing

    def close(self) -> None:
        """Finish transfers in flight, then end the thread. May be called again.

        Raises:
            IoError, DeviceError: an asynchronous operation failed that nobody waited for.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self._staging is not None:
            self._staging.close()
        self._engines.close()
        while self._in_flight:
            self._in_flight.popleft().settle()
        self._drain_awaited()

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(f"{type(self).__name__} cannot be copied or pickled: its transfers are its own")

    def __enter__(self) -> AioHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except (IoError, DeviceError) as failure:
            if error is None:
                raise
            logger.error("%s (while closing after another error)", failure)

    def __del__(self) -> None:
        if os is None or getattr(self, "_process", None) != os.getpid():  # Python ends, or in a forked child
            return
        try:
            self.close()
        except Exception as failure:  # nobody to raise it to
            logger.error("closing a dropped %s: %s", type(self).__name__, failure)

    # --- implementation

    def _check_open(self, op: str) -> None:
        if self._process != os.getpid():
            raise IoError(op, "", 0, 0, 0, "used in a forked child, which does not have the handle's threads")
        if self._is_closed:
            raise IoError(op, "", 0, 0, errno.EBADF, "the handle is closed")

    def _submit(self, kind: str, tensors: Sequence[torch.Tensor], path: Target, file_offset: int | None) -> Operation:
        offset = end = _offset(file_offset)
        placed = []
        for tensor in tensors:
            check_tensor(tensor, writes_into=kind == "read")
            placed.append((tensor, end))
            end += byte_count(tensor)
        self._check_open(kind)
        if kind == "read":
            opened = self._open(path, writing=False)
        else:
            opened = self._open_for_write(path, offset, end - offset, is_whole=file_offset is None)
        return self._begin(kind, placed, opened, end - offset)

    def _open(self, target: Target, writing: bool) -> Opened:
        if self._stripes is None or isinstance(target, int) or os.path.isabs(target):  # noqa: PTH117 - may be bytes
            return self._files.open(target, writing)
        return self._stripes.open(os.fsdecode(target), self._files, writing)

    def _open_for_write(self, path: Target, offset: int, nbytes: int, is_whole: bool) -> Opened:
        opened = self._open(path, writing=True)
        try:
            if opened.is_regular:
                size = opened.nbytes
                if is_whole and size > nbytes:
                    self._finish_others(opened)
                    opened.truncate(nbytes)
                elif size < offset + nbytes and nbytes >= ALLOCATE_FROM_BYTES:
                    opened.allocate(offset + nbytes)
        except BaseException:
            self._files.release(opened)
            raise
        return opened

    def _finish_others(self, opened: Opened) -> None:
        """Wait for this handle's operations on a file before truncating it: a write in flight would extend it."""
        if any(file.users > 1 for file in opened.files):
            for operation in list(self._in_flight):
                if not set(operation.opened.files).isdisjoint(opened.files):
                    operation.settle()

    def _begin(self, kind: str, placed: Sequence[tuple[torch.Tensor, int]], opened: Opened, nbytes: int) -> Operation:
        """Submit tensors at their file offsets; `opened` is released when they are over."""
        parts: list[TransferPart] = []
        release = partial(self._files.release, opened)  # not `self`: an operation must not keep a dropped handle alive
        operation = Operation(kind, opened, nbytes, parts, [tensor for tensor, _ in placed], release)
        try:
            if kind == "read":
                _check_size(opened, placed)
            for part in self._parts(kind, placed, opened):
                parts.append(part)
        except BaseException:
            operation.settle()
            raise
        with self._lock:
            self._in_flight.append(operation)
            while self._in_flight and self._in_flight[0].done:
                self._in_flight.popleft()
        return operation

    def _parts(self, kind: str, placed: Sequence[tuple[torch.Tensor, int]], opened: Opened) -> Iterator[TransferPart]:
        """Begin each tensor; tensors that are adjacent both in the file and in memory go as one."""
        move = self._move(kind, opened, [tensor for tensor, _ in placed])
        begin, address, nbytes = 0, 0, 0  # collected, not begun yet
        for tensor, offset in placed:
            if kind == "read" and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
            place = self._run_address(tensor)
            if place is not None and nbytes and (offset, place) == (begin + nbytes, address + nbytes):
                nbytes += byte_count(tensor)
                continue
            if nbytes:
                yield from move(begin, address, nbytes)
                nbytes = 0
            if place is None:
                yield from self._staged_parts(kind, tensor, offset, opened)
            else:
                begin, address, nbytes = offset, place, byte_count(tensor)
        if nbytes:
            yield from move(begin, address, nbytes)

    def _run_address(self, tensor: torch.Tensor) -> int | None:
        """Return the address of a tensor that the engine can use directly; None for one of `_staged_parts`."""
        return run_address(tensor)

    def _staged_parts(self, kind: str, tensor: torch.Tensor, offset: int, opened: Opened) -> Iterator[TransferPart]:
        """Begin a tensor that the engine cannot use directly."""
        yield self._stage(kind, tensor, offset, opened)

    def _stage(self, kind: str, tensor: torch.Tensor, offset: int, opened: Opened) -> StagedTransfer:
        with self._lock:
            if self._staging is None:
                self._staging = Staging()
        return self._staging.begin(kind, tensor, offset, opened.path, self._move(kind, opened, None))

    def _move(self, kind: str, opened: Opened, keep: object) -> Move:
        """`keep` owns the memory; None: an arena does."""
        engines = self._engines

        def move(offset: int, address: int, nbytes: int) -> Iterator[_C.Ticket]:
            for file, at, count in opened.segments(offset, nbytes):
                engine = engines.of(file.device)
                submit = engine.read if kind == "read" else engine.write
                yield submit(file.file, at, address, count, keep=keep)
                address += count

        return move

    def _submit_checked(
        self, kind: str, tensor: torch.Tensor, target: Target, validate: bool, file_offset: int | None
    ) -> Operation:
        submit = self.submit_read if kind == "read" else self.submit_write
        operation = submit(tensor, target, file_offset)
        if validate:
            opened = operation.opened
            operation.check_last(lambda: compare(opened, _offset(file_offset), tensor, kind))
        return operation


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


def _check_size(opened: Opened, placed: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Refuse a read past the end at once. If the file shrinks later, the transfer itself fails."""
    if not opened.is_regular or not placed:
        return
    size = opened.nbytes
    begin = placed[0][1]
    end = placed[-1][1] + byte_count(placed[-1][0])
    if end > max(size, begin):  # an empty range always fits
        detail = f"the file has {size} bytes, {end} are needed"
        raise IoError("read", opened.path, begin, end - begin, 0, detail)


COMPARED_BYTES = 8 << 20
"""Bytes that validation compares at once; bounds its memory."""


def compare(opened: Opened, offset: int, tensor: torch.Tensor, op: str) -> None:
    """Compare a finished transfer with the file, read by plain system calls through the page cache.

    Args:
        opened: the file; it may be closed by now.
        offset: of the transfer, in bytes.
        tensor: of one dimension, the bytes that were transferred.
        op: for messages.

    Raises:
        IoError: EIO: the file from `offset` on differs from the tensor's bytes. `opened` may be closed by now.
    """
    per_chunk = COMPARED_BYTES // tensor.element_size()
    for start in range(0, tensor.numel(), per_chunk):
        stop = min(start + per_chunk, tensor.numel())
        expected = torch.empty(stop - start, dtype=tensor.dtype, device="cpu")
        copy_out(tensor.detach(), start, stop, expected)
        wanted = expected.view(torch.uint8)
        at = offset + start * tensor.element_size()
        content = b"".join(_read_file(*segment) for segment in opened.segments(at, wanted.numel()))
        found = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if not torch.equal(wanted, found):
            first = at + int((wanted != found).nonzero()[0])
            raise IoError(op, opened.path, first, wanted.numel(), errno.EIO, "validation found other bytes in the file")


def _read_file(opened: OpenFile, offset: int, nbytes: int) -> bytes:
    with Path(opened.path).open("rb") as file:
        file.seek(offset)
        content = file.read(nbytes)
    if len(content) < nbytes:
        raise IoError("read", opened.path, offset + len(content), nbytes, 0, "validation found the file too short")
    return content

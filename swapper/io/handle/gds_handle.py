"""GdsHandle: CUDA tensors to files and back by GPUDirect Storage, past host memory if the machine supports it.

Contiguous device tensors go by cuFile, in pieces that a few threads process. Edges that are no whole sectors of the
file, and all other tensors, go as in AioHandle. **Not run on a GPU yet**: only against a stand-in for the library.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from swapper.errors import ConfigError, IoError, UnsupportedError
from swapper.io.files import Opened
from swapper.io.handle.aio import AioHandle
from swapper.io.handle.cufile import CuFile, CuFileFile, open_cufile
from swapper.io.handle.deepnvme import new_locked_tensor
from swapper.io.handle.operation import TransferPart
from swapper.io.staging import StagedTransfer, event_of
from swapper.io.tensor_bytes import SECTOR_BYTES, byte_count, device_errors

logger = logging.getLogger("swapper.io")

MAX_THREADS = 32  # a choice


class GdsHandle(AioHandle):
    """An `AioHandle` that moves CUDA tensors straight between the device and the drive.

    If that is impossible, the constructor raises UnsupportedError with the reason; with `strict=False` it is then an
    AioHandle, which moves CUDA tensors through host memory, `is_gds` is False and `gds_reason` has the reason. A file
    on an unsupported filesystem is refused likewise, or goes through host memory, with a line in the log.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
        *,
        strict: bool = True,
        cufile: CuFile | None = None,
        **options: Any,
    ) -> None:
        """Open cuFile, and an engine for everything else.

        Args:
            block_size, queue_depth, single_submit, overlap_events: as of AioHandle.
            intra_op_parallelism: how many threads call cuFile.
            strict: refuse a machine where CUDA tensors would go through host memory. Default: True.
            cufile: the library, by default this machine's.
            options: more of AioHandle's.

        Raises:
            ConfigError: as AioHandle does.
            UnsupportedError: `strict`, and cuFile is not available; gives the reason.
        """
        self._cufile: CuFile | None = cufile
        self._threads: ThreadPoolExecutor | None = None
        self._pinned: dict[int, torch.Tensor] = {}
        self._kept: dict[str, CuFileFile | None] = {}
        self.gds_reason = "cuFile"
        try:
            self._cufile = cufile or open_cufile()
        except UnsupportedError as error:
            if strict:
                raise
            self.gds_reason = f"CUDA tensors go through host memory: {error}"
            logger.warning("%s", self.gds_reason)
        super().__init__(
            block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism, strict=strict, **options
        )
        if self._cufile is not None:
            self._threads = ThreadPoolExecutor(min(self.get_intra_op_parallelism(), MAX_THREADS), "swapper-gds")

    @property
    def is_gds(self) -> bool:
        """True if CUDA tensors bypass host memory."""
        return self._cufile is not None

    @property
    def reason(self) -> str:
        return f"{self.gds_reason}; the rest: {super().reason}"

    def new_pinned_device_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the example's dtype and device, registered with cuFile, if available."""
        if isinstance(num_elem, bool) or not isinstance(num_elem, int) or num_elem < 0:
            raise ConfigError(f"num_elem={num_elem!r} must be a number of elements, 0 or more")
        if self._cufile is None and example_tensor.device.type == "cpu":
            return new_locked_tensor(num_elem, example_tensor.dtype, must_lock=False)
        tensor = torch.empty(num_elem, dtype=example_tensor.dtype, device=example_tensor.device)
        self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Unregister a tensor of `new_pinned_device_tensor`. Returns False if it is not registered."""
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Register a tensor's memory with cuFile until `unpin_device_tensor`. Returns False without cuFile.

        Raises:
            UnsupportedError: it is not one run of device memory.
            IoError: cuFile refuses.
        """
        if self._cufile is None:
            return False
        if tensor.device.type != self._cufile.device_type or not tensor.is_contiguous():
            raise UnsupportedError("only a contiguous tensor on a CUDA device can be registered with cuFile")
        if tensor.numel() and tensor.data_ptr() not in self._pinned:
            self._cufile.register_memory(tensor.data_ptr(), byte_count(tensor))
            self._pinned[tensor.data_ptr()] = tensor
        return True

    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """End the registration. Returns False if there is none."""
        if self._cufile is None or self._pinned.pop(tensor.data_ptr(), None) is None:
            return False
        return self._cufile.unregister_memory(tensor.data_ptr())

    def register_file(self, path: str, descriptor: int) -> CuFileFile:
        """Register an open file with cuFile for this handle's operations on `path`, until `forget_registered`.

        The result owns the descriptor. Raises IoError, with errno ENOTSUP if cuFile does not support the file.
        """
        if self._cufile is None:
            raise IoError("open", path, 0, 0, errno.ENOTSUP, self.gds_reason)
        file = self._cufile.adopt(descriptor, path)
        with self._lock:
            self._kept[path] = file
        return file

    def keep_staged(self, path: str) -> None:
        """Route operations on `path` through host memory, until `forget_registered`."""
        with self._lock:
            self._kept[path] = None

    def forget_registered(self, path: str) -> CuFileFile | None:
        """End the registration. The caller closes the file; operations in flight close it too."""
        with self._lock:
            return self._kept.pop(path, None)

    def close(self) -> None:
        super().close()
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        while self._cufile is not None and self._pinned:
            self._cufile.unregister_memory(self._pinned.popitem()[0])

    def _run_address(self, tensor: torch.Tensor) -> int | None:
        return None if self._is_device_run(tensor) else super()._run_address(tensor)

    def _is_device_run(self, tensor: torch.Tensor) -> bool:
        is_there = self._cufile is not None and tensor.device.type == self._cufile.device_type
        return is_there and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()

    def _registered_memory(self, flat: torch.Tensor) -> int | None:
        """Return the address of the registered memory that contains these bytes; None without one."""
        begin, end = flat.data_ptr(), flat.data_ptr() + flat.numel()
        for address, tensor in list(self._pinned.items()):
            if address <= begin and end <= address + byte_count(tensor):
                return address
        return None

    def _staged_parts(self, kind: str, tensor: torch.Tensor, offset: int, opened: Opened) -> Iterator[TransferPart]:
        is_direct = self._threads is not None and self._is_device_run(tensor) and len(opened.files) == 1
        file = self._registered(kind, opened) if is_direct else None
        if self._threads is None or file is None:
            yield from super()._staged_parts(kind, tensor, offset, opened)
            return
        flat = tensor.detach().view(-1).view(torch.uint8)

        def stage(begin: int, nbytes: int) -> StagedTransfer:
            return self._stage(kind, flat.narrow(0, begin, nbytes), offset + begin, opened)

        try:
            registered = self._registered_memory(flat)
            yield from begin_pieces(self._threads, file, kind, flat, registered, offset, stage)
        finally:
            file.close()  # pieces in flight use it until they are over

    def _registered(self, kind: str, opened: Opened) -> CuFileFile | None:
        """Return cuFile's file, which the caller closes; None if it goes through host memory.

        Raises:
            IoError: cuFile refuses it, and this handle is strict.
        """
        with self._lock:
            if opened.path in self._kept:
                kept = self._kept[opened.path]
                return None if kept is None else kept.use()
        if self._cufile is None:
            return None
        try:
            return self._cufile.open(opened.path, writing=kind == "write")
        except IoError as error:
            if self.strict or error.errno != errno.ENOTSUP:
                raise
            logger.warning("%s goes through host memory: %s", opened.path, error)
            return None


PIECE_BYTES = 16 << 20  # a choice

Stage = Callable[[int, int], StagedTransfer]
"""(begin, bytes) -> begins to transfer that part of the tensor through host memory."""


def whole_sectors(offset: int, nbytes: int) -> tuple[int, int]:
    """Return (begin, end) of the whole sectors of the file within [offset, offset + nbytes), relative to offset; pure.

    cuFile reads, changes and writes back partial sectors, so that two pieces or operations in one sector would
    overwrite each other. So edges go through the engine, which changes exactly its bytes. (0, 0): no whole sector.
    """
    begin = -offset % SECTOR_BYTES
    end = nbytes - (offset + nbytes) % SECTOR_BYTES
    return (begin, end) if begin < end else (0, 0)


def begin_pieces(
    threads: ThreadPoolExecutor,
    file: CuFileFile,
    kind: str,
    flat: torch.Tensor,
    registered: int | None,
    offset: int,
    stage: Stage,
) -> Iterator[StagedTransfer]:
    """Begin to transfer `flat`, after its stream's queued work; yield the pieces as they begin. They use `file` until they end.

    Args:
        threads: call cuFile.
        file: registered with cuFile.
        kind: "read" or "write".
        flat: contiguous bytes on a device.
        registered: address of the registered memory that contains it, if any.
        offset: in the file, in bytes.
        stage: begins to transfer edges, which are no whole sectors: (begin, nbytes).
    """
    ready = event_of(flat)
    address = flat.data_ptr()

    def move(begin: int, nbytes: int) -> None:
        if ready is None:
            file.transfer(kind, address + begin, offset + begin, nbytes, registered)
            return
        with torch.cuda.device(flat.device), device_errors(flat.device, "what was queued before a transfer"):
            ready.synchronize()
            file.transfer(kind, address + begin, offset + begin, nbytes, registered)

    begin, end = whole_sectors(offset, flat.numel())
    for at in range(begin, end, PIECE_BYTES):
        nbytes = min(PIECE_BYTES, end - at)
        file.use()
        try:
            piece = StagedTransfer(threads.submit(move, at, nbytes), (kind, file.path, offset + at, nbytes))
        except BaseException:  # it has not begun: the threads are gone
            file.close()
            raise
        piece.on_done(file.close)
        yield piece
    for edge, stop in ((0, begin), (end, flat.numel())):
        if edge < stop:
            yield stage(edge, stop - edge)

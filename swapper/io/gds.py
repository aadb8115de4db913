"""GdsHandle: CUDA tensors to files and back by GPUDirect Storage, past host memory, where the machine has it.

Tensors in one run of device memory go by cuFile, in pieces that a few threads take as they become free; all others go as
they do in AioHandle. **Not run on a GPU yet**: only against a stand-in for the library.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from swapper.errors import ConfigError, UnsupportedError
from swapper.io.cufile import CuFile, CuFileFile, open_cufile
from swapper.io.elements import byte_count
from swapper.io.files import Opened
from swapper.io.handle import AioHandle
from swapper.io.locked import new_locked_tensor
from swapper.io.operation import Part
from swapper.io.staging import StagedTransfer

logger = logging.getLogger("swapper.io")

PIECE_BYTES = 16 << 20
MOST_THREADS = 32


class GdsHandle(AioHandle):
    """As `AioHandle`, and CUDA tensors go straight between the device and the drive.

    Where that cannot be, making one raises UnsupportedError with the reason; with `strict=False` it is then an AioHandle, which
    takes CUDA tensors through host memory, `is_gds` is False and `gds_reason` says why.
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
        **options: Any,
    ) -> None:
        """As AioHandle; `intra_op_parallelism` is the number of threads that call cuFile."""
        self._cufile: CuFile | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._pinned: dict[int, torch.Tensor] = {}
        self.gds_reason = "cuFile"
        try:
            self._cufile = open_cufile()
        except UnsupportedError as error:
            if strict:
                raise
            self.gds_reason = f"CUDA tensors go through host memory: {error}"
            logger.warning("%s", self.gds_reason)
        super().__init__(
            block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism, strict=strict, **options
        )
        if self._cufile is not None:
            self._threads = ThreadPoolExecutor(min(self.get_intra_op_parallelism(), MOST_THREADS), "swapper-gds")

    @property
    def is_gds(self) -> bool:
        """Whether CUDA tensors go past host memory."""
        return self._cufile is not None

    @property
    def reason(self) -> str:
        return f"{self.gds_reason}; the rest: {super().reason}"

    def new_pinned_device_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the example's dtype and device, registered with cuFile. Without cuFile, an ordinary one."""
        if isinstance(num_elem, bool) or not isinstance(num_elem, int) or num_elem < 0:
            raise ConfigError(f"num_elem={num_elem!r} must be a number of elements, 0 or more")
        if self._cufile is None and example_tensor.device.type == "cpu":
            return new_locked_tensor(num_elem, example_tensor.dtype, must_lock=False)
        tensor = torch.empty(num_elem, dtype=example_tensor.dtype, device=example_tensor.device)
        self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Takes back what `new_pinned_device_tensor` did. False if it is not registered."""
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Registers a tensor's memory with cuFile, and keeps the tensor until `unpin_device_tensor`. False without cuFile.

        Raises:
            UnsupportedError: it is not one run of device memory. IoError: cuFile refuses.
        """
        if self._cufile is None:
            return False
        if tensor.device.type != "cuda" or not tensor.is_contiguous():
            raise UnsupportedError("only a contiguous tensor on a CUDA device can be registered with cuFile")
        if tensor.numel() and tensor.data_ptr() not in self._pinned:
            self._cufile.register_memory(tensor.data_ptr(), byte_count(tensor))
            self._pinned[tensor.data_ptr()] = tensor
        return True

    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Ends the registration. False if there is none."""
        if self._cufile is None or self._pinned.pop(tensor.data_ptr(), None) is None:
            return False
        return self._cufile.unregister_memory(tensor.data_ptr())

    def close(self) -> None:
        super().close()
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        while self._cufile is not None and self._pinned:
            self._cufile.unregister_memory(self._pinned.popitem()[0])

    def _part(self, kind: str, tensor: torch.Tensor, offset: int, opened: Opened) -> Part:
        is_run = (
            tensor.device.type == "cuda" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        )
        if self._cufile is None or self._threads is None or not is_run or len(opened.files) > 1:
            return super()._part(kind, tensor, offset, opened)
        torch.cuda.current_stream(tensor.device).synchronize()
        file = self._cufile.open(opened.path, writing=kind == "write")

        def move(base_offset: int, nbytes: int) -> None:
            with torch.cuda.device(tensor.device):  # threads begin with the first device
                file.transfer(kind, tensor.data_ptr(), base_offset, offset + base_offset, nbytes)

        return GdsTransfer(self._threads, file, kind, move, offset, byte_count(tensor))


class GdsTransfer:
    """One run of device memory on its way by cuFile; a part of an operation. Owns its file."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        file: CuFileFile,
        kind: str,
        move: Callable[[int, int], None],
        offset: int,
        nbytes: int,
    ) -> None:
        """`move(begin, nbytes)` transfers a piece, begin counted from the tensor's first byte."""
        self._pieces: Sequence[StagedTransfer] = [
            StagedTransfer(
                threads.submit(move, at, min(PIECE_BYTES, nbytes - at)),
                (kind, file.path, offset + at, nbytes),
            )
            for at in range(0, nbytes, PIECE_BYTES)
        ]
        self._left = len(self._pieces)
        self._lock = threading.Lock()
        self._file = file
        for piece in self._pieces:
            piece.on_done(self._end_one)

    def _end_one(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._file.close()

    @property
    def done(self) -> bool:
        return all(piece.done for piece in self._pieces)

    @property
    def cancelled(self) -> bool:
        return any(piece.cancelled for piece in self._pieces)

    @property
    def error(self) -> Exception | None:
        return next((piece.error for piece in self._pieces if piece.error is not None), None)

    def wait(self, timeout_s: float | None = None) -> bool:
        for piece in self._pieces:
            if not piece.settle(timeout_s):
                return False
        if self.error is not None:
            raise self.error
        return True

    def cancel(self) -> bool:
        return all(piece.cancel() for piece in self._pieces)

    def notify(self, fd: int) -> None:
        for piece in self._pieces:
            piece.notify(fd)

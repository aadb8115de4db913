"""Small tensors into a page and back, all by one kernel: a page is moved between tiers as one run of bytes, and what is
moved is many biases and norms of a few kilobytes, for each of which a copy of its own would cost more than its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swapper.device.kernels.compiler import kernel, uses_kernel
from swapper.errors import ConfigError

ALIGNMENT = 8
PIECE_BYTES = 8 << 10
"""What one program of the kernel copies; a larger tensor is several."""


class Packing:
    """Contiguous tensors with their places in a page, planned once and used at each move.

    It keeps the memory that they have now: where one gets another later (`p.data = ...`), make a new one.

    Raises:
        ConfigError: tensors that are not contiguous, or not on one device, or whose places overlap.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        """`offsets` are bytes from the page's beginning, one for each tensor, in rising order."""
        self.tensors = [tensor.detach() for tensor in tensors]  # whose addresses the kernel is given
        self.offsets = list(offsets)
        if len(self.tensors) != len(self.offsets) or not self.tensors:
            raise ConfigError(
                f"{len(self.tensors)} tensors have {len(self.offsets)} places: one each, and at least one"
            )
        self.device = self.tensors[0].device
        end = 0
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            if not tensor.is_contiguous() or tensor.device != self.device:
                raise ConfigError("the tensors of a page are contiguous and on one device")
            if offset < end:
                raise ConfigError(f"the place at byte {offset} begins before the one in front of it ends, at {end}")
            end = offset + tensor.numel() * tensor.element_size()
        self.end_bytes = end
        self._table: torch.Tensor | None = None

    @property
    def bytes_moved(self) -> int:
        """What one move reads and writes."""
        return 2 * sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def gather(self, page: torch.Tensor) -> None:
        """Copies the tensors to their places in `page`, bytes on their device; the rest of it stays as it is."""
        self._move(page, into_page=True)

    def scatter(self, page: torch.Tensor) -> None:
        """Copies the places in `page` to the tensors."""
        self._move(page, into_page=False)

    def _move(self, page: torch.Tensor, into_page: bool) -> None:
        if page.dtype != torch.uint8 or page.ndim != 1 or not page.is_contiguous() or page.device != self.device:
            raise ConfigError(f"a page is a run of bytes on {self.device}, not {page.dtype} on {page.device}")
        if page.data_ptr() % ALIGNMENT:
            raise ConfigError(f"a page begins on a multiple of {ALIGNMENT} bytes")
        if page.numel() < self.end_bytes:
            raise ConfigError(f"a page of {page.numel()} bytes has no room for {self.end_bytes}")
        if not uses_kernel(self.device):
            self.reference(page, into_page)
            return
        moves = kernel("packing")
        if self._table is None:
            self._table = moves.table(self.tensors, self.offsets, PIECE_BYTES)
        moves.move(self._table, page, into_page, PIECE_BYTES)

    def reference(self, page: torch.Tensor, into_page: bool) -> None:
        """What `gather` and `scatter` mean."""
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            values = tensor.view(-1).view(torch.uint8)
            place = page.narrow(0, offset, values.numel())
            (place if into_page else values).copy_(values if into_page else place)

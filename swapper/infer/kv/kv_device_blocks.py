"""Copies a layer's keys and values to a device block by block, so that one layer may be larger than the device's memory.

[Note: blocks on a device] Each block of a layer has an image, as whole layers have (kv_device.py): it is filled from pages for its
turn, while the block before is attended over, and its memory is the next one's then. All rows are in pages. New ones are written
there by the host, once the device has computed them, and attention gets them from the model's tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from swapper.device.copies import PageCopy, Uploads
from swapper.device.device_memory import DEVICE_ALIGNMENT_BYTES, DeviceStorage, HostSide, Span
from swapper.device.model_device import DeviceBudget
from swapper.device.tier import DeviceCopy, DeviceTier
from swapper.errors import BudgetError
from swapper.infer.kv.kv_attention import MAX_BLOCK_TOKENS
from swapper.infer.kv.kv_blocks import MAX_BLOCK_BYTES, BlockRows, spans
from swapper.infer.kv.kv_rows import KeyValueFile, Rows
from swapper.infer.kv.kv_size import CacheSize
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.runtime.counters import Counters
from swapper.runtime.sizes import format_bytes

BLOCKS_THERE = 2
"""One is attended over, and the next one copied."""


@dataclass(slots=True)
class _BlockImage:
    """Tokens [begin, end) of a layer, and their image on the device."""

    image: DeviceCopy
    begin: int = 0
    end: int = 0


class DeviceBlockRows(BlockRows):
    """Owns the images of one cache's blocks, and their copies. A layer that is read whole (`layer.keys`) is in host memory.

    Args:
        budget: of the device.
        host: memory of the frames.
        counters: to update.
        pager, store, size, layers: see `HostRows`.
    """

    def __init__(
        self,
        budget: DeviceBudget,
        host: HostSide,
        counters: Counters,
        pager: Pager,
        store: KeyValueFile,
        size: CacheSize,
        layers: Mapping[int, Rows],
    ) -> None:
        super().__init__(pager, store, size, layers)
        self._budget = budget
        self._uploads = Uploads(budget.device, pager, host.of, counters)
        self._tier = DeviceTier(budget.device, self._uploads, budget.nbytes, counters)
        self._blocks: dict[Rows, dict[int, _BlockImage]] = {}  # by number
        self._order: list[DeviceCopy] = []

    # --- a turn -------------------------------------------------------------------------------------------------------

    def expect(self, added: int) -> None:
        """Expect that images are filled in the order of layers and blocks, from the first page on that is not copied yet."""
        self._uploads.max_in_flight = max((self._size.frame_count - self._size.layer_count - 1) // 2, 1)
        images = []
        for index in sorted(self._layers):
            rows = self._layers[index]
            self._fit(rows)
            images += [block.image for _, block in sorted(self._blocks[rows].items())]
        if images != self._order:
            self._order = images
            self._tier.expect(images)
        self._expect_copies(images)

    def room(self, rows: Rows, added: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        self.leased, self._access = rows, Access(None, ())
        self._fit(rows)  # no copy reads what is written now
        for first, last in spans(rows.end, rows.end + added, self._block_tokens(rows)):
            with self._leased(rows.access(first, first, last - first)):
                yield first, last, rows.section.memory

    def blocks(self, rows: Rows, begin: int, end: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        tokens = self._image_tokens(rows)
        for first, last in spans(begin, end, tokens):
            number = first // tokens
            block = self._blocks[rows][number]
            image, base = block.image, block.begin
            with self._one_error():
                self._tier.lease(image)
            try:
                yield first - base, last - base, image.storage.read(0, image.storage.nbytes)
            finally:
                image.waits = True
                self._tier.release(image)
                self._set_span(rows, block, *_span(rows, number, tokens))
                image.waits = False
                self._tier.prepare_next()
        self._check_saved(rows)

    # --- between turns ------------------------------------------------------------------------------------------------

    def settle(self, rows: Rows) -> None:
        super().settle(rows)
        for block in self._blocks.get(rows, {}).values():
            self._tier.invalidate(block.image)  # waits for copies of pages, which may change then

    def remove(self, rows: Rows) -> None:
        for block in self._blocks.pop(rows, {}).values():
            self._tier.remove(block.image)
        self._uploads.finish()

    def close(self) -> None:
        super().close()
        for rows in list(self._blocks):
            self.remove(rows)
        self._tier.close()
        self._uploads.close()

    # --- images -------------------------------------------------------------------------------------------------------

    def _fit(self, rows: Rows) -> None:
        """Have blocks of all tokens of a layer. Those that have others now are filled again."""
        tokens = self._image_tokens(rows)
        blocks = self._blocks.setdefault(rows, {})
        numbers = range(rows.first // tokens, -(-rows.end // tokens) if rows.end > rows.first else 0)
        for number in blocks.keys() - set(numbers):
            self._tier.remove(blocks.pop(number).image)
        for number in numbers:
            block = blocks.get(number)
            if block is None:
                block = blocks[number] = _BlockImage(self._new_image(rows, number))
            span = _span(rows, number, tokens)
            if span != (block.begin, block.end):
                self._tier.invalidate(block.image)
                self._set_span(rows, block, *span)

    def _new_image(self, rows: Rows, number: int) -> DeviceCopy:
        with torch.inference_mode(False):
            storage = DeviceStorage(self._budget.device, DEVICE_ALIGNMENT_BYTES)
        storage.free()
        image = DeviceCopy(f"block {number} of the keys and values of layer {rows.index}", storage, [], stays=False)
        self._tier.add(image)
        return image

    def _set_span(self, rows: Rows, block: _BlockImage, begin: int, end: int) -> None:
        """Have the image of a block, without memory now, be filled with tokens [begin, end) from now on."""
        if (begin, end) != (block.begin, block.end):
            block.begin, block.end, row = begin, end, rows.shape.nbytes
            block.image.copies = _copies_of(rows, begin * row, end * row)
            block.image.storage.set_size((end - begin) * row)

    def _image_tokens(self, rows: Rows) -> int:
        """Return how many tokens a block has.

        Raises:
            BudgetError: not even blocks of one token fit.
        """
        row, nbytes = rows.shape.nbytes, self._budget.nbytes
        smallest = BLOCKS_THERE * row
        if nbytes < smallest:
            raise BudgetError(
                f"device_memory={format_bytes(nbytes)} of a KVCache is too small for {BLOCKS_THERE} blocks of one token, of "
                f"{format_bytes(row)} each: at least {format_bytes(smallest)} ({smallest} bytes) are needed",
                option="device_memory",
                smallest_bytes=smallest,
            )
        return min(nbytes // smallest, max(MAX_BLOCK_BYTES // row, 1), MAX_BLOCK_TOKENS)


def _span(rows: Rows, number: int, tokens: int) -> tuple[int, int]:
    """Return which tokens of a layer a block of `tokens` tokens has."""
    return max(number * tokens, rows.first), min((number + 1) * tokens, rows.end)


def _copies_of(rows: Rows, begin: int, end: int) -> list[PageCopy]:
    """Return how an image is filled with bytes [begin, end) of a layer."""
    found = []
    for page in rows.section.pages_of(begin, end):
        first, last = max(page.offset, begin), min(page.offset + page.nbytes, end)
        access = Access(("kv", page.index, begin), (page.index,), in_frames=frozenset({page.index}))
        found.append(PageCopy(page, access, (Span(first - page.offset, last - first, first - begin),)))
    return found

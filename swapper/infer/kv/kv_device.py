"""Has keys and values on a device: of some layers for good, as far as a budget goes, of the others for their turns.

[Note: rows on a device] A layer's image has the layout of its section, so a token is at the same place in both. The rows of a
layer that stays are in its image alone. Those of the others are in pages, from which the image is filled for each turn, while the
layer before computes ([Note: before its kernels], device/tier.py). Their new rows are copied to pages behind the kernels that
make them. A few rows are put together for that, so that the image can go when its turn ends; of many, as in a prefill, the image
stays until they are there: it has little else.

[Note: which layers stay] Those that do not are spread over the model, so that copying and computing alternate. An image grows by
steps; when all do not fit any more, one more layer is moved to pages, which are its home from then on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from swapper.device.copies import Downloads, PageCopy, Uploads
from swapper.device.device import OUT_OF_MEMORY
from swapper.device.device_memory import DEVICE_ALIGNMENT_BYTES, DeviceStorage, HostSide, Span
from swapper.device.model_device import DeviceBudget
from swapper.device.tier import DeviceCopy, DeviceTier
from swapper.errors import BudgetError, DeviceError
from swapper.infer.kv.kv_home import HostRows
from swapper.infer.kv.kv_rows import KeyValueFile, Rows, has_content
from swapper.infer.kv.kv_size import CacheSize
from swapper.io.tensor_bytes import round_up
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.paging.section import Page
from swapper.runtime.counters import Counters
from swapper.runtime.sizes import format_bytes

PACKED_BYTES = 1 << 20
"""New rows of at most this many bytes are put together for their copy to pages: a choice."""
DOWN_SHARE, MAX_DOWN_BYTES = 16, 8 << 20
"""Such bytes on their way take a 16th of the budget, but no more than this."""
GROWTH = 8
"""An image has room for about an 8th more tokens than it needs."""
MIN_FRAMES = 4
"""In addition to the last pages: for one copy up, one down, and one page that is taken."""
GOLDEN_RATIO = 0.6180339887
"""Its multiples, without their whole parts, are spread evenly, however many there are."""


class DeviceRows(HostRows):
    """Owns the images of one cache, their copies from pages and to pages.

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
        self._device = budget.device
        self._host = host
        self._budget = budget
        down_bytes = min(budget.nbytes // DOWN_SHARE, MAX_DOWN_BYTES)
        self._image_bytes = budget.nbytes - down_bytes
        self._uploads = Uploads(self._device, pager, host.of, counters)
        self._downloads = Downloads(self._device, counters, down_bytes)
        self._tier = DeviceTier(self._device, self._uploads, self._image_bytes, counters)
        self._order: list[DeviceCopy] = []
        self._pages_down = 0  # on their way to host memory
        self._images_held = 0  # by such copies
        self._max_pages_down = 1

    # --- a turn -------------------------------------------------------------------------------------------------------

    def expect(self, added: int) -> None:
        """Expect that images are filled in the order of layers, from the first page on that is not copied yet."""
        self._check_frames()
        self._place(added)
        images = [image for index in sorted(self._layers) if (image := self._layers[index].image) is not None]
        if images != self._order:
            self._order = images
            self._tier.expect(images)
        self._expect_copies([image for image in images if not (image.stays and image.is_filled)])

    def lease(self, rows: Rows, added: int) -> torch.Tensor:
        image = _image(rows)
        self._downloads.collect()
        if (rows.end + added) * rows.shape.nbytes > image.storage.nbytes:
            self._grow(rows, added)
        self._lease(image)
        self.leased = rows
        image.storage.wait_for_users()
        self._check_saved(rows)
        return self.memory(rows)

    def memory(self, rows: Rows) -> torch.Tensor:
        storage = _image(rows).storage
        return storage.read(0, storage.nbytes)

    def keep(self, rows: Rows, end: int) -> None:
        image = _image(rows)
        image.storage.note_update()
        if not image.stays:
            self._send_down(rows, end)
            rows.saved_end = end

    def release(self) -> Rows | None:
        rows, self.leased = self.leased, None
        if rows is not None:
            self._end_use(rows)
        return rows

    # --- between turns ------------------------------------------------------------------------------------------------

    @contextmanager
    def using(self, rows: Rows, begin: int, end: int, added: int = 0) -> Iterator[torch.Tensor]:
        if self._is_here(rows):
            with self._tier.changing(_image(rows)):
                yield self.memory(rows)
            if added:
                rows.saved_end = 0
        else:
            self._downloads.finish()
            with super().using(rows, begin, end, added) as memory:
                yield memory
            if added:
                rows.saved_end = end + added

    def settle(self, rows: Rows) -> None:
        self._downloads.finish()
        super().settle(rows)
        if not self._is_here(rows) or not rows.count:
            image = _image(rows)
            self._tier.drop(image)
            self._tier.invalidate(image)  # waits for copies of pages, which may change then

    def add(self, rows: Rows) -> None:
        with torch.inference_mode(False):
            storage = DeviceStorage(self._device, DEVICE_ALIGNMENT_BYTES)
        storage.free()
        storage.set_size(0)
        rows.image = image = DeviceCopy(f"keys and values of layer {rows.index}", storage, [], stays=True)
        image.before_eviction = partial(self._save, rows)
        rows.saved_end = rows.end
        self._tier.add(image)
        self.renew(rows)

    def renew(self, rows: Rows) -> None:
        image = _image(rows)
        if not image.storage.is_allocated:
            image.copies = self._copies_of(rows)
            image.storage.set_size(max(image.storage.nbytes, self._size_for(rows, rows.end)))

    def remove(self, rows: Rows) -> None:
        image, rows.image = _image(rows), None
        image.before_eviction = lambda: None
        self._tier.remove(image)
        self._uploads.finish()

    def close(self) -> None:
        super().close()
        with contextlib.suppress(DeviceError):
            self._downloads.finish()
        for rows in self._layers.values():
            if rows.image is not None:
                self.remove(rows)
        self._tier.close()
        self._uploads.close()

    # --- images -------------------------------------------------------------------------------------------------------

    def _is_here(self, rows: Rows) -> bool:
        """Return whether all rows are in an image that stays."""
        image = _image(rows)
        return image.stays and image.is_filled

    def _copies_of(self, rows: Rows) -> list[PageCopy]:
        """Return how the image is filled with what is in pages."""
        row = rows.shape.nbytes
        end = rows.saved_end * row
        pages = rows.section.pages_of(rows.first * row, end)
        return [_copy_of(page, min(page.nbytes, end - page.offset)) for page in pages]

    def _size_for(self, rows: Rows, tokens: int) -> int:
        """Return how many bytes an image has for `tokens` tokens."""
        step = max(1 << tokens.bit_length() >> (GROWTH.bit_length() - 1), 16)
        most = min(rows.capacity, self._image_bytes // rows.shape.nbytes)
        return max(min(round_up(tokens, step), most), tokens) * rows.shape.nbytes

    def _lease(self, image: DeviceCopy) -> None:
        while self._images_held and not self._tier.has_room(image):
            self._downloads.wait_for_oldest()
        with self._one_error():
            self._tier.lease(image)

    def _end_use(self, rows: Rows) -> None:
        """End a lease of an image. If it was the last one, what is in pages by now fills it next time."""
        image = _image(rows)
        is_over = image.leases == 1 and not image.stays
        image.waits = is_over
        self._tier.release(image)
        if is_over:
            self.renew(rows)
            image.waits = False
            self._tier.prepare_next()

    def _grow(self, rows: Rows, added: int) -> None:
        """Have room for `added` more tokens in the image."""
        self._place(added, rows)
        image, row = _image(rows), rows.shape.nbytes
        while image.leases:  # copies to pages use it
            self._downloads.wait_for_oldest()
        begin, nbytes = rows.first * row, (rows.end - rows.first) * row
        kept = None
        if self._is_here(rows):
            try:
                with self._tier.changing(image) as storage:
                    kept = storage.read(begin, nbytes).clone()
            except OUT_OF_MEMORY:
                self._tier.evict(image)
        self._tier.drop(image)
        image.copies = [] if kept is not None else self._copies_of(rows)
        image.storage.set_size(self._size_for(rows, rows.end + added))
        if kept is None:
            return
        try:
            self._lease(image)
        except BaseException:
            self._write(rows, begin, kept)
            image.copies = self._copies_of(rows)
            raise
        image.storage.read(begin, nbytes).copy_(kept)
        image.storage.note_update()
        self._tier.release(image)

    def _place(self, added: int, only: Rows | None = None) -> None:
        """Move layers to pages until the images of those that stay fit, once each, or `only` one, has `added` tokens more.

        Raises:
            BudgetError: not even one layer fits.
        """
        sizes = {
            index: max(
                _image(rows).storage.nbytes, self._size_for(rows, rows.end + (added if only in (None, rows) else 0))
            )
            for index, rows in self._layers.items()
        }
        largest = max(sizes.values())
        if largest > self._image_bytes:
            smallest = round_up(largest + min(largest // (DOWN_SHARE - 1) + DOWN_SHARE, MAX_DOWN_BYTES), 1 << 10)
            raise BudgetError(
                f"device_memory={format_bytes(self._budget.nbytes)} of a KVCache is too small: the keys and values of one layer "
                f"must be on {self._device} together: at least {format_bytes(smallest)} ({smallest} bytes) are needed now, and "
                "twice as much to copy the next layer meanwhile",
                option="device_memory",
                smallest_bytes=smallest,
            )
        staying = [index for index in sizes if _image(self._layers[index]).stays]
        for index in sorted(staying, key=lambda index: (index + 1) * GOLDEN_RATIO % 1):
            passing = 1 if len(staying) == len(sizes) else 2  # one that grows; or one that computes, and the next one
            if sum(sizes[one] for one in staying) + passing * largest <= self._image_bytes:
                return
            staying.remove(index)
            self._tier.evict(_image(self._layers[index]))

    # --- to pages -----------------------------------------------------------------------------------------------------

    def _save(self, rows: Rows) -> None:
        """Copy the rows of an image that stays to pages, and wait for that: the image goes."""
        image = _image(rows)
        if image.is_filled:
            begin = max(rows.first, rows.saved_end) * rows.shape.nbytes
            image.storage.wait_on_current_stream()
            image.storage.wait_for_users()
            self._write(rows, begin, image.storage.read(begin, max(rows.end * rows.shape.nbytes - begin, 0)))
        image.copies = self._copies_of(rows)

    def _write(self, rows: Rows, begin: int, source: torch.Tensor) -> None:
        """Write bytes of the device's memory to a section, from byte `begin` on, up to the end of the rows."""
        row = rows.shape.nbytes
        for page in rows.section.pages_of(begin, begin + source.numel()):
            first, last = max(page.offset, begin), min(page.offset + page.nbytes, begin + source.numel())
            with self._pager.leased(_writing(page)):
                self._host.of(page)[first - page.offset : last - page.offset].copy_(
                    source[first - begin : last - begin]
                )
        rows.saved_end = max(rows.saved_end, (begin + source.numel()) // row)

    def _send_down(self, rows: Rows, end: int) -> None:
        """Queue the copy of tokens [rows.end, end) of the image to pages. The page of the last one stays leased."""
        row, before = rows.shape.nbytes, rows.last
        begin_byte, end_byte = rows.end * row, end * row
        is_held = end_byte - begin_byte > PACKED_BYTES
        pages = rows.section.pages_of(begin_byte, end_byte)
        for page in pages:
            while self._pages_down >= self._max_pages_down:
                self._downloads.wait_for_oldest()
            is_own = before is not None and before.pages == (page.index,)
            access = before if before is not None and is_own else self._lease_page(page)
            ended = [] if is_own or page is pages[-1] else [access]
            if page is pages[-1]:
                rows.last = access
                ended += [] if before is None or is_own else [before]
            self._send_page(
                rows, page, max(page.offset, begin_byte), min(page.offset + page.nbytes, end_byte), ended, is_held
            )

    def _send_page(self, rows: Rows, page: Page, begin: int, end: int, ended: list[Access], is_held: bool) -> None:
        """Queue the copy of bytes [begin, end) of an image to a page. Once it is over, `ended` are released.

        Args:
            is_held: the image stays until then.
        """
        image = _image(rows)
        source = image.storage.read(begin, end - begin)
        frame = self._host.of(page)[begin - page.offset : end - page.offset]
        self._pages_down += 1
        if is_held:
            self._images_held += 1
            image.leases += 1
        arrived, lost = (partial(one, rows, ended, is_held) for one in (self._arrived, self._lost))
        event = self._downloads.send([(frame, source if is_held else source.clone())], arrived, lost, not is_held)
        self._uploads.follow(event)

    def _arrived(self, rows: Rows, ended: list[Access], is_held: bool) -> None:
        """Note that a copy to a page is over, and release what was leased for it."""
        self._pages_down -= 1
        for access in ended:
            self._pager.release(access, access.writes)
        if is_held:
            self._images_held -= 1
            self._end_use(rows)

    def _lost(self, rows: Rows, ended: list[Access], is_held: bool, error: BaseException) -> None:
        """Note that the device failed before such a copy was over."""
        self._pages_down -= 1
        for access in ended:
            self._pager.release(access)
        if is_held:
            self._images_held -= 1
            _image(rows).leases -= 1

    def _lease_page(self, page: Page) -> Access:
        access = _writing(page)
        self._acquire(access)
        return access

    def _check_frames(self) -> None:
        """Raise BudgetError unless there are frames for the last page of each layer, and for copies."""

        def needed(page_bytes: int) -> int:
            return MIN_FRAMES

        if not self._size.has(needed):
            raise self._size.too_small(needed, "copies")
        frames, layers = self._size.frame_count, self._size.layer_count
        self._uploads.max_in_flight = (frames - layers - 1) // 2
        self._max_pages_down = (frames - layers - 1) // 3


def _image(rows: Rows) -> DeviceCopy:
    assert rows.image is not None
    return rows.image


def _copy_of(page: Page, nbytes: int) -> PageCopy:
    """Return how the first bytes of a page are copied to their place in an image."""
    access = Access(("kv", page.index), (page.index,), in_frames=frozenset({page.index}))
    return PageCopy(page, access, (Span(0, nbytes, page.offset),))


def _writing(page: Page) -> Access:
    """Return the access to a page that rows are copied to."""
    only = frozenset({page.index})
    return Access(None, (page.index,), frozenset() if has_content(page) else only, only, in_frames=only)

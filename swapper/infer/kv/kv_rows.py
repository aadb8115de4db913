"""Describes the rows of keys and values, and has the files that they are in: a scratch file, and a saved context.

[Note: rows] A layer's memory has a row for each token, with its keys and then its values, each of shape (batch, heads, width). So
a new token changes only the last page of a layer, and attention gets all of them as two strided tensors, without a copy. The last
page stays leased from step to step: it is written once, when it is full, and not at each token.

[Note: padding] One head's keys of all tokens lie a row apart. If that is a multiple of 2 KiB they share a few sets of a processor's
first cache, and push each other out: attention of one query takes up to 1.8 times as long. So such rows have a few more bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from swapper import _C
from swapper.device.tier import DeviceCopy
from swapper.errors import CheckpointError
from swapper.formats.sources import FileStamp
from swapper.io.drives import Drives
from swapper.io.engines import Engine, Transfer
from swapper.paging.layout import ExternalBytes
from swapper.paging.residency import CLEAN, DIRTY, WRITING
from swapper.paging.schedule import Access
from swapper.paging.section import EXTERNAL, Page, Section
from swapper.paging.store.page_files import ExternalFiles
from swapper.paging.store.scratch import ScratchFile

PADDED_BYTES = 2 << 10
"""Rows of a multiple of it are padded: measured of 512 bytes to 16 KiB, multiples of 1 KiB are not slower. [Note: padding]"""
PADDING_BYTES = 32
"""Is enough: 64 and 128 are not faster. A multiple of each dtype's size, and of what kernels want rows to begin at."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """The keys and values of one token in one layer: shapes (batch, heads, width), of one dtype. [Note: rows]

    `padding`: bytes of zeros behind them, which make no other shape. [Note: padding]
    """

    batch: int
    key: tuple[int, int]
    value: tuple[int, int]
    dtype: torch.dtype
    padding: int = field(default=0, compare=False)

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> RowShape:
        """Return the shape of rows for keys and values of shape (batch, heads, tokens, width)."""
        key, value = (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
        return cls(keys.shape[0], key, value, keys.dtype).padded()

    def padded(self) -> RowShape:
        """Return the same with the padding that is best."""
        return replace(self, padding=0 if self.numel * self.dtype.itemsize % PADDED_BYTES else PADDING_BYTES)

    def with_batch(self, batch: int) -> RowShape:
        return replace(self, batch=batch).padded()

    @property
    def key_numel(self) -> int:
        return self.batch * self.key[0] * self.key[1]

    @property
    def numel(self) -> int:
        return self.key_numel + self.batch * self.value[0] * self.value[1]

    @property
    def nbytes(self) -> int:
        """From one row to the next."""
        return self.numel * self.dtype.itemsize + self.padding

    def write(self, memory: torch.Tensor, begin: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the rows of some tokens, all of their bytes.

        Args:
            memory: uint8, of a section.
            begin: of the tokens, from the first row of the section on.
            keys, values: of shape (batch, heads, tokens, width).
        """
        end = begin + keys.shape[2]
        for whole, new in zip(self.views(memory, begin, end), (keys, values), strict=True):
            whole.copy_(new)
        if self.padding:
            memory[begin * self.nbytes : end * self.nbytes].view(-1, self.nbytes)[:, -self.padding :].zero_()

    def views(self, memory: torch.Tensor, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of tokens [begin, end), of shape (batch, heads, tokens, width), as views of `memory`.

        Args:
            memory: uint8, of a section.
            begin, end: tokens, from the first row of the section on.
        """
        flat = memory[: memory.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        parts = ((self.key, 0), (self.value, self.key_numel))
        row = self.nbytes // self.dtype.itemsize
        keys, values = (
            flat.as_strided(
                (self.batch, heads, end - begin, width), (heads * width, width, row, 1), begin * row + offset
            )
            for (heads, width), offset in parts
        )
        return keys, values


class Rows:
    """The tokens of one layer: rows [begin, end) of its section.

    Args:
        index: of the layer.
        shape: of a row.
        section: has the rows; paged.
        kept: how many tokens stay once their step is over; None: all.

    Attributes:
        over: tokens before this one are forgotten.
        last: the lease of the last page, which stays. [Note: rows]
        unchecked: of a saved context, until the checksum of all of it was compared.
        image: of these rows on a device, if there is one (kv_device.py).
        saved_end: tokens before this one are in pages; those behind are in the image alone.
    """

    def __init__(self, index: int, shape: RowShape, section: Section, kept: int | None) -> None:
        self.index = index
        self.shape = shape
        self.section = section
        self.kept = kept
        self.begin = self.end = 0
        self.over = self.saved_end = 0
        self.image: DeviceCopy | None = None
        self.last: Access | None = None
        self.unchecked: SavedRows | None = None

    @property
    def count(self) -> int:
        return self.end - self.begin

    @property
    def first(self) -> int:
        """The first token that is not forgotten: an error in this step takes back what it has added."""
        return min(self.over, self.begin)

    @property
    def capacity(self) -> int:
        return self.section.plan.nbytes // self.shape.nbytes

    def cut(self, end: int) -> None:
        """Forget the tokens from `end` on."""
        self.end, self.saved_end = end, min(self.saved_end, end)

    def access(self, begin: int, end: int, added: int, key: object = None) -> Access:
        """Return the access to tokens [begin, end), and to `added` more that are written behind them."""
        row = self.shape.nbytes
        pages = self.section.pages_of(begin * row, (end + added) * row)
        written = self.section.indices_of(end * row, (end + added) * row)
        fresh = frozenset(page.index for page in pages if page.index in written and not has_content(page))
        return Access(key, tuple(page.index for page in pages), fresh, frozenset(written))

    def next_access(self, added: int, before: int = 0) -> Access:
        """Return the access of a step that adds `added` tokens, after one that adds `before`."""
        begin, end = self.begin, self.end + before
        if before and self.kept is not None:
            begin = max(begin, end - self.kept)
        found = self.access(begin, end, added, ("kv", self.index))
        made = self.access(self.begin, self.end, before).fresh if before else frozenset()
        return replace(found, fresh=found.fresh - made)


def has_content(page: Page) -> bool:
    """Return whether `page` was written since it was made, or forgotten."""
    return page.location is not None or (page.residency in (CLEAN, DIRTY, WRITING) and not page.fresh)


@dataclass(frozen=True)
class SavedRows:
    """The rows of one layer in a file: `count` of them, of `shape`, at `place`. `crc32`: of their bytes; 0: not known."""

    shape: RowShape
    count: int
    place: ExternalBytes
    crc32: int


class KeyValueFile(ScratchFile):
    """A scratch file, and a saved context whose pages are read in place until they change. The engine outlives it.

    Args:
        engine, directory: of the scratch file.
        saved: path of the saved context, and its status when its header was read; None: there is none.

    Raises:
        IoError: the directory refuses, or the saved context cannot be opened.
        CheckpointError: it was replaced since its header was read.
    """

    def __init__(self, engine: Engine, directory: Path, saved: tuple[Path, FileStamp] | None) -> None:
        super().__init__(engine, Drives((directory,)), ())
        self.first_reads: dict[Page, Transfer] = {}  # tickets, of pages of the saved context
        self._saved: ExternalFiles | None = None
        self._descriptor = -1
        self._stamp: FileStamp | None = None
        if saved is None:
            return
        path, self._stamp = saved
        try:
            self._saved = ExternalFiles([path])
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.check_unchanged()
        except BaseException:
            self.close()
            raise

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the saved context was written to. It may be removed, or replaced under its name."""
        if self._stamp is not None and FileStamp.of(self._descriptor) != self._stamp:
            raise CheckpointError(
                "the saved context of a KVCache was changed while it is in use: make the cache again from a whole copy"
            )

    def read(self, page: Page, address: int, after: Transfer | None = None) -> Transfer:
        if page.location != EXTERNAL or self._saved is None:
            return super().read(page, address, after)
        known = self._crc32_of(page)
        ticket = self._engine.read(
            self._saved.file(page),
            page.stored_offset,
            address,
            page.stored_bytes,
            after=after,
            checksum=known is None,
            expected=known,
        )
        if known is None:
            self.first_reads[page] = ticket
        return ticket

    def _crc32_of(self, page: Page) -> int | None:
        """Return the CRC-32 of the first read of `page`; None if there was none, or it failed."""
        ticket = self.first_reads.get(page)
        return ticket.crc32 if ticket is not None and ticket.done and ticket.error is None else None

    def file_of(self, page: Page) -> _C.File | None:
        if page.location == EXTERNAL and self._saved is not None:
            return self._saved.file_of(page)
        return super().file_of(page)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._saved is not None:
            self._saved.close()
        super().close()

"""The protocol of page stores, and the record of pages that were found damaged.

Stores are: swap files, a scratch file, both as one, a checkpoint's files that are only read, and the dry run's, which
only counts. They share one contract (tests/contract/test_page_stores.py).
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from swapper._C import File
from swapper.errors import ChecksumError, IoError
from swapper.io.engines import Transfer
from swapper.paging.section import Page

CUT_OFF = "unexpected end of file"
"""The engine's message if a file ends before the page does (csrc/io/progress.cpp)."""
MAX_NAMED = 3
"""Tensors of a page that a message names."""


class PageStore(Protocol):
    """Reads and writes pages. Called with the pager's lock held; nothing here waits for a transfer."""

    def read(self, page: Page, address: int, after: Transfer | None = None) -> Transfer:
        """Submit a read of the newest content of `page` into memory at `address`, to begin once `after` is done.

        Args:
            page: with a `location`.
            address: of page-locked memory, `page.nbytes` long.
            after: a transfer in flight, of any engine; None: begin at once.

        Raises:
            InvariantError: nothing was written of it.
        """

    def write(self, page: Page, address: int) -> Transfer:
        """Submit a write of `page` from memory at `address`.

        What the last commit names stays whole. Newer content may be overwritten: after a write that fails, the page stays in
        memory until another succeeds, or `roll_back`.
        """

    def written_to(self, page: Page) -> File | None:
        """Return the file that the write in flight goes to."""
        return None

    def written(self, page: Page, ticket: Transfer) -> None:
        """Note that the write of `ticket` succeeded: `page.location` names its file from now on."""

    def explain(self, page: Page, error: IoError) -> IoError:
        """Return the error to raise for a read of `page` that failed with `error`."""
        return error

    def file_of(self, page: Page) -> File | None:
        """Return the file to read from `page.stored_offset` when the addresses of a cold page are touched; None: there is none."""


@dataclass
class _Damage:
    location: int | None
    error: ChecksumError
    again: Transfer | None = None  # ticket of the newest read since

    @property
    def is_over(self) -> bool:
        """Whether it was read without error since: the first read was to blame, not the drive."""
        return self.again is not None and self.again.done and self.again.error is None


class Damages:
    """Pages that were found changed, and the file of each. `note` and `read_again` are called with the pager's lock held.

    The engine compares what it reads with the checksum of what was written ([Note: checksums], swap_files.py). It does not compare
    reads of a cold window past the guard (csrc/memory/fault.h), nor tensors of a `state_dict` that are mapped.
    """

    def __init__(self) -> None:
        self._found: dict[Page, _Damage] = {}

    def note(self, page: Page, error: ChecksumError) -> None:
        self._found[page] = _Damage(page.location, error)

    def read_again(self, page: Page, ticket: Transfer) -> None:
        """Note another read of `page`, by `ticket`."""
        if page in self._found:
            self._found[page].again = ticket

    def written(self, page: Page) -> None:
        """Note that `page` was written to its `location`."""
        if page in self._found and self._found[page].location == page.location:
            del self._found[page]

    def check(self, places: Mapping[Page, int | None] | None = None) -> None:
        """Raise the ChecksumError of a page that is damaged in its file of `places`. Any thread may call this.

        Args:
            places: the file of each page; None: those that have the newest content.
        """
        for page, damage in list(self._found.items()):
            place = page.location if places is None else places.get(page)
            if place == damage.location and not damage.is_over:
                raise damage.error


def as_changed(page: Page, error: IoError, remedy: str) -> ChecksumError | None:
    """Return the error for a read of `page` that failed because its bytes were changed; None if it failed otherwise.

    Args:
        page: that was read.
        error: of the read.
        remedy: what the user can do, a sentence.
    """
    if error.errno != errno.EBADMSG and error.detail != CUT_OFF:
        return None
    names = page.tensors
    named = f"{', '.join(names[:MAX_NAMED])}{' and more' if len(names) > MAX_NAMED else ''}"
    detail = (
        f"{error.detail}: {named}, page {page.index} of {page.section.plan.where}. The drive, memory or another program changed "
        f"them: see the system's log, and check the drive. {remedy}"
    )
    return ChecksumError(error.op, error.path, page.stored_offset, page.stored_bytes, errno.EBADMSG, detail)

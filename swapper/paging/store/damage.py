"""Pages that were read and are not what was written: what to say of them, and that nothing is made of them.

The engine compares what it reads with the checksum of what was written ([Note: checksums], swap_files.py). What passes by it is not
compared: reads of a window's absent memory past the guard (csrc/memory/fault.h), and tensors of a `state_dict` that are mapped.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass

from swapper.errors import ChecksumError, IoError
from swapper.io.engines import Transfer
from swapper.paging.section import Page

CUT_OFF = "unexpected end of file"
"""What the engine says where a file ends before the page does (csrc/io/progress.cpp)."""
NAMED = 3
"""So many tensors of a page are named."""


@dataclass
class _Damage:
    location: int | None
    error: ChecksumError
    again: Transfer | None = None  # ticket of the newest read since

    @property
    def is_over(self) -> bool:
        """Whether it was read well since: what read it first was to blame, not the drive."""
        return self.again is not None and self.again.done and self.again.error is None


class Damages:
    """Which pages were found to be changed, and where. `note` and `read_again` are called with the pager's lock held."""

    def __init__(self) -> None:
        self._found: dict[Page, _Damage] = {}

    def note(self, page: Page, error: ChecksumError) -> None:
        self._found[page] = _Damage(page.location, error)

    def read_again(self, page: Page, ticket: Transfer) -> None:
        """`page` is read once more, by `ticket`."""
        if page in self._found:
            self._found[page].again = ticket

    def written(self, page: Page) -> None:
        """`page` was written to its `location`."""
        if page in self._found and self._found[page].location == page.location:
            del self._found[page]

    def check(self, places: Mapping[Page, int | None] | None = None) -> None:
        """Any thread may call this.

        Args:
            places: in which file each page is looked for; None: in those that have the newest content.

        Raises:
            ChecksumError: one of them is where it was found to be changed.
        """
        for page, damage in list(self._found.items()):
            place = page.location if places is None else places.get(page)
            if place == damage.location and not damage.is_over:
                raise damage.error


def as_changed(page: Page, error: IoError, remedy: str) -> ChecksumError | None:
    """Return what to raise where a read of `page` failed because of other bytes than were written; None if that is not why."""
    if error.errno != errno.EBADMSG and error.detail != CUT_OFF:
        return None
    names = page.tensors
    named = f"{', '.join(names[:NAMED])}{' and more' if len(names) > NAMED else ''}"
    detail = (
        f"{error.detail}: {named}, page {page.index} of {page.section.plan.where}. The drive, memory or another program changed "
        f"them: see the system's log, and check the drive. {remedy}"
    )
    return ChecksumError(error.op, error.path, page.stored_offset, page.stored_bytes, errno.EBADMSG, detail)

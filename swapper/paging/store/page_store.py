"""What the pager needs of the place where pages are stored: one contract (tests/contract/test_page_stores.py) for all of them.

Swap files, a scratch file, these as one, a checkpoint's files that are only read, and the dry run's store, which only counts.
"""

from __future__ import annotations

from typing import Protocol

from swapper._C import File
from swapper.errors import IoError
from swapper.io.engines import Transfer
from swapper.paging.section import Page


class PageStore(Protocol):
    """Where pages are read from and written to. Called with the pager's lock held; nothing here waits for a transfer."""

    def read(self, page: Page, address: int, after: Transfer | None = None) -> Transfer:
        """Submit a read of what was written of `page` last, into memory at `address`, once `after` is done.

        Raises:
            InvariantError: nothing was written of it.
        """
        ...

    def write(self, page: Page, address: int) -> Transfer:
        """Submit a write of `page` from memory at `address`. What was written before stays whole until `written`."""
        ...

    def written_to(self, page: Page) -> File | None:
        """Return the file that the write in flight goes to."""
        ...

    def written(self, page: Page, ticket: Transfer) -> None:
        """The write that `ticket` is of has ended well: `page.location` says where its content is from now on."""
        ...

    def explain(self, page: Page, error: IoError) -> IoError:
        """Return what to raise where a read of `page` failed with `error`."""
        ...

    def file_of(self, page: Page) -> File | None:
        """Return what answers reads of the page's addresses while it is away, from `page.stored_offset` on; None: nothing does."""
        ...

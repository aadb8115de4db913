"""Errors of the process' limits, which Python raises raw: of open files, threads and addresses."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from swapper.errors import LIMITS, IoError, SwapperError, remedy

_NO_THREAD = ("can't start new thread", os.strerror(errno.EAGAIN))
"""Messages of Python's and C++'s RuntimeError."""


@contextmanager
def naming_limits(op: str, path: str | os.PathLike[str] = "") -> Iterator[None]:
    """Return a context in which a limit that is reached is an error of ours, which names it.

    Args:
        op: what is done in it, as in `IoError`.
        path: of the file, if any.

    Raises:
        IoError: a limit is reached. All other errors are as they were.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, SwapperError) or error.errno not in LIMITS:
            raise
        raise IoError(op, str(path), 0, 0, error.errno) from error
    except RuntimeError as error:
        if str(error) not in _NO_THREAD:
            raise
        raise IoError(op, str(path), 0, 0, errno.EAGAIN, f"no thread can be started; {remedy(errno.EAGAIN)}") from error

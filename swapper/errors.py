"""Defines every error that swapper raises, so that a user can catch them by kind.

All derive from `SwapperError`. Each message names the thing, the place and the remedy. `IoError` is also an `OSError`,
so code written for ordinary files catches it too; the C++ engine raises it across the binding.
"""

from __future__ import annotations

import errno
import os
import traceback
from pathlib import Path

REMEDIES = {
    errno.ENOSPC: "make room on the drive",
    errno.EDQUOT: "make room within the quota of the drive",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.ENOENT: "a directory or file of this name is gone: put it back",
    errno.ENOTDIR: "a file stands where a directory was: move it away",
    errno.EISDIR: "a directory has this name: move it away",
    errno.ENOTEMPTY: "a directory has this name: move it away",
    errno.EEXIST: "something has this name: move it away",
    errno.ELOOP: "a link has this name: move it away",
    errno.EACCES: "get permission to write there",
    errno.EPERM: "get permission to write there",
    errno.EROFS: "the filesystem is read-only: mount it for writing",
    errno.EIO: "the drive failed: see the kernel's log (dmesg)",
    errno.ENODEV: "the drive is gone: see the kernel's log (dmesg)",
    errno.ENXIO: "the drive is gone: see the kernel's log (dmesg)",
    errno.ESTALE: "the file server has lost the file: mount it again",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close files of other programs: the system has too many open",
    errno.ENOMEM: "free some memory, or raise the limit of addresses (ulimit -v)",
    errno.EAGAIN: "raise the limits of threads (ulimit -u) and of addresses (ulimit -v)",
    errno.ECANCELED: "raise the limit of threads (ulimit -u): the kernel had none for io_uring",
    errno.ETXTBSY: "another program uses the file: end it",
    errno.EBUSY: "another program uses the file: end it",
    errno.ENAMETOOLONG: "choose a shorter name",
}
"""Remedies of system errors, by errno."""

LIMITS = (errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.ENOMEM, errno.ECANCELED)
"""System errors whose remedy is outside of the program: every message names it."""


def remedy(number: int | None) -> str:
    """Return the remedy of a system error, given its errno."""
    return REMEDIES.get(number or 0, "remove its cause")


class SwapperError(Exception):
    """Base of all of swapper's errors."""

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the message, which names the remedy, and the user's own lines that led to it."""
        frames = [frame for frame in traceback.extract_tb(self.__traceback__) if not _is_inside(frame.filename)]
        return [f"{type(self).__name__}: {self}", "", *traceback.format_list(frames)]


_PACKAGES = (str(Path(__file__).parent), f"{os.sep}site-packages{os.sep}")


def _is_inside(filename: str) -> bool:
    """Return True for a file of swapper or of an installed package."""
    return any(part in filename for part in _PACKAGES)


class ConfigError(SwapperError, ValueError):
    """An option is unknown, out of range, or contradicts another one."""


class BudgetError(SwapperError, MemoryError):
    """The memory budget is too small; the message names the smallest that works, or how much is missing.

    Attributes:
        option: the budget: "host_memory" or "device_memory".
        smallest_bytes: the smallest budget that works, in bytes; None if it is not known.
        missing_bytes: what the budget lacks at least for what was in use when it ran out, in bytes; None if it is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        option: str = "host_memory",
        smallest_bytes: int | None = None,
        missing_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.option = option
        self.smallest_bytes = smallest_bytes
        self.missing_bytes = missing_bytes


class DirectoryError(SwapperError):
    """The swap directory is missing, not writable, full, in use by another run, or already holds a run."""


class UnsupportedError(SwapperError, TypeError):
    """This model or optimizer cannot be offloaded exactly; the message gives the reason and the remedy."""


class ColdParameterError(SwapperError, RuntimeError):
    """An operation needs the data of a cold parameter and is not supported on one; the message names the remedy."""


class StateError(SwapperError, RuntimeError):
    """The call does not fit the manager's state: closed, failed, in a forked child, or in the middle of a step."""


class CheckpointError(SwapperError):
    """A container or snapshot cannot be written, or is not what it claims to be."""


class DeviceError(SwapperError, RuntimeError):
    """An accelerator is missing, has too old a driver, or failed; or a tensor is on another device than its model."""

    @classmethod
    def at(cls, device: object, what: str, error: BaseException) -> DeviceError:
        """Return the error for an exception of `device` during `what`."""
        return cls(
            f"{device} failed at {what}: {error}. An error of an earlier kernel may come up here; if it stays, the device can be "
            "used again in a new process only"
        )


class InvariantError(SwapperError, AssertionError):
    """An invariant of swapper is broken: a bug in swapper. Please report it with the message."""


class IoError(SwapperError, OSError):
    """A transfer failed. Has everything needed to find out why.

    Attributes:
        op: "read", "write", "open", "sync", "allocate", "mlock", ...
        path: the file's path ("" if there is none).
        offset: byte offset in the file at which the transfer failed.
        nbytes: requested bytes.
        errno: the system's error number; 0 for an unexpected end of file or a cancelled operation.
    """

    _reason = ""

    def __init__(self, op: str, path: str, offset: int, nbytes: int, errno: int, detail: str = "") -> None:
        reason = self._reason or (os.strerror(errno) if errno else "failed")
        if errno in LIMITS and "ulimit" not in detail:
            detail = "; ".join([*([detail] if detail else []), remedy(errno)])
        size = f"at offset {offset}, {nbytes} bytes" if path else f"{nbytes} bytes"
        where = " ".join([*([repr(path)] if path else []), *([size] if nbytes or not path else [])])
        message = f"{op} of {where}: {reason}" + (f" ({detail})" if detail else "")
        super().__init__(errno, message)
        self.op = op
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.detail = detail

    def __str__(self) -> str:
        return str(self.args[1])


class ChecksumError(IoError):
    """Bytes differ from what was written: the drive, memory or another program changed them. `detail` names tensors.

    The step that needed them was not taken, and they enter no commit and no snapshot. errno is EBADMSG.
    """

    _reason = "these are not the bytes that were written"

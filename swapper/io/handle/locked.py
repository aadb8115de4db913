"""Allocates page-locked host tensors, with one registry for the whole process, shared by all handles.

A tensor's memory is an arena of its own. It returns to the system when the tensor and all its views are gone, freed or
not. Freeing earlier only removes it from the registry, so that no view is ever left without memory.
"""

from __future__ import annotations

import ctypes
import errno
import weakref

import torch

from swapper import _C
from swapper.errors import ConfigError, IoError

_HUGE_BYTES = 2 << 20  # a huge page of x86-64
_locked_bytes: dict[int, int] = {}
"""Address -> bytes. Changed only by single dict operations: a finalizer may run between any two."""


def new_locked_tensor(elements: int, dtype: torch.dtype, *, must_lock: bool = True) -> torch.Tensor:
    """Return a tensor of `elements` zeros in page-locked memory.

    Raises:
        ConfigError: a negative number of elements.
        IoError: there is no such memory, or, with `must_lock`, the system refuses to lock it.
    """
    if isinstance(elements, bool) or not isinstance(elements, int) or elements < 0:
        raise ConfigError(f"num_elem={elements!r} must be a number of elements, 0 or more")
    nbytes = elements * dtype.itemsize
    if nbytes == 0:
        return torch.empty(0, dtype=dtype)
    arena = _C.Arena(nbytes, huge_pages=nbytes >= _HUGE_BYTES)
    if must_lock and not arena.locked:
        reason = arena.lock_reason
        arena.close()
        remedy = "raise the limit (ulimit -l, LimitMEMLOCK=, docker --ulimit memlock=-1), or use strict=False"
        raise IoError("mlock", "", 0, nbytes, errno.ENOMEM, f"{reason}; {remedy}")
    memory = (ctypes.c_char * nbytes).from_buffer(arena.view(0, nbytes))
    address = arena.address
    arena.close()  # the view keeps the memory
    _locked_bytes[address] = nbytes
    weakref.finalize(memory, _forget, address).atexit = False
    return torch.frombuffer(memory, dtype=dtype)


def free_locked_tensor(tensor: torch.Tensor) -> bool:
    """Remove a tensor of `new_locked_tensor` from the registry; return False if it is not there."""
    return _forget(tensor.data_ptr())


def free_locked_address(address: int) -> bool:
    """As `free_locked_tensor`, by the address of the tensor's first byte."""
    return _forget(address)


def is_locked(tensor: torch.Tensor) -> bool:
    """Return True if the tensor, or its base, came from `new_locked_tensor` and is not freed."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    address = tensor.data_ptr()
    return any(base <= address < base + nbytes for base, nbytes in list(_locked_bytes.items()))


def _forget(address: int) -> bool:
    return _locked_bytes.pop(address, None) is not None

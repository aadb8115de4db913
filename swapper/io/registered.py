"""Host memory that CUDA knows, so that copies between it and a device are a single transfer by the device.

What the kernel alone has locked is copied once more by CUDA, into locked memory of its own, at a fraction of the speed. Memory is
registered once and for long, never for a transfer.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

logger = logging.getLogger("swapper.io")

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices


def register(address: int, nbytes: int) -> bool:
    """Registers host memory with CUDA. False, and a line in the log with the reason, where it is refused.

    Take it back by `unregister` before the memory goes.
    """
    if not torch.cuda.is_available():
        return False
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(cuda.cudaHostRegister(address, nbytes, _PORTABLE))
    if status == 0:
        return True
    with contextlib.suppress(
        RuntimeError
    ):  # the error stays behind for the next kernel's launch to find: let it be this one
        torch.zeros(1, device="cuda")
    logger.warning(
        "CUDA does not register %d bytes of host memory: error %d; copies to and from devices will be slow",
        nbytes,
        status,
    )
    return False


def unregister(address: int) -> None:
    """Ends a registration. No copy may be under way."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(cuda.cudaHostUnregister(address))
    if status != 0:
        logger.warning("CUDA does not end the registration of host memory: error %d", status)

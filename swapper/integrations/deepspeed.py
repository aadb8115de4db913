"""Puts swapper's engine behind DeepSpeed's `AsyncIOBuilder().load()`, `GDSBuilder().load()` and
`PinMemoryBuilder().load()`, and what DeepSpeed's fast checkpoints need besides behind `UtilsBuilder().load()`.

    import swapper.integrations.deepspeed
    swapper.integrations.deepspeed.install()      # before deepspeed.initialize

or, for an unchanged program, and all processes that it starts:

    python -m swapper.integrations.deepspeed train.py --deepspeed_config ds.json

DeepSpeed then builds no operator: neither a compiler nor libaio is needed. Every failure raises `swapper.IoError`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from swapper.errors import UnsupportedError
from swapper.io import AioHandle, GdsHandle
from swapper.io.files import Target
from swapper.io.handle.cufile import open_cufile
from swapper.io.handle.deepnvme import free_locked, is_locked, new_locked_tensor

logger = logging.getLogger("swapper.deepspeed")

AUTOSTART = "SWAPPER_DEEPSPEED"
"""An environment variable: processes install swapper when they import deepspeed."""
_BUILDERS = {
    "AsyncIOBuilder": "async_io",
    "GDSBuilder": "gds",
    "PinMemoryBuilder": "pin_memory",
    "UtilsBuilder": "utils",
}
_undo: list[tuple[object, str, object]] = []
_ABSENT = object()


def install() -> None:
    """Make DeepSpeed load swapper's operators from now on, in this process. A second call does nothing.

    Existing handles of DeepSpeed do not change: call it before `deepspeed.initialize`.

    Raises:
        UnsupportedError: deepspeed is not installed, or has no AsyncIOBuilder.
    """
    if _undo:
        return
    try:
        import deepspeed
        import deepspeed.ops.op_builder as builders
        from deepspeed.ops.op_builder.all_ops import ALL_OPS
    except ImportError as error:
        raise UnsupportedError(f"DeepSpeed cannot be imported: {error}") from error
    if not hasattr(builders, "AsyncIOBuilder"):
        raise UnsupportedError(f"DeepSpeed {deepspeed.__version__} has no AsyncIOBuilder: it is not supported")
    for name, operator in _BUILDERS.items():
        found = getattr(builders, name, None)
        if found is None:
            continue
        builder = _builder(operator)
        if getattr(found, "NAME", None) == operator:  # overridden itself, as programs may have imported it
            _set(found, "load", builder.load)
            _set(found, "is_compatible", builder.is_compatible)
        else:  # DeepSpeed's stand-in for missing features of this accelerator, shared by several names
            _replace(name, found, builder)
            _set_item(ALL_OPS, operator, builder())
    probed = vars(deepspeed.ops).get("__compatible_ops__")
    if probed is not None:
        for operator in _BUILDERS.values():
            _set_item(probed, operator, _is_compatible(operator))
    logger.info("DeepSpeed %s uses swapper's engine", deepspeed.__version__)


def uninstall() -> None:
    """Undo `install`, for builders that load after this."""
    while _undo:
        thing, name, before = _undo.pop()
        if isinstance(thing, dict):
            if before is _ABSENT:
                del thing[name]
            else:
                thing[name] = before
        elif before is _ABSENT:
            delattr(thing, name)
        else:
            setattr(thing, name, before)


def _builder(operator: str) -> Any:
    class SwapperBuilder:
        NAME = operator

        def load(self, verbose: bool = False) -> object:
            return _operator(operator)

        def is_compatible(self, verbose: bool = False) -> bool:
            return _is_compatible(operator)

    return SwapperBuilder


def _replace(name: str, before: object, after: type) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "deepspeed" and vars(module).get(name) is before:
            _set(module, name, after)


def _set(thing: object, name: str, value: object) -> None:
    _undo.append((thing, name, vars(thing).get(name, _ABSENT)))
    setattr(thing, name, value)


def _set_item(thing: dict[str, object], name: str, value: object) -> None:
    _undo.append((thing, name, thing.get(name, _ABSENT)))
    thing[name] = value


def _is_compatible(operator: str) -> bool:
    if operator != "gds":
        return True
    try:
        open_cufile()
    except UnsupportedError:
        return False
    return True


# --- the operators


class _PinHandle:
    """DeepSpeed's pin_handle: page-locked memory without a handle for I/O."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        return new_locked_tensor(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        return free_locked(locked_tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        return free_locked(address)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        return is_locked(buffer) or (torch.cuda.is_available() and buffer.is_pinned())


def _at_once(kind: str) -> Callable[..., int]:
    """Return DeepSpeed's module function that reads or writes at once, with a handle of its own. Returns 0."""

    def transfer(
        buffer: torch.Tensor,
        filename: Target,
        block_size: int,
        queue_depth: int,
        single_submit: bool,
        overlap_events: bool,
        validate: bool,
    ) -> int:
        with AioHandle(block_size, queue_depth, single_submit, overlap_events) as handle:
            return (handle.read if kind == "read" else handle.write)(buffer, filename, validate)

    return transfer


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copy all of `src` to `dest`, of any strides. Returns 0."""
    dest.copy_(src)
    return 0


def cast_to_byte_tensor(tensors: torch.Tensor | list[torch.Tensor]) -> object:
    """Return the bytes of a contiguous tensor, or of each of a list, as tensors that share them. Their shape is flat."""
    if isinstance(tensors, torch.Tensor):
        return tensors.reshape(-1).view(torch.uint8)
    return [cast_to_byte_tensor(tensor) for tensor in tensors]


def _operator(name: str) -> object:
    operator: Any = ModuleType(f"swapper_{name}", "DeepSpeed's operator, by swapper.")
    if name == "pin_memory":
        operator.pin_handle = _PinHandle
        return operator
    if name == "utils":
        operator.cast_to_byte_tensor = cast_to_byte_tensor
        return operator
    operator.aio_read, operator.aio_write = _at_once("read"), _at_once("write")
    operator.deepspeed_memcpy = deepspeed_memcpy
    if name == "gds":
        operator.gds_handle = GdsHandle
    else:
        operator.aio_handle = AioHandle
    return operator


def main(arguments: list[str]) -> NoReturn:
    """Execute `python ARGUMENTS` with swapper behind DeepSpeed, there and in every Python that it starts."""
    arguments = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m swapper.integrations.deepspeed SCRIPT | -m MODULE [ARGUMENT ...]", file=sys.stderr)
        raise SystemExit(0 if arguments else 2)
    start = str(Path(__file__).parent / "autostart")
    paths = [start, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, AUTOSTART: "1", "PYTHONPATH": os.pathsep.join(paths)}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *arguments], environment)


if __name__ == "__main__":
    main(sys.argv[1:])

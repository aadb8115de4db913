"""Refuses CUDA graphs where they cannot work: a graph has the addresses of what its kernels read, and runs no hooks.

[Note: graphs of compiled code] `torch.compile(mode="reduce-overhead")` records a graph of the code between two hooks, and again
whenever an address has changed: some 128 times, each with memory of its own, for a group that is copied for each use. A group
that stays on the device keeps its address, and its graphs work. Compiled code runs below a frame of torch's, which has the
compiler and its options.
"""

from __future__ import annotations

import sys
from types import FrameType

from swapper.errors import UnsupportedError

_EVAL_FRAME = "torch._dynamo.eval_frame"
_KEY = "triton.cudagraphs"  # of inductor's options


def refuse_capture(module: object, name: str) -> None:
    """Raise UnsupportedError if the current stream records a graph, which would have no copy of the group `name`."""
    is_capturing = getattr(module, "is_current_stream_capturing", None)
    if is_capturing is not None and is_capturing():
        raise UnsupportedError(
            f"a CUDA graph is being captured, and {name} is copied to the device by hooks, which a graph does not run: capture "
            "parts of the model without weights that swapper has, or run without torch.cuda.graph and make_graphed_callables"
        )


def refuse_compiled_graphs(name: str) -> None:
    """Raise UnsupportedError if this thread runs compiled code that records graphs. [Note: graphs of compiled code]"""
    if _EVAL_FRAME in sys.modules and _records_graphs(sys._getframe(1)):
        raise UnsupportedError(
            f"torch.compile was told to record CUDA graphs, and the memory of {name} on the device is another one at each use: "
            "leave mode='reduce-overhead' out ('max-autotune-no-cudagraphs' works), or raise device_memory until all stays there"
        )


def _records_graphs(frame: FrameType | None) -> bool:
    file = sys.modules[_EVAL_FRAME].__file__
    while frame is not None:
        if frame.f_code.co_filename == file and (compiler := frame.f_locals.get("callback")) is not None:
            while hasattr(compiler, "_torchdynamo_orig_backend"):
                compiler = compiler._torchdynamo_orig_backend
            if getattr(compiler, "compiler_name", "") == "cudagraphs" or _asks_for_graphs(compiler):
                return True
        frame = frame.f_back
    return False


def _asks_for_graphs(compiler: object) -> bool:
    """Return True if inductor is to record graphs: it was said for this code, or for all."""
    config = getattr(compiler, "config", None)
    if not isinstance(config, dict):
        return False
    inductor = sys.modules.get("torch._inductor.config")
    return bool(config.get(_KEY, inductor is not None and inductor.triton.cudagraphs))

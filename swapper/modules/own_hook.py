"""The form of every hook that swapper puts into a module or a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from swapper.runtime.interrupts import defer_sigint


def not_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch.compile call `function` instead of tracing into it: what it compiles is what lies before and behind.

    As torch.compiler.disable does, which imports torch._dynamo for that: some seconds, in a process that may never compile.
    """
    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, skip)
    except AttributeError:  # another torch
        return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it brings weights in, or lets them go"  # type: ignore[attr-defined]
    return function


class OwnHook:
    """A hook that swapper puts into a module. In a copy of the module, deep or pickled, it does nothing: copies are plain."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @not_traced
    def __call__(self, *arguments: Any) -> Any:
        with defer_sigint:
            return self._function(*arguments)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # takes anything, does nothing, and is there without swapper


@contextmanager
def hookable(parameter: torch.Tensor) -> Iterator[None]:
    """Within, hooks can be put into a parameter that is frozen, for when it is not."""
    was = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(was)

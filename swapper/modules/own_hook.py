"""The form of every hook that swapper puts into a module or a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from swapper.interrupts import held_back


class OwnHook:
    """A hook that swapper puts into a module. In a copy of the module, deep or pickled, it does nothing: copies are plain."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        with held_back:
            return self._function(*arguments)

    def __reduce__(self) -> Any:
        return OwnHook, (_do_nothing,)


@contextmanager
def hookable(parameter: torch.Tensor) -> Iterator[None]:
    """Within, hooks can be put into a parameter that is frozen, for when it is not."""
    was = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(was)


def keep_out_of_graphs() -> None:
    """Have torch.compile call hooks instead of tracing into them: what it compiles then is what lies between two hooks.

    For training, where torch's optimizers have loaded torch._dynamo already; it takes a second to import.
    """
    import torch._dynamo

    if not getattr(OwnHook.__call__, "_torchdynamo_disable", False):
        OwnHook.__call__ = torch._dynamo.disable(OwnHook.__call__)  # type: ignore[method-assign, no-untyped-call]


def _do_nothing(*arguments: Any) -> None:
    pass

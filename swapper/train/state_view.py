"""`optimizer.state` of the returned optimizer: to be looked at, as plain torch's can be.

Its tensors are copies, read when they are asked for: what lies on the drive or in a frame is replaced by every step, and a
tensor that changed, or went away, under the one who looks at it would be worse than none. To change state, load a state_dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from swapper.errors import StateError


class StateView(Mapping[torch.Tensor, Mapping[str, Any]]):
    """The state of each parameter that has any.

    Args:
        parameters: returns those that have state now, in the order of the optimizer's groups.
        read: returns a parameter's state, its tensors copied.
    """

    def __init__(
        self, parameters: Callable[[], list[torch.Tensor]], read: Callable[[torch.Tensor], dict[str, Any]]
    ) -> None:
        self._parameters = parameters
        self._read = read

    def __getitem__(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        return _ReadOnly(self._read(parameter)) if parameter in self else _ReadOnly({})

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._parameters())

    def __len__(self) -> int:
        return len(self._parameters())

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is known for known in self._parameters())

    def __setitem__(self, parameter: torch.Tensor, state: Any) -> None:
        raise _refusal()

    def __delitem__(self, parameter: torch.Tensor) -> None:
        raise _refusal()

    def clear(self) -> None:
        raise _refusal()


class _ReadOnly(dict[str, Any]):
    """One parameter's state. Setting an entry would change nothing, and is refused, unless to what it is."""

    def __setitem__(self, key: str, value: Any) -> None:
        is_same = key in self and value is self[key]  # loops that move the state to the device where it is
        if not is_same or (isinstance(value, torch.Tensor) and value._version):
            raise _refusal()

    def __delitem__(self, key: str) -> None:
        raise _refusal()

    def update(self, *arguments: Any, **values: Any) -> None:
        raise _refusal()


def _refusal() -> StateError:
    return StateError(
        "optimizer.state shows copies of the state, which lies where manager.offload placed it: to change it, take "
        "optimizer.state_dict(), change that, and give it to optimizer.load_state_dict()"
    )

"""Makes `optimizer.state` of the returned optimizer readable and writable as in plain torch.

Every step replaces the state on the drive or in a frame, so a tensor is a copy, read on access, and keeps its values.
Until the next step it stands for the state: an operation that writes to it, or to a view of it, writes to the state at
once. After that step a write to it would be lost, and is refused.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol

import torch

from swapper.errors import StateError
from swapper.tensors.guarded_tensor import TensorWatch


class StateStore(Protocol):
    """Has the state."""

    def with_state(self) -> list[torch.Tensor]:
        """Return the parameters that have state, in the order of the optimizer's groups."""

    def keys(self, parameter: torch.Tensor) -> list[str]:
        """Return the keys of a parameter's state."""

    def read(self, parameter: torch.Tensor, key: str) -> Any:
        """Return one entry: a ShownState's tensor, or a value."""

    def put(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Take over these parameters' state.

        Raises:
            StateError: it is not what the optimizer keeps. Nothing has changed then.
        """


class StateView(MutableMapping[torch.Tensor, MutableMapping[str, Any]]):
    """The state of each parameter that has any. Assigned state is copied.

    Args:
        store: has it.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def __getitem__(self, parameter: torch.Tensor) -> MutableMapping[str, Any]:
        return ParameterState(self._store, parameter)  # an empty one as well: torch's is a defaultdict

    def __setitem__(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        self._store.put({parameter: dict(state)})

    def __delitem__(self, parameter: torch.Tensor) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        self._store.put({parameter: {}})

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._store.with_state())

    def __len__(self) -> int:
        return len(self._store.with_state())

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, torch.Tensor) and bool(self._store.keys(parameter))

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        found = parameter in self
        return self[parameter] if found else default

    def pop(self, parameter: torch.Tensor, *default: Any) -> Any:
        if default and parameter not in self:
            return default[0]
        state = dict(self[parameter])
        del self[parameter]
        return state

    def popitem(self) -> tuple[torch.Tensor, Any]:
        if not len(self):
            raise KeyError("the optimizer has no state")
        parameter = list(self)[-1]
        return parameter, self.pop(parameter)

    def clear(self) -> None:
        self.replace({})

    def replace(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Replace all state, as `optimizer.state = states` does."""
        kept = {parameter: dict(state) for parameter, state in states.items()}
        self._store.put({**{parameter: {} for parameter in self}, **kept})

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter([(parameter, dict(state)) for parameter, state in self.items()])


class ParameterState(MutableMapping[str, Any]):
    """One parameter's state, read on access."""

    def __init__(self, store: StateStore, parameter: torch.Tensor) -> None:
        self._store = store
        self._parameter = parameter

    def __getitem__(self, key: str) -> Any:
        if key not in self._store.keys(self._parameter):
            raise KeyError(key)
        return self._store.read(self._parameter, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self or value is not self[key]:  # loops move the state to the device where it is
            self.update({key: value})

    def __delitem__(self, key: str) -> None:
        state = dict(self)
        del state[key]
        self._store.put({self._parameter: state})

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.keys(self._parameter))

    def __len__(self) -> int:
        return len(self._store.keys(self._parameter))

    def clear(self) -> None:
        self._store.put({self._parameter: {}})

    def update(self, *others: Any, **values: Any) -> None:
        self._store.put({self._parameter: {**self, **dict(*others, **values)}})

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(dict(self).items())  # torch.load(weights_only=True) knows this class


class ShownState(TensorWatch):
    """Watches a copy of one tensor of the state, and its views.

    Args:
        memory: the copy.
        write: writes it to the state, or refuses; called with the copy and the user's operation, in a word.
        is_taken_over: the result of `.to()` belongs to another optimizer, with memory of its own.
    """

    follows_writes = True

    def __init__(
        self, memory: torch.Tensor, write: Callable[[torch.Tensor, str], None], is_taken_over: bool = False
    ) -> None:
        self.memory = memory
        self.moves_copy = is_taken_over
        self._write = write
        self._tensor: Callable[[], torch.Tensor | None] = lambda: None

    def tensor(self) -> torch.Tensor:
        """Return the user's tensor; the same one as long as anybody holds it."""
        tensor = self._tensor()
        if tensor is None:
            tensor = self.watch(self.memory.detach())
            self._tensor = weakref.ref(tensor)
        return tensor

    def wrote(self, how: str) -> None:
        self._write(self.memory, how)


def outdated(name: str, key: str, how: str) -> StateError:
    """Return the error for a write to an outdated copy of the state."""
    return StateError(
        f"{how} would change {key!r} of {name} as it was before the last step, load_state_dict or replacement of the state, and "
        f"have no effect: read it again, optimizer.state[parameter][{key!r}]"
    )

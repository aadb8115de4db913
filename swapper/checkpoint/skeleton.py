"""What is in a data.pkl, without running it: the nest of containers, with stand-ins for tensors and for everything else.

Loading a pickle calls what it names. Here nothing that it names is imported or called: containers become containers of ours,
torch's rebuild functions become `TensorView`s, and all else becomes an `Opaque` that remembers its name. That is how a
checkpoint's tensors are listed without reading one, and how `load` knows which storages a pickle will ask for.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swapper.checkpoint.pickling import LEGACY_STORAGES
from swapper.errors import CheckpointError

_MOST_NODES = 1_000_000
_MOST_DEPTH = 200


@dataclass(frozen=True, slots=True)
class StorageId:
    """A storage as a pickle names it."""

    key: str  # of the record data/<key>
    dtype: torch.dtype  # of its elements; uint8 where it is untyped
    location: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorView:
    """A dense tensor: a view of a storage. Held against the storage's size."""

    storage: StorageId
    dtype: torch.dtype
    element_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """From the first element to the end of the last."""
        return _span(self.shape, self.stride) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return math.prod(self.shape) == 0
            expected *= size
        return True


class Opaque:
    """An object that is none of the known ones. Nothing of its class was run."""

    origin = ""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        self = object.__new__(cls)
        self.args = args
        self.state = None
        return self

    args: tuple[Any, ...]
    state: Any

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *args: Any) -> Any:
        return _opaque(Opaque)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


class Mapped(OrderedDict[Any, Any]):
    """Stands for OrderedDict, Counter and defaultdict."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*(arg for arg in args[-1:] if isinstance(arg, (Mapping, list, tuple))))

    def __setstate__(self, state: Any) -> None:
        self.state = state


@dataclass(frozen=True)
class Skeleton:
    """The result of `read_skeleton`."""

    tree: Any
    storages: Sequence[StorageId]
    """In the order in which the pickle asks for them, each as often as it does."""

    def tensors(self) -> Iterator[tuple[str, TensorView]]:
        """Yields every dense tensor by its path in the tree: {"model": {"a.weight": t}} gives "model.a.weight"."""
        for name, value in self.leaves():
            if isinstance(value, TensorView):
                yield name, value

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Yields whatever is not a container, by its path."""
        budget = 1_000_000 + 16 * len(self.storages)
        stack: list[tuple[str, Any]] = [("", self.tree)]
        while stack:
            budget -= 1
            if budget < 0:
                raise CheckpointError(
                    "the checkpoint's containers hold each other without end: it is hostile or damaged"
                )
            name, value = stack.pop()
            children = _children(value)
            if children is None:
                yield name, value
            else:
                stack += [(f"{name}.{key}" if name else str(key), child) for key, child in reversed(children)]


def read_skeleton(data: bytes, name: str) -> Skeleton:
    """Return what is in the pickle `data`; `name` is for messages.

    Raises:
        CheckpointError: it is damaged, or its tensors do not fit their storages.
    """
    reader = _Reader(io.BytesIO(data))
    try:
        tree = reader.load()
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    except Exception as error:  # a damaged pickle makes it raise whatever there is
        raise CheckpointError(f"{name} is damaged: {type(error).__name__}: {error}") from error
    return Skeleton(tree, reader.storages)


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return None


class _Reader(pickle._Unpickler):
    """The unpickler in Python: the one in C takes memory for as many memo entries as a hostile file says to have.

    What `find_class` gives are types, each with a `__setstate__` of its own: so a pickle that tries to change one fails.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="latin-1")
        self.storages: list[StorageId] = []
        self._types: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = self._types.get((module, name))
        if found is None:
            found = self._types[module, name] = _stand_in(module, name)
        return found

    def get_extension(self, code: int) -> None:
        raise CheckpointError("it names objects by numbers, which have no meaning outside of the process that wrote it")

    def persistent_load(self, pid: Any) -> StorageId:
        kind, storage_type, key, location, numel = pid if isinstance(pid, tuple) and len(pid) >= 5 else (None,) * 5
        dtype = getattr(storage_type, "storage_dtype", None)
        known = kind == "storage" and isinstance(key, str) and isinstance(location, str)
        if not known or not isinstance(dtype, torch.dtype) or type(numel) is not int or numel < 0:
            raise CheckpointError(f"it asks for {str(pid)[:200]}, which is no storage")
        storage = StorageId(key, dtype, location, numel * dtype.itemsize)
        self.storages.append(storage)
        return storage


_STORAGE_DTYPES = {
    **{kind.__name__: dtype for dtype, kind in LEGACY_STORAGES.items()},
    "UntypedStorage": torch.uint8,
    "TypedStorage": torch.uint8,
    "QInt8Storage": torch.qint8,
    "QUInt8Storage": torch.quint8,
    "QInt32Storage": torch.qint32,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def _stand_in(module: str, name: str) -> Any:
    if module in ("torch", "torch.storage") and name in _STORAGE_DTYPES:
        return type(name, (Opaque,), {"storage_dtype": _STORAGE_DTYPES[name]})
    if module == "torch" and name in _DTYPES:
        return _DTYPES[name]
    rebuild: Any = _REBUILDS.get((module, name))
    if rebuild is not None:
        return type(name, (Opaque,), {"__new__": rebuild})
    if module == "collections" and name in ("OrderedDict", "Counter", "defaultdict"):
        return type(name, (Mapped,), {})
    return type(name, (Opaque,), {"origin": f"{module}.{name}"})


def _tensor_v2(cls: Any, storage: Any, offset: Any, size: Any, stride: Any, grad: Any = False, *rest: Any) -> Any:
    lazy = len(rest) > 1 and bool(rest[1])  # conjugate or negative bit
    return _view(storage, storage.dtype, offset, size, stride, grad) if not lazy else _opaque(cls)


def _tensor_v3(cls: Any, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, *rest: Any) -> Any:
    lazy = len(rest) > 1 and bool(rest[1])
    return _view(storage, rest[0], offset, size, stride, grad) if not lazy else _opaque(cls)


def _parameter(cls: Any, data: Any, *rest: Any) -> Any:
    return data


def _size(cls: Any, values: Any = ()) -> Any:
    return tuple(values)


_REBUILDS = {
    ("torch._utils", "_rebuild_tensor"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch", "Size"): _size,
}


def _opaque(cls: Any) -> Any:
    return object.__new__(cls)


def _view(storage: Any, dtype: Any, offset: Any, size: Any, stride: Any, grad: Any) -> TensorView:
    numbers = [offset, *size, *stride]
    sound = isinstance(storage, StorageId) and isinstance(dtype, torch.dtype) and len(size) == len(stride)
    if not sound or not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise CheckpointError(f"a tensor of size {str(size)[:100]} and stride {str(stride)[:100]} cannot be")
    view = TensorView(storage, dtype, offset, tuple(size), tuple(stride), bool(grad))
    end = offset * dtype.itemsize + view.nbytes
    if view.nbytes and end > storage.nbytes:
        raise CheckpointError(
            f"a tensor of {dtype} {tuple(size)} reaches to byte {end} of storage {storage.key}, which has {storage.nbytes}"
        )
    return view


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last in memory, both included; 0 for none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))

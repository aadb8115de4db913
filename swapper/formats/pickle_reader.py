"""Reads a data.pkl without running it: the nested containers, with stand-ins for tensors and for everything else.

Loading a pickle calls the functions that it names. Here nothing that it names is imported or called: containers become
containers of ours, torch's rebuild functions become `TensorView`s, and all else becomes an `Opaque` with its name. So a
checkpoint's tensors are listed without reading one, and `load` knows which storages a pickle will request.

[Note: work in proportion to the bytes] A pickle of a few bytes can describe endless nesting: a list that holds itself,
or dicts that each hold the next one twice. The unpickler (unpickling.py) takes time and memory in proportion to the
pickle's bytes, and so does the walk over the containers: a cycle is refused where it closes, and the characters of all
names are counted.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from swapper.errors import CheckpointError
from swapper.formats.stored import MAX_DIMENSIONS, MAX_TENSOR_BYTES, are_sizes
from swapper.formats.torch_writer import LEGACY_STORAGES, QUANTIZED_STORAGES, span
from swapper.formats.unpickling import BoundedUnpickler, Global, Opaque, name_of_key

MAX_DEPTH = 1000
"""Nested containers. Python's own pickler writes no deeper nesting."""
MAX_NAME_CHARS = 16384
"""Characters of the path of one tensor or value."""
_MAX_ARGUMENTS = 16
"""Arguments of torch's functions that rebuild tensors."""
_FREE_CHARS = 1_000_000
_CHARS_A_BYTE = 64
_CHARS_A_NODE = 8
"""The names of all nodes, and _CHARS_A_NODE for each, may have _FREE_CHARS characters and _CHARS_A_BYTE more for each
byte of the pickle. Real checkpoints need up to 20 (many small numbers in a list with a long name)."""


@dataclass(frozen=True, slots=True)
class StorageId:
    """A storage as a pickle names it."""

    key: str  # of the record data/<key>
    dtype: torch.dtype  # of its elements; uint8 if it is untyped
    location: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorView:
    """A dense tensor: a view of a storage. Checked against the storage's size."""

    storage: StorageId
    dtype: torch.dtype
    element_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        return span(self.shape, self.stride) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return math.prod(self.shape) == 0
            expected *= size
        return True


def is_other_tensor(value: object) -> TypeGuard[Opaque]:
    """Return whether an object is, or holds, a tensor without plain elements: sparse, quantized, nested, a lazy conjugate."""
    made = value.made if isinstance(value, Opaque) else None
    return made is not None and ("_rebuild" in made.name or "Tensor" in made.name)


@dataclass(frozen=True)
class Skeleton:
    """The result of `read_skeleton`."""

    tree: Any
    storages: Sequence[StorageId]
    """In the order in which the pickle requests them, with repetitions."""
    nbytes: int
    """Bytes of the pickle."""
    globals: frozenset[str]
    """Classes and functions that the pickle names, dtypes aside."""

    def tensors(self) -> Iterator[tuple[str, TensorView]]:
        """Yield every dense tensor by its path in the tree: {"model": {"a.weight": t}} gives "model.a.weight"."""
        for name, value in self.leaves():
            if isinstance(value, TensorView):
                yield name, value

    def leaves(self) -> Iterator[tuple[str, object]]:
        """Yield every leaf by its path. See [Note: work in proportion to the bytes].

        Raises:
            CheckpointError: a container holds itself, is nested too deep, or has too many nodes for such a pickle.
        """
        chars_left = _FREE_CHARS + _CHARS_A_BYTE * self.nbytes
        around: dict[int, None] = {}  # ids of the enclosing containers, outermost first
        todo = [iter([("", self.tree)])]
        while todo:
            name, value = next(todo[-1], (None, None))
            if name is None:
                todo.pop()
                if around:
                    around.popitem()
                continue
            chars_left -= len(name) + _CHARS_A_NODE
            if chars_left < 0 or id(value) in around or len(around) > MAX_DEPTH:
                raise CheckpointError(
                    "the checkpoint's containers hold each other endlessly, or are nested too deep: it is hostile or damaged"
                )
            children = _children(name, value)
            if children is None:
                yield name, value
            else:
                around[id(value)] = None
                todo.append(children)


def read_skeleton(data: bytes, name: str) -> Skeleton:
    """Return the content of the pickle `data`; `name` is for messages.

    Raises:
        CheckpointError: it is damaged or hostile, or its tensors do not fit their storages.
    """
    reader = _read(io.BytesIO(data), len(data), name)
    return Skeleton(reader.tree, reader.storages, len(data), reader.names)


def check_pickles(file: io.BufferedIOBase, count: int, nbytes: int, name: str) -> None:
    """Read `count` pickles, one after the other, from a file of `nbytes`, as in files of torch before 1.6.

    Args:
        file: open at the first pickle.
        count: of pickles.
        nbytes: of the file: the measure for their cost.
        name: for messages.

    Raises:
        CheckpointError: one is damaged or hostile.
    """
    for _ in range(count):
        _read(file, nbytes, name)


def _read(file: io.BufferedIOBase, nbytes: int, name: str) -> _Reader:
    reader = _Reader(file, nbytes)
    try:
        reader.tree = reader.load()
        return reader
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    except Exception as error:  # a damaged pickle can raise any exception
        raise CheckpointError(f"{name} is damaged: {type(error).__name__}: {str(error)[:200]}") from error


def _children(name: str, value: object) -> Iterator[tuple[str, object]] | None:
    """Return a container's items, by path; None if `value` is no container."""
    if isinstance(value, dict):
        return ((_path(name, key), child) for key, child in value.items())
    if isinstance(value, (list, tuple)):
        return ((_path(name, number), child) for number, child in enumerate(value))
    return None


def _path(name: str, key: object) -> str:
    own = key if isinstance(key, str) else name_of_key(key)
    if len(name) + len(own) > MAX_NAME_CHARS:
        raise CheckpointError(
            f"the checkpoint has a name of more than {MAX_NAME_CHARS} characters, which begins {(name or own)[:60]!r}: it is "
            "hostile or damaged"
        )
    if not own.isascii():
        try:
            own.encode()
        except UnicodeEncodeError:
            raise CheckpointError(f"the checkpoint has the name {own[:60]!r}, which is not a string") from None
    return f"{name}.{own}" if name else own


class _Reader(BoundedUnpickler):
    """Makes storages and tensors of the names in torch's pickles."""

    def __init__(self, file: io.BufferedIOBase, nbytes: int) -> None:
        super().__init__(file, nbytes)
        self.storages: list[StorageId] = []
        self.tree: object = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(f"{module}.{name}" for module, name in self._globals)

    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        return super().find_class(module, name)

    def make(self, made: Global, arguments: tuple[object, ...]) -> object:
        rebuild = _REBUILDS.get((made.module, made.name))
        if arguments and made.module in ("torch", "torch.storage") and made.name.endswith(("Storage", "Tensor")):
            self._check_content(arguments)
        return super().make(made, arguments) if rebuild is None else rebuild(made, *arguments[:_MAX_ARGUMENTS])

    def _check_content(self, arguments: Sequence[object]) -> None:
        """Check what a class makes a storage or a tensor of: not a size, which would be memory by a number."""
        if any(isinstance(argument, int) for argument in arguments):
            raise CheckpointError("it requests memory by its size, which no checkpoint does")
        todo = list(arguments)
        while todo:
            part = todo.pop()
            if isinstance(part, list | tuple):
                self._count_copies(len(part))
                todo += part

    def persistent_load(self, pid: object) -> StorageId:
        kind, storage_type, key, location, numel = pid[:5] if isinstance(pid, tuple) and len(pid) >= 5 else (None,) * 5
        dtype = _storage_dtype(storage_type)
        known = kind == "storage" and isinstance(key, str) and isinstance(location, str)
        if not known or dtype is None or type(numel) is not int or not 0 <= numel < MAX_TENSOR_BYTES:
            raise CheckpointError("it requests something that is no storage")
        storage = StorageId(key, dtype, location, numel * dtype.itemsize)
        self.storages.append(storage)
        return storage


_STORAGE_DTYPES = {
    **{kind.__name__: dtype for dtype, kind in (*LEGACY_STORAGES.items(), *QUANTIZED_STORAGES.items())},
    "UntypedStorage": torch.uint8,
    "TypedStorage": torch.uint8,
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def _storage_dtype(kind: Any) -> torch.dtype | None:
    """Return the dtype of torch's class of storages that a pickle names; None if it is none."""
    is_storage = isinstance(kind, Global) and kind.module in ("torch", "torch.storage")
    return _STORAGE_DTYPES.get(kind.name) if is_storage else None


def _tensor_v2(
    made: Global,
    storage: Any,
    offset: object,
    size: object,
    stride: object,
    grad: object = False,
    hooks: object = None,
    metadata: object = None,
    *rest: object,
) -> object:
    return _tensor_v3(made, storage, offset, size, stride, grad, hooks, storage.dtype, metadata)


def _tensor_v3(
    made: Global,
    storage: object,
    offset: object,
    size: object,
    stride: object,
    grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,  # of a lazy conjugate or negation
    *rest: object,
) -> object:
    if hooks is not None and not isinstance(hooks, dict):
        raise CheckpointError("it has a tensor with invalid backward hooks")
    return Opaque(made) if metadata else _view(storage, dtype, offset, size, stride)


def _parameter(made: Global, data: object, *rest: object) -> object:
    return data


def _size(made: Global, values: object = ()) -> object:
    if not isinstance(values, (tuple, list)) or len(values) > MAX_DIMENSIONS:
        raise CheckpointError("it has an invalid torch.Size")
    return tuple(values)


_REBUILDS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch", "Size"): _size,
}


def _view(storage: Any, dtype: Any, offset: Any, size: object, stride: object) -> TensorView:
    sound = isinstance(storage, StorageId) and isinstance(dtype, torch.dtype) and are_sizes((offset,))
    if not sound or not are_sizes(size) or not are_sizes(stride) or len(size) != len(stride):
        raise CheckpointError("it has a tensor with impossible sizes, strides or offset")
    view = TensorView(storage, dtype, offset, tuple(size), tuple(stride))
    end = offset * dtype.itemsize + view.nbytes
    if view.nbytes and end > storage.nbytes:
        raise CheckpointError(
            f"a tensor of {dtype} {tuple(size)} reaches to byte {end} of storage {storage.key[:60]}, which has {storage.nbytes}"
        )
    if math.prod(size) * dtype.itemsize >= MAX_TENSOR_BYTES:
        raise CheckpointError(f"a tensor of {dtype} {tuple(size)} has impossibly many bytes")
    return view

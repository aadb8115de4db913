"""Writes data.pkl: a nested object with tensors, pickled as torch.save does it but without tensor data.

torch.save needs the storages; swapper's lie in a swap file, and the tensors that represent them may alias unreadable
memory. So a tensor is reduced here from its shape, stride, dtype and requires_grad, and its storage is named by its
record. The bytes equal those of torch.save for the same object. What the default `torch.load` (weights_only=True) would
refuse is refused here, at the write and not at the load.
"""

from __future__ import annotations

import codecs
import io
import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from swapper.errors import CheckpointError

_PROTOCOL = 2  # torch.save's; the weights_only unpickler knows only the opcodes of this one
_PAYLOAD_LOCATION = "cpu"  # location of payloads in torch.load without a map_location

LEGACY_STORAGES: Mapping[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
"""The storage class by which a checkpoint states a dtype; other dtypes are stated with an UntypedStorage."""

QUANTIZED_STORAGES: Mapping[torch.dtype, type] = {
    torch.qint8: torch.QInt8Storage,
    torch.quint8: torch.QUInt8Storage,
    torch.qint32: torch.QInt32Storage,
    torch.quint4x2: torch.QUInt4x2Storage,
    torch.quint2x4: torch.QUInt2x4Storage,
}


def _rebuild_function(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return the function by which a checkpoint rebuilds a tensor: what torch itself writes for an empty one."""
    empty = torch.empty(0, dtype=dtype, device="cpu")
    function: Callable[..., torch.Tensor] = empty.__reduce_ex__(_PROTOCOL)[0]
    return function


_REBUILD_LEGACY = _rebuild_function(torch.float32)
_REBUILD_UNTYPED = _rebuild_function(torch.uint16)

_PLAIN_TYPES = (OrderedDict, Counter, complex, bytearray, torch.Size, torch.device, torch.dtype)
_PLAIN_GLOBALS = frozenset(
    {
        *(OrderedDict, Counter, complex, bytearray, set, torch.Size, torch.device, codecs.encode),
        *(_REBUILD_LEGACY, _REBUILD_UNTYPED, torch.UntypedStorage, *LEGACY_STORAGES.values()),
    }
)


def plain_global_names() -> frozenset[str]:
    """Return the names of what `pickle_state` writes, as pickles have them: plain classes, and what the user allows torch."""
    entries: list[Any] = [*_PLAIN_GLOBALS, *torch.serialization.get_safe_globals()]
    names = {e[1] if isinstance(e, tuple) else f"{e.__module__}.{e.__qualname__}" for e in entries}
    return frozenset(names | {re.sub(r"^builtins\.", "__builtin__.", name) for name in names})


@dataclass(frozen=True, slots=True)
class StorageRef:
    """The location of a tensor in a container: a record's key, and an index in elements of the tensor's dtype.

    `untyped`: the record has tensors of several dtypes.
    """

    key: str
    element_offset: int
    untyped: bool = False


Locate = Callable[[torch.Tensor], StorageRef | None]
"""Returns the place of a tensor in the payload records, or None if it is in none."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """The result of `pickle_state`."""

    data: bytes  # data.pkl
    resident: Mapping[str, torch.UntypedStorage]  # to write next to it, by key, in the order of the keys
    keys: tuple[str, ...]  # all keys, in the order in which a reader meets them


def pickle_state(state: object, payload_nbytes: Mapping[str, int], locate: Locate) -> Pickled:
    """Pickle `state`: any nesting of dict, OrderedDict, list, tuple, set, plain values and tensors.

    Args:
        state: the result of torch.load.
        payload_nbytes: size of each payload record, by key; the keys are "0", "1", ... without a gap.
        locate: the place of a tensor in the payload records, or None for a resident tensor, whose whole storage becomes
            a record of its own. Of a located tensor only shape, stride, dtype, layout and requires_grad are read.

    Raises:
        CheckpointError: something in `state` cannot be written, or could not be read with weights_only=True; or the
            place that `locate` returns does not hold the tensor.
    """
    file = io.BytesIO()
    pickler = _StatePickler(file, payload_nbytes, locate)
    pickler.dump(state)
    return Pickled(file.getvalue(), dict(pickler.resident), tuple(pickler.storage_classes))


@dataclass(frozen=True, slots=True)
class _Storage:
    """Represents a storage in the pickle: torch.save's persistent id."""

    persistent_id: tuple[str, type, str, str, int]


class _StatePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, payload_nbytes: Mapping[str, int], locate: Locate) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._payload_nbytes = payload_nbytes
        self._payload_keys = {key: key for key in payload_nbytes}  # a pickle shares strings by identity
        self._locate = locate
        self._resident_keys: dict[int, str] = {}  # by id of the storage, which `resident` keeps alive
        self._user_globals = frozenset(
            entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals()
        )
        self.resident: dict[str, torch.UntypedStorage] = {}
        self.storage_classes: dict[str, type] = {}  # by key, in the order of first use

    def persistent_id(self, obj: object) -> tuple[str, type, str, str, int] | None:
        return obj.persistent_id if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: object) -> Any:
        # Called for everything except the builtin containers and scalars, which pickle writes by itself.
        if isinstance(obj, torch.Tensor):
            return self._reduce_tensor(obj)
        if isinstance(obj, (type, FunctionType, BuiltinFunctionType)):
            allowed = obj in _PLAIN_GLOBALS or obj in self._user_globals
        else:
            allowed = type(obj) in _PLAIN_TYPES or type(obj) in self._user_globals
        if not allowed:
            raise CheckpointError(
                f"{_name_of(obj)} cannot be in a container, since torch.load would refuse it: use tensors, "
                "numbers, strings, lists, tuples and dicts, or allow it with "
                "torch.serialization.add_safe_globals, here and wherever the file is loaded"
            )
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> tuple[object, ...]:
        _check_plain(tensor)
        ref = self._locate(tensor)
        untyped = tensor.dtype not in LEGACY_STORAGES or (ref is not None and ref.untyped)
        if ref is None:
            storage, element_offset = self._resident_storage(tensor, untyped), tensor.storage_offset()
        else:
            storage, element_offset = self._payload_storage(tensor, ref, untyped), ref.element_offset
        args: tuple[object, ...] = (
            storage,
            element_offset,
            tuple(tensor.size()),
            tensor.stride(),
            tensor.requires_grad,
            OrderedDict(),  # backward hooks: never any
        )
        return (_REBUILD_UNTYPED, (*args, tensor.dtype)) if untyped else (_REBUILD_LEGACY, args)

    def _payload_storage(self, tensor: torch.Tensor, ref: StorageRef, untyped: bool) -> _Storage:
        key = self._payload_keys.get(ref.key)
        if key is None:
            raise CheckpointError(f"there is no payload record {ref.key!r} for {_describe(tensor)}")
        nbytes = self._payload_nbytes[key]
        end = (ref.element_offset + span(tensor.size(), tensor.stride())) * tensor.element_size()
        if ref.element_offset < 0 or end > nbytes:
            raise CheckpointError(
                f"{_describe(tensor)} at element {ref.element_offset} is not within the {nbytes} bytes "
                f"of record {key!r}"
            )
        return self._storage(tensor, untyped, key, _PAYLOAD_LOCATION, nbytes)

    def _resident_storage(self, tensor: torch.Tensor, untyped: bool) -> _Storage:
        if tensor.device.type == "meta":
            raise CheckpointError(f"{_describe(tensor)} is on the meta device and in no payload record: it has no data")
        if vars(tensor):
            raise CheckpointError(f"{_describe(tensor)} has attributes {sorted(vars(tensor))}; pass a detached tensor")
        storage = tensor.untyped_storage()
        key = self._resident_keys.get(id(storage))
        if key is None:
            key = str(len(self._payload_nbytes) + len(self.resident))
            self._resident_keys[id(storage)] = key
            self.resident[key] = storage
        return self._storage(tensor, untyped, key, torch.serialization.location_tag(storage), storage.nbytes())

    def _storage(self, tensor: torch.Tensor, untyped: bool, key: str, location: str, nbytes: int) -> _Storage:
        storage_class = torch.UntypedStorage if untyped else LEGACY_STORAGES[tensor.dtype]
        known = self.storage_classes.setdefault(key, storage_class)
        if known is not storage_class:
            # A reader gives a record the first class that it meets, and would read this tensor as that.
            raise CheckpointError(f"{_describe(tensor)} shares record {key!r} with another dtype ({known.__name__})")
        numel = nbytes if untyped else nbytes // tensor.element_size()
        return _Storage(("storage", storage_class, key, location, numel))


def _check_plain(tensor: torch.Tensor) -> None:
    if type(tensor) is not torch.Tensor:
        raise CheckpointError(f"{_name_of(tensor)} cannot be in a container: pass a plain tensor, as in state_dict()")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype in QUANTIZED_STORAGES:
        raise CheckpointError(f"a tensor of {tensor.dtype} is sparse, nested or quantized: containers take dense ones")
    if tensor.is_conj() or tensor.is_neg():
        raise CheckpointError(f"{_describe(tensor)} is a lazy conjugate or negation: pass tensor.clone()")


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the elements from a tensor's first to its last in memory, both included; 0 for none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _name_of(obj: object) -> str:
    if isinstance(obj, (type, FunctionType, BuiltinFunctionType)):
        return f"{obj.__module__}.{obj.__qualname__}"
    return f"an object of type {type(obj).__module__}.{type(obj).__qualname__}"


def _describe(tensor: torch.Tensor) -> str:
    return f"a tensor of {tensor.dtype} and shape {tuple(tensor.shape)}"

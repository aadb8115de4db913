"""Unpickles untrusted bytes: imports nothing, calls nothing, in time and memory in proportion to the bytes.

Python's unpickler calls what a pickle names, and a few bytes can make it work endlessly: a key that is a tuple of the
same two tuples, sixty levels deep, takes forever to hash; a long argument that is passed a thousand times is copied as
often. Here a name in a pickle is a `Global`, an object made of it an `Opaque`, keys are small, and copies are counted.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, ClassVar

from swapper.errors import CheckpointError

MAX_KEY_PARTS = 256
"""Parts of a key that is a tuple: each use of the key hashes all of them."""
MAX_KEY_CHARS = 4096
"""Characters of all strings in such a key."""
_MAPPINGS = {("collections", name) for name in ("OrderedDict", "Counter", "defaultdict")}
_BY_NUMBER = {(module, name) for module in ("builtins", "__builtin__") for name in ("bytearray", "bytes")}

_COPYING = ("set", "frozenset", "bytes", "bytearray", "encode")
"""What copies its first argument."""
_LOOKING_UP = ("_get_layout", "_MEM_FORMAT_ENCODING", "slice")
"""What looks its arguments up in a dict, or has a hash of them."""
_PATHS = ("PosixPath", "PurePosixPath")

_Unpickler: Any = pickle._Unpickler


class Global:
    """A class or function that a pickle names."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"[:200]


class Opaque:
    """An object of an unknown kind. Nothing of its class was run.

    Attributes:
        made: the callable that made it, None if unknown.
        state: the argument of its `__setstate__`, None if there is none.
    """

    __slots__ = ("made", "state")

    def __init__(self, made: Global | None) -> None:
        self.made = made
        self.state: object = None


class Mapped(dict[object, object]):
    """Represents OrderedDict, Counter and defaultdict."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        super().__init__()
        self.state: object = None


def check_key(key: object) -> None:
    """Raise CheckpointError unless `key` is fast to hash and compare, however often that is done."""
    if type(key) is str:
        return
    todo = [key]
    chars = 0
    for _ in range(MAX_KEY_PARTS):
        if not todo:
            return
        part = todo.pop()
        if isinstance(part, Opaque):
            part = tuple(part.state.values()) if isinstance(part.state, dict) else part.state
        if isinstance(part, tuple) and len(part) <= MAX_KEY_PARTS:
            todo += part
        elif isinstance(part, tuple | frozenset) or (isinstance(part, int) and not -(1 << 63) <= part < 1 << 64):
            break
        chars += len(part) if isinstance(part, str | bytes) and part is not key else 0
        if chars > MAX_KEY_CHARS:
            break
    raise CheckpointError(f"it has a key of a kind or size that checkpoints do not have ({type(key).__name__})")


def _is_latin(arguments: tuple[object, ...]) -> bool:
    """Return True if `encode` makes bytes of these. Other codecs make longer ones of bytes, again and again."""
    of_text = bool(arguments) and isinstance(arguments[0], str)
    return of_text and arguments[1:] in (("latin1",), ("latin-1",))


def name_of_key(key: object) -> str:
    """Return the display form of a key that is not a string."""
    if isinstance(key, tuple):
        parts = [repr(part) if isinstance(part, str | bytes) else name_of_key(part) for part in key]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    return str(key) if isinstance(key, int | float | complex | bytes | None) else f"<{type(key).__name__}>"


class BoundedUnpickler(_Unpickler):  # type: ignore[misc]
    """The unpickler in Python, with every opcode replaced that calls or hashes.

    The one in C allocates memory for as many memo entries as a pickle claims.

    Args:
        file: to read from.
        nbytes: its maximum bytes: the measure for the pickle's cost.
    """

    dispatch: ClassVar[dict[int, object]] = dict(_Unpickler.dispatch)

    def __init__(self, file: io.BufferedIOBase, nbytes: int) -> None:
        super().__init__(file, encoding="latin-1")
        self._nbytes = self._copies_left = nbytes
        self._globals: dict[tuple[str, str], Global] = {}

    def find_class(self, module: str, name: str) -> object:
        return self._globals.setdefault((module, name), Global(module, name))

    def get_extension(self, code: int) -> None:
        raise CheckpointError("it names objects by numbers, which have no meaning outside of the process that wrote it")

    def make(self, made: Global, arguments: tuple[object, ...]) -> object:
        """Return the stand-in for `made(*arguments)`."""
        if (made.module, made.name) in _MAPPINGS:
            return self._mapped(arguments)
        if made.name in ("set", "frozenset"):
            for item in arguments[0] if arguments and isinstance(arguments[0], list | tuple) else ():
                check_key(item)
        if made.name in _LOOKING_UP:
            for argument in arguments:
                check_key(argument)
        if made.name in _PATHS and not all(isinstance(part, str) for part in arguments):
            raise CheckpointError("it makes a path of something that is no text")
        if made.name in _COPYING:
            self._count_copies(sum(len(part) for part in arguments[:1] if isinstance(part, str | bytes | list | tuple)))
        if (made.module, made.name) == ("_codecs", "encode") and not _is_latin(arguments):
            raise CheckpointError("it encodes something that is not bytes, which no checkpoint does")
        if (made.module, made.name) in _BY_NUMBER and any(isinstance(argument, int) for argument in arguments[:1]):
            raise CheckpointError(f"it requests {made.name} by number, which no checkpoint does")
        return Opaque(made)

    def _mapped(self, arguments: tuple[object, ...]) -> Mapped:
        found = Mapped()
        items = arguments[-1] if arguments else ()
        if isinstance(items, dict | list | tuple):
            self._count_copies(len(items))
            for key, value in items.items() if isinstance(items, dict) else items:
                check_key(key)
                found[key] = value
        return found

    def _count_copies(self, count: int) -> None:
        self._copies_left -= count
        if self._copies_left < 0:
            raise CheckpointError("it copies the same items again and again")

    def _call(self, function: object, arguments: object) -> object:
        if not isinstance(arguments, tuple):
            raise CheckpointError("it calls something with invalid arguments")
        if isinstance(function, Global):
            return self.make(function, arguments)
        if isinstance(function, Opaque):
            return Opaque(None)
        raise CheckpointError(f"it calls a {type(function).__name__}")

    # --- opcodes

    def _instantiate(self, function: object, arguments: list[object]) -> None:  # of INST and OBJ
        self.append(self._call(function, tuple(arguments)))

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments)

    def _new_with_names(self) -> None:
        self.stack.pop()  # named arguments
        self._reduce()

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, Opaque | Mapped):
            raise CheckpointError(f"it changes a {type(target).__name__}")
        target.state = state

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(self.stack[-1], [key, value])

    def _set_items(self) -> None:
        items = self.pop_mark()
        self._set(self.stack[-1], items)

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set(self.stack[-1], items)

    @staticmethod
    def _set(target: object, items: list[object]) -> None:
        if isinstance(target, Opaque):
            return
        if not isinstance(target, dict) or len(items) % 2:
            raise CheckpointError(f"it puts items into a {type(target).__name__}, or half a pair")
        for number in range(0, len(items), 2):
            check_key(items[number])
            target[items[number]] = items[number + 1]

    def _append(self) -> None:
        value = self.stack.pop()
        self._extend(self.stack[-1], [value])

    def _appends(self) -> None:
        values = self.pop_mark()
        self._extend(self.stack[-1], values)

    @staticmethod
    def _extend(target: object, values: list[object]) -> None:
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, Opaque):
            raise CheckpointError(f"it appends to a {type(target).__name__}")

    def _add_items(self) -> None:
        items = self.pop_mark()
        for item in items:
            check_key(item)
        target = self.stack[-1]
        if isinstance(target, set):
            target.update(items)
        elif not isinstance(target, Opaque):
            raise CheckpointError(f"it adds to a {type(target).__name__}")

    def _frozen_set(self) -> None:
        items = self.pop_mark()
        for item in items:
            check_key(item)
        self.append(frozenset(items))

    def _byte_array(self) -> None:
        nbytes = int.from_bytes(self.read(8), "little")
        if nbytes > self._nbytes:
            raise CheckpointError(f"it has {nbytes} bytes in one piece")
        self.append(bytearray(self.read(nbytes)))

    for _opcode, _method in (
        (pickle.REDUCE, _reduce),
        (pickle.NEWOBJ, _reduce),
        (pickle.NEWOBJ_EX, _new_with_names),
        (pickle.BUILD, _build),
        (pickle.SETITEM, _set_item),
        (pickle.SETITEMS, _set_items),
        (pickle.DICT, _dict),
        (pickle.APPEND, _append),
        (pickle.APPENDS, _appends),
        (pickle.ADDITEMS, _add_items),
        (pickle.FROZENSET, _frozen_set),
        (pickle.BYTEARRAY8, _byte_array),
    ):
        dispatch[_opcode[0]] = _method
    del _opcode, _method

"""Tells what an optimizer's own code may do, from the code itself: a trial of a few steps does not see what happens later.

[Note: known code] torch's own classes, unchanged, do what a trial shows at every later step: they have no rule on a
parameter's size or place, and none that begins later. All other code is unknown.

[Note: names of elementwise code] Whether unknown code looks at more than one element at a time, now or in a later step, is
read from the names that its functions use, all of which are there before the first step. Code that uses only names of
`ELEMENTWISE`, of its own methods and functions, of numbers and of plain attributes treats each element by itself. A name that
is in none of them (`numel`, `shape`, `norm`, `item`, a library's function) may do anything: then parameters stay whole.

The numbers in that code are those of later steps that a trial takes too, by advancing the optimizer's counters.
"""

from __future__ import annotations

import copy
import dis
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

PLAIN = (int, float, bool, str, type(None))

NOT_OF_A_STEP = frozenset(
    {
        "__init__",
        "__setstate__",
        "__getstate__",
        "__repr__",
        "state_dict",
        "load_state_dict",
        "add_param_group",
        "zero_grad",
    }
)
"""Methods that no step calls, or that would be named in it."""

_ARITHMETIC = [
    "abs", "add", "addcdiv", "addcmul", "atan2", "clamp", "copysign", "cos", "div", "eq", "erf", "exp", "fill", "ge", "gt",
    "hypot", "isfinite", "isinf", "isnan", "le", "lerp", "log", "log1p", "logical_and", "logical_not", "logical_or", "lt",
    "masked_fill", "maximum", "minimum", "mul", "nan_to_num", "ne", "neg", "negative", "pow", "reciprocal", "round", "rsqrt",
    "sgn", "sigmoid", "sign", "sin", "sqrt", "square", "sub", "tan", "tanh", "true_divide", "trunc", "where", "xlogy", "zero",
]  # fmt: skip
ELEMENTWISE = frozenset(
    {
        *_ARITHMETIC, *(f"{name}_" for name in _ARITHMETIC), *(f"_foreach_{name}" for name in _ARITHMETIC),
        *(f"_foreach_{name}_" for name in _ARITHMETIC),
        # torch: modes, copies, tensors like another, dtypes
        "torch", "no_grad", "enable_grad", "set_grad_enabled", "clone", "copy_", "detach", "detach_", "data", "grad",
        "zeros_like", "ones_like", "empty_like", "full_like", "preserve_format", "memory_format", "to", "float", "double",
        "half", "bfloat16", "type_as", "dtype", "float16", "float32", "float64", "is_sparse", "is_complex",
        "is_floating_point", "requires_grad", "Tensor", "out",
        # Python: groups, state, numbers
        "super", "step", "param_groups", "state", "get", "setdefault", "update", "items", "keys", "values", "append",
        "closure", "math", "pi", "min", "max", "len", "defaults", "int", "bool", "str", "isinstance", "dict", "list", "tuple",
        "zip", "device", "RuntimeError", "ValueError", "NotImplementedError", "KeyError", "AssertionError", "Exception",
        "ZeroDivisionError",
    }
)  # fmt: skip
"""Names. Of `min`, `max` and `len` only some uses: see `_is_plain_instruction`."""
REDUCING = frozenset({"min", "max"})
"""Of numbers as functions, of tensors as methods."""
CHANCE = (
    "rand",
    "normal",
    "bernoulli",
    "multinomial",
    "uniform",
    "exponential",
    "drop",
    "shuffle",
    "choice",
    "sample",
    "gauss",
)
"""In names."""
FOR_LEN = 12
"""Instructions, of `len(self.state[p]) == 0`."""


def is_known(optimizer: Optimizer) -> bool:
    """Return True for torch's own code, as torch has it. See [Note: known code]."""
    cls = type(optimizer)
    return is_of_torch(cls) and all(
        is_of_torch(_unwrapped(one)) for name, one in vars(cls).items() if callable(one) and not isinstance(one, type)
    )


def is_of_torch(value: Any) -> bool:
    """Return True for a class or a function of torch.optim."""
    return f"{getattr(value, '__module__', '')}.".startswith("torch.optim.")


def replaced_methods(optimizer: Optimizer) -> list[str]:
    """Return the names of methods of its class that the optimizer itself has others for.

    Not what a learning-rate scheduler puts around `step` to count calls.
    """
    return [
        name
        for name, value in vars(optimizer).items()
        if callable(getattr(type(optimizer), name, None)) and not _only_counts(optimizer, name, value)
    ]


def _only_counts(optimizer: Optimizer, name: str, value: Any) -> bool:
    while getattr(value, "_wrapped_by_lr_sched", False):
        value = value.__wrapped__
    value = getattr(value, "__func__", value)
    return value is getattr(type(optimizer), name)


def may_be_elementwise(optimizer: Optimizer) -> bool:
    """Return False if unknown code of the optimizer may look at more than one element. See [Note: names of elementwise code]."""
    cls = type(optimizer)
    own = {name for name, value in vars(optimizer).items() if isinstance(value, PLAIN)}
    own |= {name for name in dir(cls) if isinstance(_unwrapped(getattr(cls, name)), (*PLAIN, types.FunctionType))}
    found = list(_members_of(cls))
    return not any(callable(one) and not isinstance(one, types.FunctionType | type) for one in found) and all(
        _is_elementwise(function, own) for function in functions_of(cls)
    )


def _is_elementwise(function: types.FunctionType, own: set[str]) -> bool:
    if any(not isinstance(cell.cell_contents, (*PLAIN, type)) for cell in function.__closure__ or ()):
        return False
    for code in _codes(function.__code__):
        if any(n not in ELEMENTWISE and n not in own and not _is_known_global(function, n) for n in code.co_names):
            return False
        instructions = list(dis.get_instructions(code))
        if not all(_is_plain_instruction(instructions[at : at + FOR_LEN]) for at in range(len(instructions))):
            return False
    return True


def functions_of(cls: type) -> Iterator[types.FunctionType]:
    """Yield the functions of unknown code that a step may call: methods, and functions of modules that those name."""
    pending = list(_members_of(cls))
    seen: set[int] = set()
    while pending:
        value = _unwrapped(pending.pop())
        if not isinstance(value, types.FunctionType) or id(value) in seen or _is_of_library(value):
            continue
        seen.add(id(value))
        yield value
        names = {name for code in _codes(value.__code__) for name in code.co_names}
        named = [value.__globals__[name] for name in names if name in value.__globals__]
        tables = [
            one.values() if isinstance(one, dict) else one for one in named if isinstance(one, dict | list | tuple)
        ]
        pending += [*named, *(one for table in tables for one in table)]


def _members_of(cls: type) -> Iterator[Any]:
    """Yield what the classes of unknown code have, but for what no step calls."""
    for one in cls.__mro__:
        if one is not Optimizer and one is not object:
            members = (_unwrapped(value) for name, value in vars(one).items() if name not in NOT_OF_A_STEP)
            yield from (value for value in members if not _is_of_library(value))


def _is_of_library(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("torch.")


def sees_places(optimizer: Optimizer) -> bool:
    """Return True if unknown code may look at a parameter's place among others, or at their number."""
    return not _names_of(type(optimizer)).isdisjoint({"enumerate", "range", "zip", "len", "index", "count", "islice"})


def may_draw(optimizer: Optimizer) -> bool:
    """Return True if unknown code names something that may draw random numbers."""
    calls = any(callable(value) and name != "step" for name, value in vars(optimizer).items())
    return calls or any(word in name.lower() for name in _names_of(type(optimizer)) for word in CHANCE)


def _names_of(cls: type) -> set[str]:
    return {name for of in functions_of(cls) for code in _codes(of.__code__) for name in code.co_names}


def numbers_of(optimizer: Optimizer) -> set[int]:
    """Return the whole numbers of 2 and more in unknown code, in what it names, in settings and in attributes."""
    found: list[Any] = [vars(optimizer), *(group for group in optimizer.param_groups)]
    for function in functions_of(type(optimizer)):
        for code in _codes(function.__code__):
            found += code.co_consts
            found += [function.__globals__.get(name) for name in code.co_names]
            found += [getattr(type(optimizer), name, None) for name in code.co_names]
    return set(_whole_numbers(found, 0))


def _whole_numbers(values: Any, depth: int) -> Iterator[int]:
    for value in values.values() if isinstance(values, Mapping) else values:
        if type(value) in (int, float) and value == value and 2 <= value < 1 << 62 and value == int(value):
            yield int(value)
        elif isinstance(value, dict | list | tuple) and depth < 2:
            yield from _whole_numbers(value, depth + 1)


def _unwrapped(value: Any) -> Any:
    value = getattr(value, "__func__", value)  # of class methods
    value = value.fget if isinstance(value, property) else value
    while hasattr(value, "__wrapped__"):  # decorators: torch.no_grad, and torch's own around `step`
        value = value.__wrapped__
    return value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _codes(value)


def _is_known_global(function: types.FunctionType, name: str) -> bool:
    """Return True for a number, or a function that is looked at itself."""
    value = _unwrapped(function.__globals__.get(name, function.__globals__))
    return isinstance(value, PLAIN) or (isinstance(value, types.FunctionType) and not _is_of_library(value))


def _is_plain_instruction(following: Sequence[dis.Instruction]) -> bool:
    """Return False for a product of matrices, `min` and `max` as methods, and `len` if it is not compared with 0."""
    instruction = following[0]
    if instruction.argval == "len":
        at = next((at for at, then in enumerate(following) if then.opname == "COMPARE_OP"), 0)
        return at > 0 and following[at - 1].argval == 0
    if instruction.argval in REDUCING:
        return instruction.opname not in ("LOAD_METHOD", "LOAD_ATTR")
    return "MATRIX" not in instruction.opname and instruction.argrepr not in ("@", "@=")


LATER = (100, 1_000_000)
"""Steps that are tried whatever the code says."""
MAX_TARGETS = 16
MAX_SLOW_TARGETS = 4
MAX_NUMBER = 10_000_000


def targets_of(optimizer: Optimizer, is_slow: bool) -> list[int]:
    """Return the numbers of steps that may begin something: those in its code and settings, and large ones."""
    numbers = sorted(number for number in numbers_of(optimizer) if number <= MAX_NUMBER)
    return [*numbers[-(MAX_SLOW_TARGETS if is_slow else MAX_TARGETS) :], *(LATER[-1:] if is_slow else LATER)]


def advanced(before: Any, after: Any, target: int) -> Any:
    """Return a copy of `after` in which each counter, what has grown by one since `before`, is just below `target`.

    Its next values are `target` - 1, `target` and so on. A counter is not set back.
    """
    if isinstance(after, dict) and isinstance(before, dict):
        return {key: advanced(before.get(key), value, target) for key, value in after.items()}
    if type(after) in (list, tuple) and isinstance(before, list | tuple) and len(before) == len(after):
        return type(after)(advanced(*pair, target) for pair in zip(before, after, strict=True))
    if isinstance(after, torch.Tensor) and isinstance(before, torch.Tensor):
        is_counter = after.numel() == 1 == before.numel() and bool((after - before == 1).all())
        return after.clamp(min=target - 2) if is_counter else after.clone()
    if type(after) in (int, float) and type(before) is type(after) and after - before == 1:
        return type(after)(max(after, target - 2))
    return copy.deepcopy(after)

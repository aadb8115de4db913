"""`written_among` says of a call of torch's what the call does, as versions tell: of functions found by introspection,
and of the table of operations on cold parameters."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from e2e.cold_table import TABLE
from torch import nn
from torch.nn import functional as F

from swapper.tensors.guarded_tensor import tensors_among, written_among

pytestmark = pytest.mark.filterwarnings("ignore")  # of functions that torch deprecates
SHAPE = (8, 16)


class Probe(torch.Tensor):
    """Compares what a function that it is given to has changed with what was said."""

    wrong: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        probes = [tensor for tensor in tensors_among((args, kwargs)) if type(tensor) is Probe]
        with torch._C.DisableTorchFunctionSubclass():
            before = [(tensor._version, tensor.clone()) for tensor in probes]
            said = {id(tensor) for tensor in written_among(func, args, kwargs)}
            result = func(*args, **kwargs)
            written = {
                id(now) for now, (version, was) in zip(probes, before, strict=True) if is_written(now, version, was)
            }
        if not written <= said:
            cls.wrong.append(f"{func.__name__} has written to more than it was said to")
        elif not said & set(map(id, probes)) <= written and func.__name__ not in MAY_WRITE_NOTHING:
            cls.wrong.append(f"{func.__name__} has not written to all that it was said to")
        return result


def is_written(tensor: torch.Tensor, version: int, before: torch.Tensor) -> bool:
    """Batch norms bring their statistics up to date without a version."""
    return tensor._version != version or (tensor.shape == before.shape and not tensor.equal(before))


MAY_WRITE_NOTHING = {
    *("requires_grad_", "resize_", "resize_as_", "share_memory_", "__set__", "kron"),
    *("alpha_dropout", "feature_alpha_dropout"),  # outside of training
}


def probe(*shape: int) -> torch.Tensor:
    return (torch.rand(shape or SHAPE) / 2 + 0.1).as_subclass(Probe)


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Call a function with arguments that may not suit it. Returns whether they do."""
    try:
        with torch.no_grad():
            function(*args, **kwargs)
    except Exception:
        return False
    return True


def tried(function: Callable[..., Any], forms: Sequence[Callable[[], tuple[Any, ...]]], **kwargs: Any) -> bool:
    return any(attempt(function, *form(), **kwargs) for form in forms)


LIKE = [
    lambda: (probe(),),
    lambda: (probe(), 0.5),
    lambda: (probe(), probe()),
    lambda: (probe(), probe(), 0.5),
    lambda: (probe(), probe(), probe()),
    lambda: (probe(), 0, torch.zeros(1, 16, dtype=torch.long), 0.5),
    lambda: (probe(), 0, torch.zeros(1, 16, dtype=torch.long), probe()),
    lambda: (probe(), probe() > 0.3, 0.5),
    lambda: (probe(), probe() > 0.3, probe()),
    lambda: (probe(), probe(8, 7), probe(7, 16)),
    lambda: ([probe(), probe()],),
    lambda: ([probe(), probe()], 0.5),
    lambda: ([probe(), probe()], [probe(), probe()]),
    lambda: ([probe(), probe()], [probe(), probe()], 0.5),
    lambda: ([probe(), probe()], [probe(), probe()], [probe(), probe()]),
]


def named(space: Any, is_meant: Callable[[str], bool]) -> Iterator[Callable[..., Any]]:
    for name in sorted(dir(space)):
        if is_meant(name) and callable(getattr(space, name)):
            yield getattr(space, name)


@pytest.fixture(autouse=True)
def probing() -> Iterator[None]:
    Probe.wrong = []
    yield
    assert not set(Probe.wrong)


def in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


@pytest.mark.whole
@pytest.mark.parametrize("space, least", [(torch.Tensor, 90), (torch, 80)])
def test_functions_in_place(space: Any, least: int) -> None:
    done = [function for function in named(space, in_place) if tried(function, LIKE)]
    assert len(done) >= least


def test_initialisations_by_position_and_by_name() -> None:
    done = 0
    for function in named(nn.init, in_place):
        options = {"val": 0.5} if "val" in inspect.signature(function).parameters else {}
        options |= {"sparsity": 0.5} if "sparsity" in inspect.signature(function).parameters else {}
        done += attempt(function, probe(), **options) + attempt(function, tensor=probe(), **options)
    assert done >= 26


def test_functions_with_a_choice_of_in_place() -> None:
    done = 0
    for function in named(F, str.islower):
        if function is not F.rrelu and "inplace" in getattr(function, "__code__", in_place.__code__).co_varnames:
            done += any(attempt(function, probe(), *more, inplace=True) for more in ((), (0.1, 0.2)))
            done += any(attempt(function, input=probe(), **more) for more in ({"inplace": True},))
            done += attempt(function, probe())
    assert done >= 30


def has_out(name: str) -> bool:
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return any(of.kwarg_only and of.alias_info is not None for schema in schemas for of in schema.arguments)


@pytest.mark.parametrize("space, least", [(torch, 120), (torch.special, 10)])
def test_what_is_put_out(space: Any, least: int) -> None:
    done = 0
    for function in named(space, has_out):
        for arguments, out in itertools.product((1, 2), (1, 2)):
            into = [probe() for _ in range(out)]
            done += attempt(function, *(probe() for _ in range(arguments)), out=into[0] if out == 1 else tuple(into))
    assert done >= least


def test_multi_tensor_functions_and_fused_optimizers() -> None:
    done = [function for function in named(torch, lambda name: name.startswith("_foreach_")) if tried(function, LIKE)]
    assert len(done) >= 80

    def several() -> list[torch.Tensor]:
        return [probe(), probe()]

    numbers = {"lr": 0.1, "weight_decay": 0.1, "maximize": False}
    betas = {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "amsgrad": True}
    steps = [probe(1)[0] for _ in range(2)]
    torch._fused_adamw_(several(), several(), several(), several(), several(), steps, **numbers, **betas)
    Probe.wrong = [text for text in Probe.wrong if "not written to all" not in text]  # a scale would change gradients


def test_statistics_that_are_brought_up_to_date() -> None:
    def stats() -> dict[str, torch.Tensor]:
        return {"running_mean": probe(16), "running_var": probe(16)}

    assert attempt(F.batch_norm, probe(), *stats().values(), training=True)
    assert attempt(F.batch_norm, probe(), **stats(), training=True)
    assert attempt(torch.batch_norm, probe(), None, None, *stats().values(), True, 0.1, 1e-5, False)
    assert attempt(F.instance_norm, probe(4, 16, 9), **stats(), use_input_stats=True)
    assert attempt(F.embedding, torch.tensor([1, 2]), probe(), max_norm=0.01)
    assert attempt(F.embedding, torch.tensor([1, 2]), probe(), None, 0.01)
    assert attempt(F.embedding_bag, torch.tensor([[1, 2]]), probe(), max_norm=0.01)


def test_the_table_of_operations_on_cold_parameters() -> None:
    some = list(TABLE.items())[:: 1 if os.environ.get("SWAPPER_TEST_ALL") else 11]
    done = [name for name, operation in some if attempt(operation, probe(512, 128), probe(512, 128))]
    assert len(done) > len(some) * 0.9

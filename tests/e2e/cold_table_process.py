"""The process that test_cold_table.py starts: does each operation of cold_table.py to a cold parameter and to a plain one.

A process of its own, since what is tested may crash it. See cold_process.py.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import swapper
from e2e.cold_process import say
from e2e.cold_table import TABLE, Operation
from e2e.models import Net, train_step
from e2e.twins import Twins, send_away

ROOM_BYTES = 3 << 20


def run(directory: Path, options: dict[str, Any], names: list[str]) -> None:
    """Do the operations, saying what came of each, one JSON object a line: "works", "refused" or what was wrong."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
    pair = Twins(directory, Net(), room_bytes=ROOM_BYTES, **options)
    pair.train(train_step, steps=2)
    pair.plain.zero_grad()
    for number, name in enumerate(names):
        say(begin=name)
        with both_as_before(pair), pair.manager.accumulate():  # no backward here is the last one of a step
            try:
                outcome = do(pair, name, TABLE[name], number)
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error}"[:500]
        say(result=outcome)
    pair.train(train_step, steps=2)
    pair.finish()
    say(finished=True)


def do(pair: Twins, name: str, operation: Operation, seed: int) -> str:
    """Do one operation to both. Returns what came of it."""
    expected, plain_error = attempt(operation, pair.plain, seed)
    send_away(pair.manager)
    actual, error = attempt(operation, pair.swapped, seed)
    if error is not None:
        pair.manager.current.run.model.passes.abandon()  # as the next forward would
    if isinstance(error, swapper.SwapperError):
        for parameter in pair.plain.parameters():
            parameter.grad = None
        pair.swapped.zero_grad()
        return "refused"
    if type(error) is not type(plain_error):
        raise error or AssertionError(f"plain torch raises {plain_error!r}")
    same(actual, expected)
    plain_error = differentiate(expected)
    send_away(pair.manager)
    error = differentiate(actual)
    if error is not None:
        pair.manager.current.run.model.passes.abandon()
    if type(error) is not type(plain_error):
        raise error or AssertionError(f"plain torch raises in backward {plain_error!r}")
    for one, other in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), "one of them has a gradient"
        same(pair.gradient(one), other.grad)
    for layer in ("head", "embedding"):
        one, other = pair.swapped.get_submodule(layer).weight, pair.plain.get_submodule(layer).weight
        with pair.manager.gather(one):
            same(one.detach(), other.detach())
    pair.check_pager()
    return "works"


def attempt(operation: Operation, model: Any, seed: int) -> tuple[Any, BaseException | None]:
    torch.manual_seed(seed)
    try:
        return operation(model.head.weight, model.embedding.weight), None
    except Exception as error:
        return None, error


def differentiate(result: Any) -> BaseException | None:
    """Go back through what has a graph; returns the error, if any."""
    leaves = [t for t in leaves_of(result) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    total = [t.abs().float().sum() if t.is_complex() else t.float().sum() for t in leaves]
    try:
        if total:
            torch.stack(total).sum().backward()
    except RuntimeError as error:
        return error
    return None


def same(actual: Any, expected: Any) -> None:
    """Assert that two results are the same, bit for bit."""
    for one, other in zip(leaves_of(actual), leaves_of(expected), strict=True):
        if not isinstance(other, torch.Tensor):
            assert one == other or (one != one and other != other) or isinstance(other, torch.autograd.graph.Node), (
                one,
                other,
            )
            continue
        assert (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)
        if other.layout is torch.strided:
            assert one.stride() == other.stride(), "strides"
        one, other = one.detach(), other.detach()
        if other.layout is not torch.strided:
            one, other = one.to_dense(), other.to_dense()
        assert torch.equal(bits(one), bits(other)), "other values"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().contiguous().resolve_conj().view(-1).view(torch.uint8)


def leaves_of(tree: Any) -> list[Any]:
    if isinstance(tree, list | tuple):
        return [leaf for item in tree for leaf in leaves_of(item)]
    return [tree]


@contextmanager
def both_as_before(pair: Twins) -> Iterator[None]:
    """Restore the two parameters and forget gradients afterwards."""
    plain = {layer: pair.plain.get_submodule(layer).weight for layer in ("head", "embedding")}
    before = {layer: weight.detach().clone() for layer, weight in plain.items()}
    try:
        yield
    finally:
        pair.plain.zero_grad()
        pair.swapped.zero_grad()
        for layer, value in before.items():
            cold = pair.swapped.get_submodule(layer).weight
            with pair.manager.gather(cold):
                is_same = torch.equal(cold.detach(), value) and torch.equal(plain[layer].detach(), value)
            if not is_same or plain[layer].shape != value.shape:
                plain[layer].data = value
                with pair.manager.gather(cold, write=True), torch.no_grad():
                    cold.copy_(value)


if __name__ == "__main__":
    run(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))

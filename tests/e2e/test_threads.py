"""Threads that use a model in training at once: they take turns, and each sees the parameters of one whole step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import swapper
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]
THREADS, STEPS = 3, 3
WAYS: list[dict[str, Any]] = [
    {},
    {"params": "host"},
    {"update": "deferred"},
    {"gradients": "nvme"},
    {"master_weights": torch.float32},
]


def name_of(value: Any) -> str:
    return "-".join(str(part) for part in value.values()) or "nvme" if isinstance(value, dict) else str(value)


def evaluate(model: Any, batch: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return loss_of(model, batch)


@pytest.mark.parametrize(
    ("way", "checkpointing"), [*((way, None) for way in WAYS), ({}, False), ({}, True)], ids=name_of
)
def test_evaluation_while_training_sees_whole_steps_and_changes_none(
    twins: MakeTwins, way: Any, checkpointing: bool | None
) -> None:
    pair = twins(Net(checkpointing=checkpointing), master="master_weights" in way, **way)
    batch = tokens()
    expected = [evaluate(pair.plain, batch)]
    done, seen = threading.Event(), [[] for _ in range(THREADS)]

    def keep_evaluating(found: list[torch.Tensor]) -> None:
        while not done.is_set():
            found.append(evaluate(pair.swapped, batch))

    with ThreadPoolExecutor(THREADS) as pool:
        running = [pool.submit(keep_evaluating, found) for found in seen]
        try:
            for number in range(STEPS):
                losses = []
                for model, optimizer in (pair.plain, pair.plain_optimizer), (pair.swapped, pair.optimizer):
                    torch.manual_seed(number)
                    losses.append(train_step(model, optimizer))
                    if model is pair.plain:
                        expected.append(evaluate(pair.plain, batch))
                assert torch.equal(*losses)
        finally:
            done.set()
        for future in running:
            future.result()
    assert all(seen)
    for found in seen:
        order = [next(n for n, loss in enumerate(expected) if torch.equal(loss, one)) for one in found]
        assert order == sorted(order)
    pair.finish(paged=way.get("params") != "host")


def test_threads_that_train_together_accumulate_each_others_gradients_whole(twins: MakeTwins) -> None:
    pair = twins(Net())
    batches = [tokens() for _ in range(THREADS)]

    def backward(batch: torch.Tensor) -> None:
        (loss_of(pair.swapped, batch) * 0).backward()  # zeros: the sum does not depend on the order

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(STEPS):
            list(pool.map(backward, batches))
            (loss_of(pair.plain, batches[0]) * 0).backward()
            pair.train(train_step, steps=1)
    pair.finish()


def test_gather_state_and_snapshots_beside_evaluation(twins: MakeTwins, tmp_path: Path) -> None:
    pair = twins(Net())
    done, batch = threading.Event(), tokens()
    expected = evaluate(pair.plain, batch)

    def keep_evaluating() -> None:
        while not done.is_set():
            assert torch.equal(evaluate(pair.swapped, batch), expected)

    with ThreadPoolExecutor(THREADS) as pool:
        running = [pool.submit(keep_evaluating) for _ in range(THREADS)]
        try:
            for number in range(STEPS):
                pair.assert_same_parameters()
                pair.assert_same_state()
                pair.manager.snapshot(tmp_path / f"{number}.pt").wait()
        finally:
            done.set()
        for future in running:
            future.result()
    pair.finish(paged=False)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ArithmeticError])
def test_a_pass_that_never_ended_leaves_its_turn_to_the_others(twins: MakeTwins, where: str, error: Any) -> None:
    pair = twins(Net())
    batch = tokens()

    def stop(*_: Any) -> None:
        raise error

    def broken() -> None:
        if where == "forward":
            handle = pair.swapped.blocks[1].act.register_forward_pre_hook(stop)
            loss_of(pair.swapped, batch)
        else:
            handle = pair.swapped.blocks[1].norm.register_forward_hook(
                lambda *args: args[-1].register_hook(stop) and None
            )
            loss_of(pair.swapped, batch).backward()
        handle.remove()

    hooks = [pair.swapped.blocks[1].act._forward_pre_hooks, pair.swapped.blocks[1].norm._forward_hooks]
    before = [dict(hook) for hook in hooks]
    with pytest.raises(error):
        broken()
    for hook, kept in zip(hooks, before, strict=True):
        for key in [key for key in hook if key not in kept]:
            del hook[key]
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(evaluate, pair.swapped, batch).result(60), evaluate(pair.plain, batch))
    pair.optimizer.zero_grad()
    pair.train(train_step, steps=2)
    pair.finish()


def test_closing_waits_for_the_forward_of_another_thread_and_refuses_the_next(twins: MakeTwins) -> None:
    pair = twins(Net())
    inside, go_on = threading.Event(), threading.Event()
    batch = tokens()
    expected = evaluate(pair.plain, batch)

    def wait(*_: Any) -> None:
        inside.set()
        assert go_on.wait(60)

    handle = pair.swapped.blocks[1].act.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(evaluate, pair.swapped, batch)
        assert inside.wait(60)
        second = pool.submit(evaluate, pair.swapped, batch)
        closing = pool.submit(pair.manager.close)
        handle.remove()
        go_on.set()
        assert torch.equal(first.result(60), expected)
        closing.result(60)
        try:
            assert torch.equal(second.result(60), expected)  # it came before `close`
        except swapper.StateError as refused:
            assert "closed" in str(refused)

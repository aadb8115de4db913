"""`swapper.offload_activations`: saved activations wait on the drive, and gradients are plain torch's, bit for bit."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input.injected import Injector
from torch import nn
from torch.nn import functional as F

import swapper
from e2e.models import Net, finish_step, train_step
from e2e.saved_activations import (
    WIDTH,
    Residual,
    assert_equal,
    assert_failures_are_errors,
    gradients,
    retained_and_double,
    swapped_only,
)
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]
SMALL = {"to": "nvme", "host_memory": "1MiB", "min_bytes": "4KiB"}


@pytest.mark.parametrize("to, host_memory", [("nvme", "1MiB"), ("nvme", 1), ("auto", "2MiB"), ("auto", "1GiB")])
def test_gradients_are_plain_torchs(manager: swapper.SwapManager, to: str, host_memory: Any) -> None:
    model, value = Residual(), torch.randn(2, 128, WIDTH)
    expected = gradients(model, lambda: model(value).square().mean())
    activations = swapper.offload_activations(manager, to=to, host_memory=host_memory, min_bytes="64KiB")
    for _ in range(3):
        with activations:
            assert_equal(gradients(model, lambda: model(value).square().mean()), expected)
    counters = activations.counters
    assert counters.saved > counters.storages > 0
    assert (counters.written_bytes > 0) == (host_memory != "1GiB")
    assert (counters.read_bytes > 0) == (host_memory != "1GiB")


def test_backward_may_come_after_the_context(manager: swapper.SwapManager) -> None:
    model, value = Residual(), torch.randn(2, 128, WIDTH)
    expected = gradients(model, lambda: model(value).square().mean())

    def run() -> torch.Tensor:
        with swapper.offload_activations(manager, **SMALL):
            return model(value).square().mean()

    assert_equal(gradients(model, run), expected)


def test_compiled_layers_and_the_hooks_that_torch_calls_among_them(manager: swapper.SwapManager) -> None:
    """Within what torch.compile runs it would trace into the hooks too, and fail at storages."""
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    model.compile(backend="eager")
    activations = swapper.offload_activations(manager, **SMALL)
    for length in (128, 64, 96):
        value = torch.randn(2, length, WIDTH)
        expected = gradients(model, lambda value=value: (value + model(value)).square().mean())
        with activations:
            assert_equal(gradients(model, lambda value=value: (value + model(value)).square().mean()), expected)
    assert activations.counters.written_bytes > 0


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_together_with_the_pager(twins: MakeTwins, checkpointing: bool | None, update: str) -> None:
    pair = twins(Net(depth=6, dropout=0.1, checkpointing=checkpointing), update=update)
    activations = swapper.offload_activations(pair.manager, **SMALL)
    pair.train(swapped_only(pair, activations, train_step), steps=3)
    assert activations.counters.written_bytes > 0
    pair.finish()


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_architectures(twins: MakeTwins, name: str) -> None:
    pytest.importorskip("transformers")
    from e2e.architectures import MODELS, Size

    make, loss = MODELS[name]
    pair = twins(make(Size()).train())
    activations = swapper.offload_activations(pair.manager, **SMALL)

    def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
        value = loss(model)
        return finish_step(value, optimizer)

    pair.train(swapped_only(pair, activations, step), steps=3)
    assert activations.counters.written_bytes > 0
    pair.finish()


def test_a_storage_is_moved_once(manager: swapper.SwapManager) -> None:
    value = torch.randn(64, 64, requires_grad=True)
    with swapper.offload_activations(manager, **SMALL) as activations:
        hidden = value * 1.0
        kept = [hidden.sin(), hidden[:32].sin(), hidden.t().sin(), hidden.view(16, 256).sin()]
    assert (activations.counters.saved, activations.counters.storages) == (4, 1)
    assert activations.counters.written_bytes == hidden.nbytes
    del kept


def test_views_come_back_as_they_were(manager: swapper.SwapManager) -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, *values: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(*values)
            return values[0].sum()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> Any:
            seen.extend(context.saved_tensors)
            return (gradient.expand(seen[0].shape), *([None] * (len(seen) - 1)))

    whole = torch.randn(4, 8, 32, 32, requires_grad=True) * 1
    other = torch.randint(0, 9, (64, 64))
    values = [whole, whole[1:3, :, 4], whole.permute(0, 2, 3, 1), whole.contiguous(memory_format=torch.channels_last)]
    values += [
        other,
        other.t() > 4,
        whole[:, :1].expand(4, 8, 32, 32),
        whole.bfloat16(),
        torch.view_as_complex(whole.view(-1, 2)),
    ]
    with swapper.offload_activations(manager, **SMALL):
        result = Look.apply(*values)
    result.backward()
    assert len(seen) == len(values)
    for one, value in zip(seen, values, strict=True):
        assert torch.equal(one, value)
        assert (one.dtype, one.shape, one.stride()) == (value.dtype, value.shape, value.stride())


def test_parameters_and_what_shares_their_memory_stay(twins: MakeTwins) -> None:
    pair = twins(Net(depth=6))
    model = pair.swapped
    with swapper.offload_activations(pair.manager, **SMALL) as activations:
        with pair.manager.gather(model.blocks[0]):
            bound = torch.randn(2, 512, requires_grad=True) * 1
            for weight in (
                model.blocks[0].down.weight,
                model.blocks[0].down.weight.detach(),
                model.blocks[0].down.weight[:64],
            ):
                F.linear(bound[:, : weight.shape[1]], weight)
    assert activations.counters.left_alone == 3


def test_retain_graph_and_double_backward(manager: swapper.SwapManager) -> None:
    value = torch.randn(64, 64, requires_grad=True)
    expected = retained_and_double(value)
    with swapper.offload_activations(manager, to="nvme", host_memory=1, min_bytes="4KiB") as activations:
        assert_equal(retained_and_double(value), expected)
    assert activations.counters.read_bytes > activations.counters.written_bytes > 0


@pytest.mark.whole
@pytest.mark.parametrize("nbytes", ["4KiB", "1MiB"])  # moved, and left alone
def test_a_change_in_place_is_noticed(manager: swapper.SwapManager, nbytes: str) -> None:
    value = torch.randn(64, 64, requires_grad=True)
    with swapper.offload_activations(manager, to="nvme", min_bytes=nbytes):
        hidden = value * 2
        result = hidden.sin().sum()
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()
        hidden = value * 2
        once = hidden.relu_().sum()  # the result is what is saved
        once.backward()


def test_what_is_changed_between_two_saves_is_saved_twice(manager: swapper.SwapManager) -> None:
    value = torch.randn(64, 64)
    first, second = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    with swapper.offload_activations(manager, **SMALL) as activations:
        other = (second * value).sum()
        value.add_(1)
        result = (first * value).sum()
    assert activations.counters.storages == 2
    result.backward()
    assert torch.equal(first.grad, value)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_memory_and_room_on_the_drive_come_back(manager: swapper.SwapManager) -> None:
    model, value = Residual(), torch.randn(2, 128, WIDTH)
    activations = swapper.offload_activations(manager, **SMALL)
    with activations:
        for _ in range(3):
            result = model(value).sum()  # never run backward
            assert len(activations._known) > 0
            del result
            assert len(activations._known) == 0  # at once, without the garbage collector
    start = value.clone().requires_grad_() * 1
    start.register_hook(lambda _: 1 / 0)
    with activations, pytest.raises(ZeroDivisionError):
        model(start).sum().backward()
    del start
    with activations:
        model(value).sum().backward()
    gc.collect()
    activations._cache._find_engine().drain()
    with activations:
        pass
    assert activations.counters.held_bytes == 0
    assert activations._cache._file._extents.used_bytes == 0
    assert activations._cache._file.allocated_bytes < 3 * activations.counters.written_bytes / 4


def test_nothing_is_remembered_of_steps_that_are_over(manager: swapper.SwapManager) -> None:
    model, value = Residual(), torch.randn(2, 128, WIDTH)
    activations = swapper.offload_activations(manager, to="auto", host_memory="1GiB", min_bytes="4KiB")
    for _ in range(3):
        with activations:
            model(value).sum().backward()
    with activations:
        pass
    cache = activations._cache
    assert activations.counters.storages > 3 and activations.counters.written_bytes == 0
    assert (len(cache._live), len(cache._here), cache._here_bytes) == (0, 0, 0)


def test_no_more_in_memory_than_asked_for(manager: swapper.SwapManager) -> None:
    model, value = Residual(8), torch.randn(2, 128, WIDTH)
    largest = 2 * 128 * 3 * WIDTH * 4
    for to in ("auto", "nvme"):
        activations = swapper.offload_activations(manager, to=to, host_memory="2MiB", min_bytes="4KiB")
        with activations:
            model(value).sum().backward()
        assert activations.counters.peak_bytes <= (2 << 20) + largest < activations.counters.written_bytes


def test_a_full_drive_is_named(small_tmpfs: Path) -> None:
    model, value = Residual(8), torch.randn(2, 128, WIDTH)
    with swapper.SwapManager(small_tmpfs, host_memory="64MiB") as manager:
        activations = swapper.offload_activations(manager, **SMALL)

        def fail() -> None:
            with activations, pytest.raises(swapper.IoError, match="No space left"):
                model(value).sum()

        for _ in range(2):
            fail()
        gc.collect()  # the error's traceback has the forward's tensors
        with activations:  # what there is room for can be done
            small = Residual(1)
            actual = gradients(small, lambda: small(value).sum())
        assert_equal(actual, gradients(small, lambda: small(value).sum()))


@pytest.mark.parametrize("seed", range(6))
def test_transfers_that_fail_are_errors_and_never_gradients(manager: swapper.SwapManager, seed: int) -> None:
    assert_failures_are_errors(swapper.offload_activations(manager, **SMALL), seed)


def test_a_closed_manager_is_named(tmp_path: Path) -> None:
    value = torch.randn(64, 64, requires_grad=True)
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        activations = swapper.offload_activations(manager, to="nvme", host_memory=1, min_bytes=1)
        with activations:
            result = (value * 2).sin().sum()
    with pytest.raises(swapper.StateError, match="closed"):
        result.backward()
    with pytest.raises(swapper.StateError, match="closed"):
        activations.__enter__()


def test_options_are_checked(manager: swapper.SwapManager) -> None:
    for options in ({"to": "moon"}, {"host_memory": 0}, {"min_bytes": "many"}):
        with pytest.raises(swapper.ConfigError):
            swapper.offload_activations(manager, **options)


@pytest.mark.parametrize("name", ["grad", "vjp", "jacrev", "hessian"])
def test_transforms_that_torch_refuses_there_are_refused_by_name(manager: swapper.SwapManager, name: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).square().sum()

    x = torch.randn(8)
    with pytest.raises(swapper.UnsupportedError, match=r"torch\.func.*offload_activations.*outside"):
        with swapper.offload_activations(manager):
            found = getattr(torch.func, name)(loss, *[x][: name == "vjp"])
            found(x)
    expected = torch.func.grad(loss)(x)
    with swapper.offload_activations(manager, min_bytes=1):
        (gradient,) = torch.autograd.grad(loss(x.requires_grad_()), x)
    assert torch.equal(gradient, expected)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that strikes in a destructor
def test_after_an_exception_of_another_thread_gradients_are_right_or_refused(manager: swapper.SwapManager) -> None:
    model, value = Residual(), torch.randn(2, 128, WIDTH)
    expected = gradients(model, lambda: model(value).square().mean())
    activations = swapper.offload_activations(manager, **SMALL)

    def run() -> list[torch.Tensor]:
        return gradients(model, lambda: model(value).square().mean())

    with activations:
        counter = Injector(-1, "thread")
        assert counter.run(run) is None
    refused = 0
    for at in random.Random(1).sample(range(1, counter.count + 1), 30):
        with activations:
            Injector(at, "thread").run(run)
        try:
            with activations:
                assert_equal(run(), expected)
        except swapper.StateError as error:
            assert "while saved activations were being moved" in str(error)
            refused += 1
            activations = swapper.offload_activations(manager, **SMALL)
            with activations:
                assert_equal(run(), expected)
    assert 0 < refused < 30

"""Writes to a loaded model's weights, past torch's version counter and past the guard too: kept where the weight
stays in memory, or refused by name and undone. Never lost without a word."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import swapper
from infer.small import TOKENS, on_meta, run

BUDGETS = {"streamed": "6MiB", "resident": "1GiB"}


def by_data(weight: torch.Tensor) -> None:
    weight.data[0, 0] += 1


def by_clamping(weight: torch.Tensor) -> None:
    weight.data.clamp_(-1e-3, 1e-3)


def by_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[-1, -1] += 1


def by_dlpack(weight: torch.Tensor) -> None:
    torch.utils.dlpack.from_dlpack(weight.detach())[3, 5] += 1


def by_copying(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(weight + 1)


def by_address(weight: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        ctypes.cast(weight.data_ptr(), ctypes.POINTER(ctypes.c_float))[weight.numel() // 2] = 7.0


def past_the_dispatcher(weight: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        weight.copy_(torch.full(weight.shape, 0.5))


WRITES = [by_data, by_clamping, by_numpy, by_dlpack, by_copying, by_address, past_the_dispatcher]
Write = Callable[[torch.Tensor], None]


LAYER = "layers.3.mlp_in"


def load(path: Any, opened: list[Any], how: str, **options: Any) -> nn.Module:
    """Return a loaded model after its first pass, with which what stays in memory has settled."""
    opened.append(swapper.load(on_meta(), path, host_memory=BUDGETS[how], **options))
    run(opened[-1])
    return opened[-1]


def write_in_forward(model: nn.Module, write: Write) -> Any:
    return model.get_submodule(LAYER).register_forward_pre_hook(lambda module, _: write(module.weight))


def attempt(work: Callable[[], Any]) -> tuple[Any, swapper.SwapperError | None]:
    try:
        return work(), None
    except swapper.SwapperError as error:
        return None, error


@pytest.mark.parametrize("how", BUDGETS)
@pytest.mark.parametrize("write", WRITES)
def test_in_a_forward_a_write_is_kept_or_refused(path, reference, opened, how, write):
    expected = run(reference)
    model = load(path, opened, how)
    is_plain = type(model.get_submodule(LAYER).weight) is nn.Parameter
    assert is_plain == (how == "resident")
    hook = write_in_forward(model, write)
    output, error = attempt(lambda: run(model))
    hook.remove()
    if is_plain:
        write_in_forward(reference, write)
        assert error is None and torch.equal(output, run(reference))
        return
    assert isinstance(error, swapper.StateError) and f"{LAYER}.weight was changed" in str(error)
    for _ in range(2):
        assert torch.equal(run(model), expected)


@pytest.mark.parametrize("how", BUDGETS)
@pytest.mark.parametrize("write", WRITES)
def test_between_passes_a_write_is_kept_or_refused(path, reference, opened, how, write):
    expected = run(reference)
    model = load(path, opened, how)
    _, error = attempt(lambda: write(model.get_submodule(LAYER).weight))
    if how == "resident":
        write(reference.get_submodule(LAYER).weight)
        assert error is None and torch.equal(run(model), run(reference))
        return
    if write not in (by_numpy, by_dlpack):  # those have written to what detach() gave, which is as of a state_dict
        if error is None:  # nobody could tell before
            _, error = attempt(lambda: run(model))
        assert isinstance(error, swapper.StateError) and f"{LAYER}.weight" in str(error)
    for _ in range(2):
        assert torch.equal(model.get_submodule(LAYER).weight + 0, reference.get_submodule(LAYER).weight)
        assert torch.equal(run(model), expected)


def test_a_write_is_seen_wherever_it_lies_and_however_little_it_is(path, reference, opened):
    """Each weight of a layer that streams, first and last byte; by the next pass, though that need not read it."""
    expected = run(reference)
    model = load(path, opened, "streamed")
    away = [(name, p) for name, p in model.named_parameters() if type(p) is not nn.Parameter]
    assert len(away) > 8
    for name, weight in away[::3]:
        for at in (0, weight.nbytes - 1):
            with torch._C.DisableTorchFunctionSubclass():
                ctypes.cast(weight.data_ptr(), ctypes.POINTER(ctypes.c_uint8))[at] ^= 1
            with pytest.raises(swapper.StateError, match=f"parameter {name} was changed"):
                run(model)
    assert torch.equal(run(model), expected)


@pytest.mark.parametrize("write", [by_clamping, by_numpy])
def test_of_several_threads_each_is_told(path, reference, opened, write):
    expected = run(reference)
    model = load(path, opened, "streamed")
    hook = write_in_forward(model, write)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(attempt(lambda: run(model)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hook.remove()
    assert len(found) == 4 and all(f"{LAYER}.weight was changed" in str(error) for _, error in found)
    assert torch.equal(run(model), expected)


def test_of_several_batches_that_pass_together_too(path, reference, opened):
    expected = run(reference)
    model = load(path, opened, "streamed")
    hook = write_in_forward(model, by_clamping)
    with pytest.raises(swapper.StateError, match=f"{LAYER}.weight was changed"), torch.no_grad():
        swapper.loaded(model).map(model, [TOKENS, TOKENS])
    hook.remove()
    with torch.no_grad():
        assert all(torch.equal(out, expected) for out in swapper.loaded(model).map(model, [TOKENS, TOKENS]))


@pytest.mark.parametrize("where", ["converted", "device"])
def test_of_weights_that_are_copies_what_torch_counts_is_refused_and_undone(path, reference, opened, device, where):
    options = {"device": device, "device_memory": "3MiB"} if where == "device" else {"dtype": torch.bfloat16}
    expected = run(reference if where == "device" else reference.to(torch.bfloat16))
    model = on_meta() if where == "device" else on_meta(dtype=torch.bfloat16)
    opened.append(swapper.load(model, path, host_memory=BUDGETS["streamed"], **options))
    for _ in range(2):
        hook = write_in_forward(model, by_copying)
        with pytest.raises(swapper.StateError, match=f"{LAYER}.weight was changed"):
            run(model)
        hook.remove()
        assert torch.equal(run(model), expected)

"""The plain torch that kernels are held to: against torch's own optimizer and functions, and what it refuses."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import torch

from swapper import ConfigError, UnsupportedError
from swapper.device import kernels
from swapper.device.kernels import kernel, philox, random_words


def slice_of(count: int, **others: torch.Tensor) -> kernels.AdamWSlice:
    tensors = {name: torch.zeros(count) for name in ("master", "exp_avg", "exp_avg_sq", "gradient")}
    return kernels.AdamWSlice(**{**tensors, **others})  # type: ignore[arg-type]


def test_adamw_is_torchs_but_for_the_last_bits() -> None:
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(1000))
    part = slice_of(1000, master=parameter.detach().clone())
    optimizer = torch.optim.AdamW([parameter], lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for number in range(1, 6):
        parameter.grad = torch.randn(1000)
        part.gradient.copy_(parameter.grad)
        optimizer.step()
        kernels.update_(part, kernels.AdamWStep(number, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1))
    torch.testing.assert_close(part.master, parameter.detach(), rtol=2e-6, atol=2e-7)
    torch.testing.assert_close(part.exp_avg, optimizer.state[parameter]["exp_avg"], rtol=1e-6, atol=1e-7)


def test_the_generator_is_philox() -> None:
    """The first words of Random123's known answers, for 4x32 with 10 rounds: of zeros, and of ones throughout."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert [word.item() for word in philox(0, zero, zero, zero, zero)] == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]
    ones = zero + 0xFFFFFFFF
    found = [word.item() for word in philox((1 << 64) - 1, ones, ones, ones, ones)]
    assert found == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_words_depend_on_their_number_alone() -> None:
    whole = random_words(3, 4, 0, 100, torch.device("cpu"))
    assert torch.equal(whole[40:61], random_words(3, 4, 40, 21, torch.device("cpu")))
    assert not torch.equal(whole, random_words(3, 5, 0, 100, torch.device("cpu")))
    assert not torch.equal(whole, random_words(4, 4, 0, 100, torch.device("cpu")))


def test_stochastic_rounding_is_right_on_average_and_leaves_what_needs_none() -> None:
    count = 40_000
    value = 1 + 0.3 / 128  # between two neighbours in bf16, 3 tenths of the way
    words = random_words(1, 1, 0, count, torch.device("cpu"))
    rounded = kernels.stochastically_rounded(torch.full((count,), value), words).float()
    assert set(rounded.tolist()) == {1.0, 1.0078125}
    assert abs(rounded.mean().item() - value) < 5 * 0.0078125 * 0.46 / count**0.5
    exact = torch.tensor([1.0, -2.5, 0.0, torch.inf, -torch.inf])
    assert torch.equal(kernels.stochastically_rounded(exact, words[:5]).float(), exact)
    assert kernels.stochastically_rounded(torch.tensor([torch.nan]), words[:1]).isnan().all()


@pytest.mark.whole
@pytest.mark.parametrize(
    "act, message",
    [
        (lambda: kernels.update_(slice_of(4, gradient=torch.zeros(5)), kernels.AdamWStep(1)), "equally long"),
        (lambda: kernels.update_(slice_of(4, master=torch.zeros(4).half()), kernels.AdamWStep(1)), "fp32"),
        (lambda: kernels.update_(slice_of(4, parameter=torch.zeros(4)), kernels.AdamWStep(1)), "bf16 or fp16"),
        (
            lambda: kernels.update_(slice_of(4, parameter=torch.zeros(4).half()), kernels.AdamWStep(1, seed=1)),
            "stochastic",
        ),
        (lambda: kernels.update_(slice_of(4), kernels.AdamWStep(1), factor=torch.ones(2)), "factor"),
        (
            lambda: kernels.update_(slice_of(4, gradient=torch.zeros(4, device="meta")), kernels.AdamWStep(1)),
            "one device",
        ),
        (lambda: kernels.AdamWStep(0), "step"),
        (lambda: kernels.AdamWStep(1, seed=-1), "seed"),
        (lambda: kernels.quantise(torch.zeros(2, 33), 8, 32), "whole blocks"),
        (lambda: kernels.quantise(torch.zeros(2, 64), 5, 32), "bits"),
        (lambda: kernels.quantise(torch.zeros(2, 64), 8, 0), "power of two"),
        (lambda: kernels.quantise(torch.zeros(64), 8, 32), "matrix"),
        (
            lambda: kernels.dequantise_(torch.zeros(2, 9, dtype=torch.uint8), torch.zeros(2, 32), 8, 32),
            "quantised rows",
        ),
    ],
)
def test_what_does_not_fit_is_named(act: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        act()


def test_without_triton_the_error_says_how_to_get_it(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    ran = run_python("""
        import sys
        sys.modules["triton"] = None
        import swapper
        from swapper.device.kernels import kernel
        try:
            kernel("arithmetic")
        except swapper.UnsupportedError as error:
            print(error)
    """)
    assert "torch-swapper[triton]" in ran.stdout, ran.stderr


def test_another_missing_module_is_not_called_triton() -> None:
    with pytest.raises(ImportError) as raised:
        kernel("no_such_kernel")
    assert not isinstance(raised.value, UnsupportedError)


def test_an_update_of_nothing_and_one_after_an_overflow_change_nothing() -> None:
    part = slice_of(100)
    before = [tensor.clone() for tensor in (part.master, part.exp_avg, part.exp_avg_sq)]
    kernels.update_(part, kernels.AdamWStep(1), None, torch.ones(1))
    for tensor, old in zip((part.master, part.exp_avg, part.exp_avg_sq), before, strict=True):
        assert torch.equal(tensor, old)
    kernels.update_(slice_of(0), kernels.AdamWStep(1))

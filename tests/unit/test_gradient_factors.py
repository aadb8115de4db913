"""Clipping and unscaling of gradients that are elsewhere: what all of them need comes from a device at once."""

from __future__ import annotations

import pytest
import torch
from e2e.waits import Waits

from swapper.train.gradients.cold_grad import GradientMeta, GradientSlot, _Factor
from swapper.train.gradients.paged_grads import USUAL_NORM, PagedGradients


def test_whether_norms_are_finite_is_one_wait_for_all() -> None:
    slots = [GradientSlot(str(number), torch.nn.Parameter(torch.zeros(1)), None) for number in range(50)]  # type: ignore[arg-type]
    for number, slot in enumerate(slots):
        dtype = torch.bfloat16 if number % 2 else torch.float32
        slot.content = GradientMeta(norms={USUAL_NORM: torch.tensor(1.0 if number % 7 else torch.inf, dtype=dtype)})
    slots[-1].content.norms.clear()
    with Waits() as waits:
        PagedGradients.find_finite(None, slots)  # type: ignore[arg-type]
    assert [slot.content.finite for slot in slots[:-1]] == [True if n % 7 else None for n in range(49)]
    assert slots[-1].content.finite is None
    assert waits.count <= 1


@pytest.mark.gpu
def test_factors_of_a_device_come_at_once_at_the_first_use_and_as_they_were() -> None:
    given = torch.tensor(3.0, device="cuda")
    factors = [_Factor(given) for _ in range(20)]
    other = _Factor(torch.tensor(2.0, dtype=torch.float64, device="cuda"))
    given.data.mul_(5)  # they have had their value since they were given
    assert factors[0].on_device_of(given).device == given.device
    with Waits() as waits:
        found = [torch.ones(2).mul(factor.on_device_of(torch.ones(2))) for factor in (*factors, other)]
    assert waits.count == 2
    assert torch.equal(torch.stack(found[:-1]), torch.full((20, 2), 3.0)) and torch.equal(
        found[-1], torch.full((2,), 2.0)
    )


def test_a_factor_in_host_memory_has_the_value_of_the_call() -> None:
    given = torch.tensor(3.0)
    factor = _Factor(given)
    given.mul_(5)
    assert factor.on_device_of(torch.ones(2)).item() == 3

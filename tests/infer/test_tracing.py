"""Tensors that remember how they were made: what a loader may do to them, and what cannot be done again later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import swapper
from swapper.formats.sources import StoredTensor
from swapper.infer.tracing import Traced, recipe_of, recipe_of_row


def traced(*shape):
    nbytes = 4 * torch.Size(shape).numel()
    return Traced.of(StoredTensor("w", Path("file"), 0, nbytes, torch.float32, shape))


def test_what_is_computed_and_thrown_away_may_be_changed():
    """As transformers gives first values to a weight that is a product of two parameters, which it then forgets."""
    direction, size = traced(4, 3), traced(4, 1)
    nn.init.normal_(direction * size)
    (direction + 1).data.zero_()
    assert recipe_of(direction).make is None
    product = recipe_of(direction * size)
    left, right = torch.arange(12.0).view(4, 3), torch.arange(4.0).view(4, 1)
    assert torch.equal(product.from_parts([left, right]), left * right)


@pytest.mark.whole
@pytest.mark.parametrize(
    "change",
    [
        nn.init.zeros_,
        lambda w: w[1].zero_(),
        lambda w: w.data.mul_(2),
        lambda w: torch.transpose(input=w, dim0=0, dim1=1).add_(1),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: setattr(w, "data", torch.zeros(4, 3, device="meta")),
    ],
)
def test_a_stored_tensor_is_not_changed_in_place(change):
    with pytest.raises(swapper.UnsupportedError, match="changed in place"):
        change(traced(4, 3))


def test_what_was_changed_in_place_cannot_be_made_again():
    doubled = traced(4, 3) * 2
    taken = doubled + 1
    doubled.data.zero_()
    for tensor in (doubled, taken):
        with pytest.raises(swapper.UnsupportedError, match="changed in place by zero_"):
            recipe_of(tensor)


def test_data_that_is_put_into_a_tensor_is_what_it_is_made_of():
    weight = traced(4, 3)
    weight.data = weight.data.to(torch.bfloat16)
    recipe = recipe_of(weight)
    values = torch.randn(4, 3)
    assert recipe.dtype is torch.bfloat16
    assert torch.equal(recipe.from_parts([values]), values.bfloat16())


def test_a_row_of_what_was_stacked_or_joined_reads_no_other_rows():
    one, other = traced(4, 3), traced(4, 3)
    stacked, joined = torch.stack([one, other]), torch.cat([one, other], dim=1)
    whole = recipe_of_row(recipe_of(stacked), 1)
    assert whole.make is None and whole.parts == (other.node.stored,)
    halved = recipe_of_row(recipe_of(stacked.to(torch.bfloat16)), 0)
    values = torch.randn(4, 3)
    assert torch.equal(halved.from_parts([values]), values.bfloat16())
    row = recipe_of_row(recipe_of(joined), 2)
    assert row.parts == (one.node.stored.row(2), other.node.stored.row(2))
    assert torch.equal(row.from_parts([values[0], values[1]]), torch.cat([values[0], values[1]]))


def test_a_row_that_needs_more_than_its_own_bytes_is_not_known():
    one, other = traced(4, 3), traced(4, 3)
    for made in (torch.stack([one, other], dim=1), torch.cat([one, other]), one + other, one.t().contiguous() * 2):
        assert recipe_of_row(recipe_of(made), 0) is None

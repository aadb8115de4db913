"""Code that goes past the check of a `state_dict()` that has expired finds what plain torch's shows then, which aliases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import swapper
from e2e.test_past_the_guard import READS, WIDTH, step
from e2e.twins import Twins, send_away

MakeTwins = Callable[..., Twins]


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def big_tensors(pair: Twins) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of the model's and of the optimizer's state, of both; smaller ones are copies, which do not expire."""
    pairs = list(zip(pair.swapped.state_dict().values(), pair.plain.state_dict().values(), strict=True))
    ours, theirs = pair.optimizer.state_dict()["state"], pair.plain_optimizer.state_dict()["state"]
    pairs += [(ours[number][key], theirs[number][key]) for number in ours for key in ours[number]]
    return ((a, b) for a, b in pairs if b.nbytes >= 1 << 16)


def part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1)[7:].as_strided((3, 5), (WIDTH, 2))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[3:].view(torch.uint8)[:, 5:]


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("room_bytes", [0, 4 << 20])
@pytest.mark.parametrize("placement", [{}, {"optimizer_state": "host"}, {"update": "backward"}], ids=str)
def test_a_raw_read_finds_the_new_values(twins: MakeTwins, placement: dict[str, Any], room_bytes: int) -> None:
    pair = twins(model(), room_bytes=room_bytes, **placement)
    pair.train(step, steps=1)
    shown = list(big_tensors(pair))
    assert len(shown) == 6 * 3
    shown += [(view(a), view(b)) for a, b in shown for view in (torch.t, part, as_bytes)]
    for number in range(6):
        pair.train(step, steps=1)
        if number == 3:
            send_away(pair.manager)
        reads = [torch.tensor, *READS[2:]]
        wrong = [i for i, (a, b) in enumerate(shown) if not torch.equal(reads[number % len(reads)](a), b)]
        assert wrong == []
    for tensor, _ in shown:
        with pytest.raises(swapper.StateError, match="used after the next step"):
            tensor.sum()
    pair.finish(paged=False)


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_gather_that_changes_one(twins: MakeTwins) -> None:
    pair = twins(model())
    pair.train(step, steps=1)
    shown = pair.swapped.state_dict()
    weight = pair.swapped[2].weight
    with pair.manager.gather(weight, write=True), torch.no_grad():
        weight.fill_(3)
    assert torch.tensor(shown["2.weight"]).eq(3).all()
    assert torch.equal(torch.tensor(shown["3.weight"]), pair.plain.state_dict()["3.weight"])
    pair.close()


@pytest.mark.parametrize(
    "take", [lambda t: t.numpy(), torch.Tensor.__array__, torch.from_dlpack], ids=["numpy", "array", "dlpack"]
)
def test_an_array_of_it_has_memory_of_its_own(twins: MakeTwins, take: Callable[[Any], Any]) -> None:
    pair = twins(model())
    pair.train(step, steps=1)
    before = pair.plain[0].weight.detach().clone()
    array = take(pair.swapped.state_dict()["0.weight"])
    pair.train(step, steps=3)
    assert torch.equal(torch.as_tensor(array.copy() if hasattr(array, "flags") else array), before)
    if hasattr(array, "flags"):
        assert not array.flags.writeable
    pair.close()

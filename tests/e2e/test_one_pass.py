"""torch's AdamW over exact state is updated by one pass of C++, at every update time, with plain torch's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from devices import without_device

from e2e.models import Net, train_step
from e2e.twins import Twins
from swapper.codecs import coded_adamw
from swapper.train.updates.one_pass import find_arithmetic

MakeTwins = Callable[..., Twins]


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The elements of each pass."""
    assert find_arithmetic() is not None
    seen: list[int] = []
    act = coded_adamw.native_torch_adam_

    def noted(parameter: torch.Tensor, *arguments: Any) -> int:
        seen.append(parameter.numel())
        return act(parameter, *arguments)

    monkeypatch.setattr(coded_adamw, "native_torch_adam_", noted)
    return seen


@without_device("the pass of C++ is the CPU's: a device updates with torch's kernels")
@pytest.mark.parametrize("codec", ["exact", "split"])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_element_is_updated_by_it_once_a_step(
    twins: MakeTwins, updated: list[int], dtype: torch.dtype, update: str, codec: str
) -> None:
    if codec == "split" and dtype is not torch.bfloat16:
        pytest.skip("it completes bf16 parameters")
    pair = twins(Net().to(dtype), master=dtype is not torch.float32, update=update, state_codec=codec)
    for _ in range(3):
        pair.both(train_step) if update != "backward" else train_both(pair)
    pair.check_pager()
    pair.optimizer.state_dict()  # finishes the last step
    assert sum(updated) == 3 * sum(parameter.numel() for parameter in pair.plain.parameters())
    pair.finish()


def train_both(pair: Twins) -> None:
    """A step of each, of which the swapped one has no gradients left to be compared."""
    random_state = torch.get_rng_state()
    train_step(pair.plain, pair.plain_optimizer)
    torch.set_rng_state(random_state)
    train_step(pair.swapped, pair.optimizer)


@without_device(
    "it counts elements that the pass of C++ updates, and leaves to the optimizer: a device has the optimizer's only"
)
@pytest.mark.parametrize("update", ["step", "deferred"])
def test_settings_that_it_does_not_have_are_the_optimizers_meanwhile(
    twins: MakeTwins, updated: list[int], update: str
) -> None:
    def with_lr(lr: Any, maximize: bool = False) -> Callable[[Any, Any], Any]:
        def run(model: Any, optimizer: Any) -> Any:
            for group in optimizer.param_groups:
                group.update(lr=lr, maximize=maximize)
            return train_step(model, optimizer)

        return run

    pair = twins(Net().bfloat16(), master=True, update=update)
    counts = []
    for run in (with_lr(1e-3), with_lr(torch.tensor(1e-3)), with_lr(2e-3, maximize=True)):
        updated.clear()
        pair.train(run, steps=1)
        pair.optimizer.state_dict()  # finishes the step
        counts.append(sum(updated))
    assert counts[0] == counts[2] > counts[1] == 0
    pair.finish()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_goes_on_as_in_plain_torch(twins: MakeTwins, bad: float) -> None:
    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoiled = gradient.clone()
        spoiled[0, ::7] = bad
        return spoiled

    def run(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        torch.manual_seed(3)
        hooks = [parameter.register_hook(spoil) for parameter in model.parameters() if parameter.dim() > 1]
        model(torch.randint(0, 512, (2, 16))).float().square().mean().backward()
        for hook in hooks:
            hook.remove()
        optimizer.step()

    pair = twins(Net(), params="host", optimizer_state="nvme")
    pair.both(run)
    state, plain = pair.optimizer.state_dict()["state"], pair.plain_optimizer.state_dict()["state"]
    assert state.keys() == plain.keys()
    for number, tensors in plain.items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(state[number][key], tensor, rtol=0, atol=0, equal_nan=True)
    for ours, theirs in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert ours.isnan().any() or theirs.dim() < 2

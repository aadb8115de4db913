"""Models and optimizers that cannot be offloaded exactly are refused with the reason, and stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.models import WIDTH, Net, loss_of, tokens, train_step
from e2e.twins import Twins, adamw, assert_same
from torch import nn

import swapper

MakeTwins = Callable[..., Twins]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[swapper.SwapManager]:
    with swapper.SwapManager(tmp_path, host_memory="32MiB") as manager:
        yield manager
        assert not list(tmp_path.rglob("*.swap"))  # nothing was begun


def refused(manager: swapper.SwapManager, model: Any, optimizer: Any, match: str) -> None:
    with pytest.raises(swapper.UnsupportedError, match=match):
        manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")


def test_layers_of_transformer_engine(manager: swapper.SwapManager) -> None:
    model = Net()
    kind = type("LayerNormLinear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.module.layernorm_linear"})
    model.head = kind(WIDTH, 8)
    refused(
        manager,
        model,
        adamw(model.parameters()),
        r"head is a LayerNormLinear of Transformer Engine.*convert_to_float8_training",
    )


def test_a_model_on_the_meta_device(manager: swapper.SwapManager) -> None:
    with torch.device("meta"):
        model = Net()
    refused(
        manager,
        model,
        adamw(model.parameters()),
        r"embedding\.weight is on the meta device .* build the model on the CPU",
    )


def test_a_model_with_one_parameter_on_the_meta_device(manager: swapper.SwapManager) -> None:
    model = Net()
    model.blocks[2].up.weight = nn.Parameter(torch.empty(512, WIDTH, device="meta"))
    refused(manager, model, adamw(model.parameters()), r"blocks\.2\.up\.weight is on the meta device")


def test_an_optimizer_over_other_parameters(manager: swapper.SwapManager) -> None:
    model = Net()
    refused(
        manager, model, adamw(Net().parameters()), r"not one of the model's: build the optimizer from model\.parameters"
    )
    refused(manager, model, adamw([*model.parameters(), nn.Parameter(torch.ones(3))]), "not one of the model's")
    refused(manager, model, adamw(copy.deepcopy(model).parameters()), "not one of the model's")


def test_an_unsupported_optimizer(manager: swapper.SwapManager) -> None:
    model = Net()
    refused(
        manager,
        model,
        torch.optim.LBFGS(model.parameters()),
        r"optim\.lbfgs\.LBFGS cannot be paged: it keeps a history",
    )
    optimizer = torch.optim.SparseAdam(model.parameters())
    refused(manager, model, optimizer, r"SparseAdam cannot be paged: it takes sparse gradients")


@pytest.mark.whole
@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_an_option_of_the_optimizer_that_cannot_be_paged(manager: swapper.SwapManager, option: str) -> None:
    model = Net()
    refused(manager, model, torch.optim.AdamW(model.parameters(), **{option: True}), f"build it with {option}=False")


def test_what_is_no_model_or_no_optimizer(manager: swapper.SwapManager) -> None:
    model = Net()
    refused(manager, list(model.parameters()), adamw(model.parameters()), "of them, not list")
    refused(manager, model, "AdamW", "not supported")


def test_lazy_modules(manager: swapper.SwapManager) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    refused(manager, model, adamw(model.parameters()), "not initialised yet: run one forward")


def test_sparse_and_special_parameters(manager: swapper.SwapManager) -> None:
    model = Net()
    model.sparse = nn.Parameter(torch.eye(3).to_sparse())
    refused(manager, model, adamw([model.head.weight]), "sparse .*only plain dense")


def test_parameters_that_lie_between_each_other(manager: swapper.SwapManager) -> None:
    model = Net()
    both = torch.randn(512, 2 * WIDTH)
    model.head.weight, model.embedding.weight = nn.Parameter(both[:, ::2]), nn.Parameter(both[:, 1::2])
    refused(manager, model, adamw(model.parameters()), "share memory")


def test_parameters_that_share_memory_without_being_one(manager: swapper.SwapManager) -> None:
    """Plain torch would change both; separate places would silently part them."""
    model = Net()
    model.head.weight.data = model.embedding.weight.data
    refused(manager, model, adamw(model.parameters()), r"share memory|shares memory")
    model = Net()
    model.head.weight = nn.Parameter(model.embedding.weight.data[:256])
    refused(manager, model, adamw(model.parameters()), r"share memory|shares memory")


def test_state_that_is_not_the_optimizers_own(manager: swapper.SwapManager) -> None:
    model = Net()
    optimizer = adamw(model.parameters())
    train_step(model, optimizer)
    optimizer.state[model.head.weight]["something"] = torch.ones(3)
    before = copy.deepcopy(optimizer.state_dict())
    refused(manager, model, optimizer, r"state of head\.weight has .*something")
    assert_same(optimizer.state_dict(), before)
    assert train_step(model, optimizer).isfinite()


def test_after_a_refusal_the_same_manager_takes_the_right_one(tmp_path: Path) -> None:
    model = Net()
    with swapper.SwapManager(tmp_path, host_memory="32MiB") as manager:
        refused(manager, model, torch.optim.LBFGS(model.parameters()), "cannot be paged")
        model, optimizer = manager.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        assert train_step(model, optimizer).isfinite()


# --- a model that is offloaded already --------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["nvme", "host"])
def test_a_second_offload_is_refused_and_the_first_goes_on(twins: MakeTwins, tmp_path: Path, place: str) -> None:
    pair = twins(Net(), params=place, optimizer_state=place)
    pair.train(train_step, steps=1)
    with pytest.raises(swapper.StateError, match="one manager for each"):
        pair.manager.offload(pair.swapped, pair.original)
    other = Net()
    with pytest.raises(swapper.StateError, match="one manager for each"):
        pair.manager.offload(other, adamw(other.parameters()))
    directory = tmp_path / "other"
    directory.mkdir()
    with swapper.SwapManager(directory, host_memory="32MiB") as second:
        for optimizer in (pair.original, pair.optimizer, adamw(pair.swapped.parameters())):
            with pytest.raises((swapper.StateError, swapper.UnsupportedError)):
                second.offload(pair.swapped, optimizer)
        with pytest.raises(swapper.StateError, match="offloaded already"):
            part = pair.swapped.blocks[0]
            second.offload(part, adamw(part.parameters()))
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


@pytest.mark.parametrize("place", ["nvme", "host"])
def test_a_step_of_the_optimizer_that_was_given_away_is_refused(twins: MakeTwins, place: str) -> None:
    pair = twins(Net(), params=place)
    pair.both(lambda model, _: loss_of(model, tokens()).backward())
    with pytest.raises(swapper.StateError, match=r"step the one that it returned"):
        pair.original.step()
    pair.both(lambda _, optimizer: (optimizer.step(), optimizer.zero_grad())[1])
    pair.train(train_step, steps=2)
    pair.finish(paged=False)
    pair.original.step()  # an ordinary optimizer again: nothing has a gradient


# --- what is changed behind the manager's back ------------------------------------------------------------------------


def resize(weight: nn.Parameter) -> None:
    weight.data = torch.zeros(3, 5)


def replace_data(weight: nn.Parameter) -> None:
    weight.data = torch.zeros_like(weight.data)


def change_dtype(weight: nn.Parameter) -> None:
    weight.data = weight.data.double()


@torch.no_grad()
def set_storage(weight: nn.Parameter) -> None:
    weight.set_(torch.zeros(512, WIDTH))


@pytest.mark.parametrize("place", ["nvme", "host"])
@pytest.mark.parametrize("how", [resize, replace_data, change_dtype, set_storage])
def test_data_replaced_behind_the_managers_back_is_noticed(
    twins: MakeTwins, how: Callable[[nn.Parameter], None], place: str
) -> None:
    pair = twins(Net(), params=place)
    pair.train(train_step, steps=2)
    weight = pair.swapped.head.weight
    noticed = r"head\.weight was (replaced or resized .*manager\.gather|assigned another tensor .*clone)"
    with pytest.raises(swapper.StateError, match=noticed):
        with pair.manager.gather(weight, write=True):
            home = weight.data
            how(weight)
    for _ in range(2):
        with pytest.raises(swapper.StateError, match=noticed):
            loss_of(pair.swapped, tokens())
        pair.check_pager()
    weight.__class__ = nn.Parameter
    weight.data = home  # put back, all is well
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_a_parameter_object_replaced_by_another_is_noticed(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=2)
    block = pair.swapped.blocks[1]
    kept = block.up.weight
    block.up.weight = nn.Parameter(torch.zeros(512, WIDTH))
    for _ in range(2):
        with pytest.raises(swapper.StateError, match=r"was replaced by another object .*manager\.gather"):
            loss_of(pair.swapped, tokens())
        pair.check_pager()
    block.up.weight = kept
    pair.train(train_step, steps=2)
    pair.finish()


def test_sparse_gradients_are_refused(twins: MakeTwins) -> None:
    class SparseEmbedding(nn.Embedding):  # nothing shows before the first backward
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(tokens, self.weight, sparse=True)

    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = SparseEmbedding(512, WIDTH)

    pair = twins(Sparse())
    with pytest.raises(swapper.UnsupportedError, match=r"embedding\.weight got a sparse gradient.*sparse=False"):
        loss_of(pair.swapped, tokens()).backward()
    pair.swapped.zero_grad()
    with torch.no_grad():
        pair.both(lambda model, _: model(torch.ones(1, 4, dtype=torch.long)))
    pair.check_pager()

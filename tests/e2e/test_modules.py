"""Modules of real models: ties, outputs of all kinds, frozen and unused parts, weights that others use."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput

import swapper
from e2e.models import (
    VOCABULARY,
    WIDTH,
    Biased,
    Block,
    Dropping,
    Net,
    Shuffled,
    Staged,
    finish_step,
    loss_of,
    tokens,
    train_step,
)
from e2e.twins import Twins
from swapper.train.groups.parameter_group import GroupParameters

MakeTwins = Callable[..., Twins]


@pytest.mark.parametrize("make", [Staged, Biased])
def test_parameters_come_when_their_module_runs_and_not_again(twins: MakeTwins, make: Callable[[], nn.Module]) -> None:
    pair = twins(make())
    read = pair.read_bytes_a_step(train_step, steps=3)
    assert read == pytest.approx(pair.manager.current.run.plan.traffic.read_bytes["param"], rel=0.1)
    pair.finish()


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("make", [Dropping, Shuffled])
def test_where_each_step_goes_another_way_little_is_read_for_nothing(
    twins: MakeTwins, make: Callable[..., nn.Module], update: str
) -> None:
    """What steps leave out is expected still; what was expected elsewhere is not read ahead again and again."""
    pair = twins(make(depth=12), update=update, room_bytes=4 << 20)
    pair.train(train_step, steps=2)
    before = sum(pair.manager.counters.read_bytes.values())
    pair.train(train_step, steps=10)
    read = sum(pair.manager.counters.read_bytes.values()) - before
    most = 1.05 if make is Dropping else 1.15 if update == "step" else 2.0
    assert read <= most * 10 * sum(pair.manager.current.run.plan.traffic.read_bytes.values())
    pair.finish(paged=False)


def test_tied_weights_are_one(twins: MakeTwins) -> None:
    pair = twins(Net(tied=True))
    assert pair.swapped.head.weight is pair.swapped.embedding.weight
    pair.train(train_step, steps=4)
    assert pair.swapped.head.weight is pair.swapped.embedding.weight
    pair.finish()


class LowRank(nn.Module):
    """A frozen linear layer with a small trainable one added."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.base(value) + self.up(self.down(value))


def low_rank_block() -> Block:
    block = Block()
    block.up, block.down = LowRank(block.up), LowRank(block.down)
    return block


@pytest.mark.parametrize("checkpointing", [None, False], ids=["plain", "checkpointed"])
def test_a_frozen_base_with_small_trainable_parts_is_bit_equal(twins: MakeTwins, checkpointing: bool | None) -> None:
    model = Net(depth=6, make_block=low_rank_block, checkpointing=checkpointing)
    for module in (model.embedding, model.position, model.head):
        module.requires_grad_(False)
    pair = twins(model)
    before = pair.manager.counters.bytes_written
    pair.train(train_step, steps=4)
    assert (
        pair.manager.counters.bytes_written - before < pair.manager.counters.bytes_read
    )  # what is frozen is not rewritten
    pair.finish()


class Sometimes(Net):
    """Skips a block now and then: its gradients are missing in some steps."""

    skip: int | None = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(batch) + self.position(batch.shape[1])
        for index, block in enumerate(self.blocks):
            if index != self.skip:
                hidden = block(hidden)
        return self.head(self.norm(hidden))


def test_blocks_that_are_skipped_now_and_then_are_bit_equal(twins: MakeTwins) -> None:
    pair = twins(Sometimes())
    for skip in (None, 1, 1, 3, None, 0, None):

        def run(model: Any, optimizer: Any, skip: int | None = skip) -> torch.Tensor:
            model.skip = skip
            return train_step(model, optimizer)

        pair.train(run, steps=1)
    pair.finish()


def test_parameters_frozen_after_offload_stay_as_they_are(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=2)
    pair.both(lambda model, _: model.blocks[1].requires_grad_(False) and None)
    pair.train(train_step, steps=2)
    pair.both(lambda model, _: model.blocks[1].requires_grad_(True) and None)
    pair.train(train_step, steps=2)
    pair.finish()


class Modeled(Block):
    def __init__(self) -> None:
        super().__init__(lambda hidden: BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden * 2,)))

    def forward(self, value: Any) -> Any:
        return super().forward(value if isinstance(value, torch.Tensor) else value.last_hidden_state)


class ModeledNet(Net):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden: Any = self.embedding(batch) + self.position(batch.shape[1])
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden.last_hidden_state + hidden["hidden_states"][0]))


def test_model_outputs_of_transformers_keep_their_class(twins: MakeTwins) -> None:
    pair = twins(ModeledNet(make_block=Modeled))
    pair.train(train_step, steps=3)
    output = pair.swapped.blocks[0](torch.zeros(1, WIDTH))
    assert type(output) is BaseModelOutput
    assert list(output.keys()) == ["last_hidden_state", "hidden_states"]
    pair.finish()


def test_training_in_another_thread_is_bit_equal(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=1)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(pair.train, train_step, 2).result()
    pair.train(train_step, steps=1)
    pair.finish()


def test_a_branch_by_data_is_bit_equal(twins: MakeTwins) -> None:
    """A mixture of experts: which of them run, and in which order, is another one at each step."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.router = nn.Linear(WIDTH, 6)
            self.experts = nn.ModuleList(Block() for _ in range(6))
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, batch: torch.Tensor) -> BaseModelOutput:
            hidden = self.embedding(batch)
            weights = self.router(hidden.mean((0, 1))).softmax(-1)
            best = torch.topk(weights, 2).indices.tolist()
            hidden = sum(weights[index] * self.experts[index](hidden) for index in best)
            return BaseModelOutput(last_hidden_state=self.head(hidden))

    def run(model: Any, optimizer: Any) -> torch.Tensor:
        batch = tokens()
        logits = model(batch).last_hidden_state
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), batch.view(-1))
        return finish_step(loss, optimizer)

    pair = twins(Mixture(), partial(torch.optim.AdamW, lr=0.03))
    pair.train(run, steps=10)
    pair.manager.current.run.pager.check()
    pair.assert_same_parameters()
    pair.assert_same_state()
    assert pair.manager.counters.bytes_read > 0


def test_users_hooks_on_modules_and_parameters_are_called_as_in_plain_torch(twins: MakeTwins) -> None:
    seen: dict[int, list[Any]] = {}

    def put_hooks(model: Net) -> None:
        notes = seen[id(model)] = []
        block = model.blocks[1]
        block.register_forward_pre_hook(lambda module, args: notes.append(("before", args[0].detach().sum())))
        block.register_forward_hook(lambda module, args, output: output + 0.5)
        block.up.register_forward_hook(lambda module, args, output: notes.append(("up", module.weight.detach().sum())))
        block.register_full_backward_hook(lambda module, inward, outward: notes.append(("back", outward[0].sum())))
        block.down.weight.register_hook(lambda gradient: gradient * 2)
        block.down.bias.register_post_accumulate_grad_hook(lambda p: notes.append(("bias", p.grad.sum())))

    pair = twins(Net(), wait=True)
    put_hooks(pair.plain)
    put_hooks(pair.swapped)
    pair.offload()
    pair.train(train_step, steps=3)
    expected, actual = seen[id(pair.plain)], seen[id(pair.swapped)]
    assert [name for name, _ in actual] == [name for name, _ in expected]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(actual, expected, strict=True))
    pair.finish()


def test_hooks_put_in_after_offload_see_the_parameters_too(twins: MakeTwins) -> None:
    pair = twins(Net())
    sums: dict[int, list[torch.Tensor]] = {id(pair.plain): [], id(pair.swapped): []}
    for model in (pair.plain, pair.swapped):
        for module in (model.blocks[2].up, model.blocks[0], model.head):
            parameters = list(module.parameters())
            module.register_forward_pre_hook(
                lambda _, args, p=parameters, m=model: sums[id(m)].append(sum(x.detach().sum() for x in p))
            )
            module.register_forward_hook(
                lambda _, args, output, p=parameters, m=model: sums[id(m)].append(sum(x.detach().sum() for x in p))
            )
    pair.train(train_step, steps=2)
    assert len(sums[id(pair.plain)]) == 12
    assert torch.equal(torch.stack(sums[id(pair.swapped)]), torch.stack(sums[id(pair.plain)]))
    pair.finish()


def test_loss_is_what_a_module_returns_as_a_number(twins: MakeTwins) -> None:
    """A module whose outputs show no gradient: its parameters are needed in backward all the same."""

    class Stored(Net):
        def forward(self, batch: torch.Tensor) -> float:
            self.loss = F.cross_entropy(super().forward(batch).view(-1, VOCABULARY), batch.view(-1))
            return self.loss.item()

    def run(model: Any, optimizer: Any) -> float:
        value = model(tokens())
        model.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del model.loss
        return value

    pair = twins(Stored())
    pair.train(run, steps=3)
    pair.finish()


def test_two_models_under_two_managers_train_side_by_side(twins: MakeTwins) -> None:
    first, second = twins(Net()), twins(Net(depth=5))
    for _ in range(3):
        first.train(train_step, steps=1)
        second.train(train_step, steps=1)

    def distil(student: Twins, teacher: Twins) -> None:
        def run(models: tuple[Any, Any], optimizer: Any) -> torch.Tensor:
            batch = tokens()
            loss = F.mse_loss(models[0](batch), models[1](batch))
            return finish_step(loss, optimizer)

        state = torch.get_rng_state()
        expected = run((student.plain, teacher.plain), student.plain_optimizer)
        torch.set_rng_state(state)
        assert torch.equal(run((student.swapped, teacher.swapped), student.optimizer), expected)

    distil(first, second)
    distil(second, first)
    first.finish()
    second.finish()


def test_loss_of_is_not_a_trick() -> None:
    """The losses that these tests compare depend on every parameter."""
    model = Net()
    loss_of(model, tokens()).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_a_call_whose_first_group_cannot_be_given_back_keeps_no_other(
    twins: MakeTwins, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    pair = twins(model)
    release, failed = GroupParameters.release, []

    def fail(self: GroupParameters) -> None:
        release(self)
        if not self.is_leased and not failed:
            failed.append(self)
            raise swapper.IoError("read", "the drive", 0, 4096, 5)

    with monkeypatch.context() as patch:
        patch.setattr(GroupParameters, "release", fail)
        with pytest.raises(swapper.IoError):
            pair.swapped.blocks[1](torch.randn(2, WIDTH))
    assert not any(group.is_leased for group in pair.manager.current.run.model.groups)
    pair.train(train_step, steps=2)
    pair.finish(paged=False)

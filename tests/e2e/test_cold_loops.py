"""Training loops that read and change parameters by hand, outside of forwards, in the smallest budget or little more."""

from __future__ import annotations

import copy
import io
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import swapper
from e2e.models import Net, finish_step, loss_of, tokens, train_step
from e2e.twins import Twins, assert_same, send_away

Step = Callable[[Any, Any], Any]


def l2(model: Any, optimizer: Any) -> torch.Tensor:
    loss = loss_of(model, tokens())
    return finish_step(loss + 1e-4 * sum(p.pow(2).sum() for p in model.parameters()), optimizer)


def l2_first(model: Any, optimizer: Any) -> torch.Tensor:
    penalty = sum(torch.sum(p * p) for p in model.parameters())
    return finish_step(loss_of(model, tokens()) + 1e-4 * penalty, optimizer)


def smoothness(model: Any, optimizer: Any) -> torch.Tensor:
    weights = [block.up.weight for block in model.blocks]
    penalty = sum(F.mse_loss(a, b) for a, b in itertools.pairwise(weights))
    return finish_step(loss_of(model, tokens()) + penalty, optimizer)


def logged(model: Any, optimizer: Any) -> Any:
    loss = train_step(model, optimizer)
    norms = {name: p.norm().item() for name, p in model.named_parameters()}
    largest = {name: p.data.abs().max().item() for name, p in model.named_parameters()}
    return loss, list(norms.values()), list(largest.values())


def as_vector(model: Any, optimizer: Any) -> Any:
    loss = train_step(model, optimizer)
    with torch.no_grad():
        return loss, nn.utils.parameters_to_vector(model.parameters()).clone()


def vector_in_the_loss(model: Any, optimizer: Any) -> torch.Tensor:
    vector = nn.utils.parameters_to_vector(model.parameters())
    return finish_step(loss_of(model, tokens()) + 1e-5 * vector.square().sum(), optimizer)


def decay_by_hand(model: Any, optimizer: Any) -> torch.Tensor:
    loss = train_step(model, optimizer)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.999)
    return loss


def clamped(model: Any, optimizer: Any) -> torch.Tensor:
    loss = train_step(model, optimizer)
    for p in model.parameters():
        p.data.clamp_(-0.05, 0.05)
    return loss


def child_by_function(model: Any, optimizer: Any) -> torch.Tensor:
    hidden = F.linear(F.linear(torch.randn(4, 128), model.blocks[1].up.weight), model.blocks[2].up.weight.t())
    return finish_step(model.blocks[0](hidden).square().mean(), optimizer)


LOOPS: list[Step] = [
    l2,
    l2_first,
    smoothness,
    logged,
    as_vector,
    vector_in_the_loss,
    decay_by_hand,
    clamped,
    child_by_function,
]


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("run", LOOPS, ids=lambda run: run.__name__)
def test_a_loop_that_uses_parameters_by_hand_is_plain_torchs(tmp_path: Path, run: Step, update: str) -> None:
    pair = Twins(tmp_path, Net(), update=update)
    pair.train(run, steps=2)
    send_away(pair.manager)
    pair.train(run, steps=1)
    pair.finish(paged=False)


@pytest.mark.parametrize("gradients", ["host", "nvme"])
def test_a_penalty_with_gradients_anywhere(tmp_path: Path, gradients: str) -> None:
    pair = Twins(tmp_path, Net(), gradients=gradients)
    pair.train(l2, steps=3)
    pair.finish(paged=False)


def test_one_line_says_how_to_be_faster(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = Twins(tmp_path, Net())
    with caplog.at_level(logging.WARNING, "swapper"):
        pair.train(logged, steps=2)
    assert len([r for r in caplog.records if "manager.gather" in r.getMessage()]) == 1
    pair.finish(paged=False)


def test_metadata_reads_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = Twins(tmp_path, Net())
    send_away(pair.manager)
    if pair.options.get("device") is not None:
        pytest.skip("a view of a parameter that is off a device is made of its data")
    before = pair.manager.counters.bytes_read
    for p, q in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
        for form in (
            lambda t: t.T.shape if t.dim() == 2 else None, lambda t: t.data.shape, lambda t: t.view(-1).shape,
            lambda t: t.new_zeros(3), torch.zeros_like, lambda t: torch.empty_like(t).shape, lambda t: t.stride(),
            lambda t: torch.ones(2).type_as(t), lambda t: t[0].shape, lambda t: t.numel(), lambda t: t.detach().dtype,
        ):  # fmt: skip
            assert_same(form(p), form(q))
    assert pair.manager.counters.bytes_read == before
    assert not caplog.records
    pair.finish(paged=False)


def test_deepcopy_and_an_averaged_model(tmp_path: Path) -> None:
    pair = Twins(tmp_path, Net())
    pair.train(train_step, steps=1)
    averaged = [torch.optim.swa_utils.AveragedModel(model) for model in (pair.plain, pair.swapped)]
    for _ in range(3):
        pair.train(train_step, steps=1)
        averaged[0].update_parameters(pair.plain)
        averaged[1].update_parameters(pair.swapped)
    assert_same(dict(averaged[1].state_dict()), dict(averaged[0].state_dict()))
    batch = tokens()
    assert torch.equal(averaged[1](batch), averaged[0](batch))
    copied = copy.deepcopy(pair.swapped)
    assert all(type(p) is nn.Parameter for p in copied.parameters())
    assert torch.equal(copied(batch), pair.plain(batch))
    pair.finish(paged=False)
    assert torch.equal(copied(batch), pair.plain(batch))


def test_a_moving_average_in_the_same_manager(tmp_path: Path) -> None:
    """Both the model and its average are offloaded: what is changed in place is away, and so is what it is changed by."""
    pair = Twins(tmp_path, nn.ModuleDict({"net": Net(), "average": Net()}))

    def run(models: Any, optimizer: Any) -> torch.Tensor:
        loss = train_step(models["net"], optimizer)
        with torch.no_grad():
            for ours, theirs in zip(models["average"].parameters(), models["net"].parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
            for ours, theirs in zip(models["average"].parameters(), models["net"].parameters(), strict=True):
                ours.data.mul_(0.99).add_(theirs.data, alpha=0.01)
        return loss

    pair.train(run, steps=3)
    pair.finish(paged=False)


def test_functional_call(tmp_path: Path) -> None:
    pair = Twins(tmp_path, Net())
    values = {name: torch.randn(value.shape) * 0.1 for name, value in pair.plain.named_parameters()}
    batch = tokens()

    def given(model: Any, _: Any) -> torch.Tensor:
        return torch.func.functional_call(model, values, batch).detach()

    def some(model: Any, optimizer: Any) -> torch.Tensor:
        fewer = {name: value for name, value in values.items() if "blocks.1" in name}
        loss = torch.func.functional_call(model, fewer, batch).square().mean()
        return finish_step(loss, optimizer)

    def its_own(model: Any, optimizer: Any) -> torch.Tensor:
        scaled = {name: p * 0.5 for name, p in model.named_parameters()}
        return finish_step(torch.func.functional_call(model, scaled, batch).square().mean(), optimizer)

    for run in (given, some, its_own):
        pair.train(run, steps=2)
    loss_of(pair.swapped, batch)  # it has its own again
    pair.finish(paged=False)


def test_a_view_that_was_made_before_follows_the_parameter(tmp_path: Path) -> None:
    pair = Twins(tmp_path, Net())
    views = [
        (model.head.weight.data, model.head.weight.t(), model.head.weight[3]) for model in (pair.plain, pair.swapped)
    ]
    pair.train(train_step, steps=2)
    for plain, cold in zip(*views, strict=True):
        assert torch.equal(cold.detach().clone(), plain.detach())
        with torch.no_grad():
            plain.detach().mul_(0.5)
            cold.detach().mul_(0.5)
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


def test_a_change_between_forward_and_backward_is_found_out(tmp_path: Path) -> None:
    pair = Twins(tmp_path, Net())
    penalty = sum(p.pow(2).sum() for p in pair.swapped.parameters())
    with torch.no_grad():
        pair.swapped.blocks[1].up.weight.mul_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()
    pair.swapped.zero_grad()
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


def test_masters_follow_a_change_by_hand(tmp_path: Path) -> None:
    pair = Twins(tmp_path, Net().bfloat16(), master=True)
    pair.train(train_step, steps=2)
    with torch.no_grad():
        for p, q in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
            p.mul_(0.5)
            q.mul_(0.5)
        for master, q in zip(pair.plain_optimizer.masters, pair.plain_optimizer.parameters, strict=True):
            master.copy_(torch.where(master.to(q.dtype) == q, master, q.float()))
    pair.train(train_step, steps=2)
    pair.finish(paged=False)


def test_with_raise_everything_is_as_it_was(tmp_path: Path) -> None:
    pair = Twins(tmp_path, Net(), cold="raise")
    weight = pair.swapped.head.weight
    for use in (torch.norm, lambda p: p.data, lambda p: p.view(-1), copy.deepcopy, lambda p: p.data.add_(1)):
        with pytest.raises(swapper.ColdParameterError, match=r"head\.weight is away.*manager\.gather"):
            use(weight)
    assert torch.zeros_like(weight).shape == weight.shape
    pair.finish(paged=False)


def test_an_unknown_choice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(swapper.ConfigError, match="cold"):
        swapper.SwapManager(tmp_path, host_memory="1GiB", cold="maybe")


class Language(nn.Module):
    """A language model by an LSTM, with a state that is carried from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 96)
        self.recurrent = nn.LSTM(96, 128, 2)
        self.decoder = nn.Linear(128, 500)

    def forward(self, value: torch.Tensor, state: Any) -> Any:
        output, state = self.recurrent(self.embedding(value), state)
        return F.log_softmax(self.decoder(output).view(-1, 500), 1), state

    def first_state(self, width: int) -> Any:
        weight = next(self.parameters())
        return weight.new_zeros(2, width, 128), weight.new_zeros(2, width, 128)


def test_a_language_model_with_updates_by_hand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No optimizer at all: gradients are clipped and subtracted. What a kill leaves is said; a run that is closed goes on."""
    torch.manual_seed(0)
    plain = Language()
    model = copy.deepcopy(plain)
    text = torch.randint(500, (40, 4))
    manager = swapper.SwapManager(tmp_path, host_memory="4MiB")  # one of the two lines
    model, _ = manager.offload(model, params="nvme")  # the other one

    def train(model: Language) -> list[float]:
        losses = []
        state = model.first_state(4)
        for begin in range(0, 30, 10):
            model.zero_grad()
            state = tuple(part.detach() for part in state)
            output, state = model(text[begin : begin + 10], state)
            loss = F.nll_loss(output, text[begin + 1 : begin + 11].reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-2.0)
            losses.append(loss.item())
        return losses

    with caplog.at_level(logging.WARNING, "swapper"):
        assert train(model) == train(plain)
    assert ["no optimizer" in record.getMessage() for record in caplog.records] == [True]
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    assert_same(dict(torch.load(saved)), dict(plain.state_dict()))
    torch.save(model, tmp_path / "model.pt")
    with torch.serialization.safe_globals([Language, nn.Embedding, nn.LSTM, nn.Linear]):
        loaded = torch.load(tmp_path / "model.pt")
    loaded.recurrent.flatten_parameters()
    assert_same(dict(loaded.state_dict()), dict(plain.state_dict()))
    manager.close()
    again = Language()
    with swapper.SwapManager(tmp_path, host_memory="4MiB", resume="auto") as manager:
        again, _ = manager.offload(again, params="nvme")
        assert_same(dict(copy.deepcopy(again).state_dict()), dict(plain.state_dict()))
        assert train(again) == train(plain)

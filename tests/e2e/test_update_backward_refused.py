"""Updates during backward: what is refused between backward and step, and what becomes of a step that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from torch import nn
from torch.optim import AdamW, NAdam

import swapper
from e2e.early import updated_early
from e2e.models import WIDTH, Net, loss_of, tokens, train_step
from e2e.twins import Twins, assert_closed_runs_go_on, assert_same, fail_in_the_middle

MakeTwins = Callable[..., Twins]


def make_gradients(pair: Twins) -> None:
    """Train, and make the gradients of one more step."""
    pair.train(train_step, steps=2)
    pair.both(lambda model, _: loss_of(model, tokens()).backward())
    assert len(updated_early(pair)) >= 4


LOOKS: dict[str, Callable[[Twins], Any]] = {
    "forward": lambda pair: loss_of(pair.swapped, tokens()),
    "forward without autograd": lambda pair: torch.no_grad()(pair.swapped)(tokens()),
    "gather": lambda pair: pair.manager.gather(pair.swapped).__enter__(),
    "snapshot": lambda pair: pair.manager.snapshot(pair.directory / "early.pt"),
    "state_dict": lambda pair: pair.optimizer.state_dict(),
    "load_state_dict": lambda pair: pair.optimizer.load_state_dict(pair.plain_optimizer.state_dict()),
    "optimizer.state": lambda pair: len(pair.optimizer.state),
    "the model's state_dict": lambda pair: pair.swapped.state_dict(),
    "the model's load_state_dict": lambda pair: pair.swapped.load_state_dict(pair.plain.state_dict()),
    "a parameter": lambda pair: pair.swapped.blocks[2].up.weight.sum(),
    "a parameter that is printed": lambda pair: repr(pair.swapped.blocks[2].up.weight),
    "clipping": lambda pair: nn.utils.clip_grad_norm_(pair.swapped.parameters(), 0.1),
    "clipping one by one": lambda pair: nn.utils.clip_grad_norm_(pair.swapped.parameters(), 0.1, foreach=False),
    "clipping values": lambda pair: nn.utils.clip_grad_value_(pair.swapped.parameters(), 0.1),
    "gradient.data": lambda pair: pair.swapped.blocks[2].up.weight.grad.data.mul_(2),
    "gradient[0] = 1": lambda pair: pair.swapped.blocks[2].up.weight.grad.__setitem__(0, 1),
    "zeroing in place": lambda pair: pair.optimizer.zero_grad(set_to_none=False),
    "add_param_group": lambda pair: pair.optimizer.add_param_group({"params": [pair.swapped.frozen]}),
    "manager.clip_grad_norm_": lambda pair: pair.manager.clip_grad_norm_(1.0),
    "manager.clip_grad_value_": lambda pair: pair.manager.clip_grad_value_(1.0),
}


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.parametrize("params", ["nvme", "host"])
def test_nothing_can_be_looked_at_or_changed_between_backward_and_step(
    backward: MakeTwins, name: str, params: str
) -> None:
    model = Net()
    model.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
    pair = backward(model, params=params)
    make_gradients(pair)
    if name != "a parameter that is printed" or (params == "host" and not devices.NAME):  # else it is printed as away
        with pytest.raises(
            (swapper.StateError, swapper.UnsupportedError, swapper.ColdParameterError),
            match=r"backward|away|off the device",
        ):
            LOOKS[name](pair)
    pair.both(lambda _, optimizer: optimizer.step())  # and the step is what it would have been
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


def test_a_scaler_is_refused(backward: MakeTwins) -> None:
    pair = backward(Net())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(pair.swapped, tokens())).backward()
    told = "nothing .* can be used between the two" if devices.NAME else "used in backward already"
    with pytest.raises(swapper.StateError, match=rf"{told}.*update='step'"):
        scaler.step(pair.optimizer)
    pair.close()


@pytest.mark.parametrize("name", ["head", "embedding"])
def test_a_second_backward_is_refused(backward: MakeTwins, name: str) -> None:
    """Of an updated group, and of one that is left for the step."""
    pair = backward(Net(depth=3), params="host")
    more = pair.swapped.get_submodule(name).weight.sum()
    loss_of(pair.swapped, tokens()).backward()
    assert updated_early(pair)
    told = "a second backward began" if devices.NAME else f"{name}.weight got a gradient after updates"
    with pytest.raises(swapper.StateError, match=rf"{told}.*manager.accumulate\(\)"):
        more.backward()
    pair.close()


def test_a_second_backward_through_modules_is_refused_before_it_does_anything(backward: MakeTwins) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = (
                nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)) for _ in range(2)
            )

    pair = backward(Two(), room_bytes=1 << 20)

    def run(model: Any, optimizer: Any) -> None:
        losses = []
        for layers in (model.one, model.other):
            hidden = torch.randn(4, WIDTH)
            for layer in layers:
                hidden = torch.tanh(layer(hidden))
            losses.append(hidden.sum())
        losses[0].backward()
        if model is pair.swapped:
            assert updated_early(pair)
            with pytest.raises(swapper.StateError, match=r"second backward.*manager.accumulate\(\)"):
                losses[1].backward()
        assert model.other[2].weight.grad is None
        optimizer.step()
        optimizer.zero_grad()

    pair.both(run)
    pair.finish(paged=False)


def zero_past_its_class(gradient: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        gradient.zero_()


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "learning rate": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.5),
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "a gradient that is replaced": lambda model, optimizer: setattr(model.head.weight, "grad", None),
    "a gradient past its class": lambda model, optimizer: zero_past_its_class(model.head.weight.grad),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("committed", [True, False])
def test_what_was_used_must_not_change_before_the_step(backward: MakeTwins, name: str, committed: bool) -> None:
    """Where the step before is committed, all is as before this one; else the run is over, and says so."""
    pair = backward(Net(), commit_every="free" if committed else None)
    pair.train(train_step, steps=2)
    state = torch.get_rng_state()
    loss_of(pair.swapped, tokens()).backward()
    CHANGES[name](pair.swapped, pair.optimizer)
    pattern = r"(gradient of|'lr' of).* changed between backward and optimizer.step\(\)"
    with pytest.raises(swapper.StateError, match=pattern):
        pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.optimizer.param_groups[0].update(lr=1e-3)
    if committed:
        torch.set_rng_state(state)
        pair.train(train_step, steps=2)
        pair.finish()
    else:
        with pytest.raises(swapper.StateError, match=r"step 3 failed half-way.*resume from the last"):
            loss_of(pair.swapped, tokens())
        pair.close()


@pytest.mark.parametrize("codec", ["exact", "8bit"])
def test_a_setting_that_a_pass_in_one_has_used_must_not_change(tmp_path: Path, codec: str) -> None:
    """AdamW is not called for these: swapper's own passes update."""
    model = Net().bfloat16()
    with swapper.SwapManager(tmp_path, host_memory="16MiB") as manager:
        model, optimizer = manager.offload(
            model,
            AdamW(model.parameters(), lr=1e-3),
            update="backward",
            optimizer_state="nvme",
            master_weights=torch.float32,
            state_codec=codec,
        )
        train_step(model, optimizer)
        loss_of(model, tokens()).backward()
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(swapper.StateError, match=r"'lr' of .* changed between backward and optimizer.step"):
            optimizer.step()


# --- what fails -------------------------------------------------------------------------------------------------------


class Fault(torch.autograd.Function):
    """Fails in backward, as often as `Fault.times` says."""

    times = 0

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Fault.times:
            Fault.times -= 1
            raise ArithmeticError("a fault in backward")
        return gradient


class Faulty(Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: Any = self.embedding(tokens) + self.position(tokens.shape[1])
        hidden = Fault.apply(self.blocks[0](hidden))
        for block in self.blocks[1:]:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def go_on_after(pair: Twins, fail: Callable[[], Any]) -> None:
    """Have a step fail; then go on as plain torch would that had not tried."""
    state = torch.get_rng_state()
    fail()
    pair.optimizer.zero_grad()
    torch.set_rng_state(state)
    pair.train(train_step, steps=2)


@pytest.mark.parametrize("next_use", ["step", "forward", "gather", "snapshot", "close"])
def test_a_backward_that_fails_is_undone(backward: MakeTwins, next_use: str) -> None:
    pair = backward(Faulty(), NAdam)
    pair.train(train_step, steps=2)

    def fail() -> None:
        Fault.times = 1
        with pytest.raises(ArithmeticError, match="a fault"):
            loss_of(pair.swapped, tokens()).backward()
        assert len(updated_early(pair)) >= 2
        if next_use == "gather":
            pair.optimizer.zero_grad()
            for name, parameter in pair.plain.named_parameters():
                with pair.manager.gather(pair.swapped.get_parameter(name)) as ours:
                    assert torch.equal(ours, parameter)
        elif next_use == "snapshot":
            pair.manager.snapshot(pair.directory / "whole.pt").wait()
            assert_same(dict(torch.load(pair.directory / "whole.pt")["model"]), dict(pair.plain.state_dict()))
        elif next_use == "step":
            pair.optimizer.zero_grad()
            pair.both(lambda model, optimizer: optimizer.step())

    if next_use == "close":
        fail()
        pair.close()
        return
    go_on_after(pair, fail)
    pair.finish()


@pytest.mark.parametrize("gradients", ["host", "nvme"])
def test_an_update_that_fails_is_undone_with_all_before_it(backward: MakeTwins, gradients: str) -> None:
    pair = backward(Net(), NAdam, gradients=gradients)
    pair.train(train_step, steps=2)

    def fail() -> None:
        fail_in_the_middle(pair)
        with pytest.raises(RuntimeError, match="in the middle"):
            loss_of(pair.swapped, tokens()).backward()
        assert not updated_early(pair)

    go_on_after(pair, fail)
    pair.finish(paged=False)


@pytest.mark.parametrize("params", ["nvme", "host"])
def test_a_backward_that_fails_and_cannot_be_undone_ends_the_run_and_says_so(backward: MakeTwins, params: str) -> None:
    pair = backward(Faulty(), params=params, commit_every=None)
    pair.train(train_step, steps=2)
    Fault.times = 1
    with pytest.raises(ArithmeticError, match="a fault"):
        loss_of(pair.swapped, tokens()).backward()
    with pytest.raises(swapper.StateError, match=r"step 3 failed half-way \(a backward failed.* resume from the last"):
        loss_of(pair.swapped, tokens())
    pair.close()


def test_a_backward_that_fails_before_any_update_costs_nothing(backward: MakeTwins) -> None:
    pair = backward(Faulty(), commit_every=None)
    pair.train(train_step, steps=1)

    def fail() -> None:
        Fault.times = 1
        with pair.manager.accumulate(), pytest.raises(ArithmeticError, match="a fault"):
            loss_of(pair.swapped, tokens()).backward()

    go_on_after(pair, fail)
    pair.finish()


def test_a_run_that_is_closed_between_backward_and_step_goes_on_from_the_step_before(tmp_path: Path) -> None:
    def begin_another(model: nn.Module, manager: swapper.SwapManager) -> None:
        if manager.step < 5:
            loss_of(model, tokens()).backward()
            assert manager.current.run.model.update_is_open

    assert_closed_runs_go_on(tmp_path, "backward", (2, 3, 5), begin_another)


@pytest.mark.parametrize("name", ["clipping", "clipping values", "zeroing in place"])
def test_gradients_on_nvme_cannot_be_changed_between_backward_and_step(backward: MakeTwins, name: str) -> None:
    pair = backward(Net(), gradients="nvme")
    make_gradients(pair)
    with pytest.raises(swapper.StateError, match=r"backward has updated.*manager.accumulate\(\)"):
        LOOKS[name](pair)
    pair.both(lambda _, optimizer: optimizer.step())
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    pair.train(train_step, steps=1)
    pair.finish(paged=False)

"""`optimizer.state` can be changed as plain torch's: what is done to it acts at once, or is refused."""

from __future__ import annotations

import collections
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e.models import finish_step
from e2e.twins import Twins, assert_same

MakeTwins = Callable[..., Twins]
WIDTH = 160  # a layer's weight is larger than what stays in memory


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
    return finish_step(model(torch.randn(4, WIDTH)).square().mean(), optimizer)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def tensors(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Of two parameters, of the parameter's shape."""
    states = [optimizer.state[parameter] for parameter in (model[0].weight, model[1].bias)]
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]


def in_place(change: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module, Any], None]:
    def run(model: nn.Module, optimizer: Any) -> None:
        for tensor in tensors(model, optimizer):
            change(tensor)

    return run


def through_an_alias(tensor: torch.Tensor) -> None:
    one, other = tensor[3:], tensor.detach()
    one.mul_(3)
    other[0] = 0.25
    tensor.data.view(-1)[5:9].add_(1)


def drop_first(model: nn.Module, optimizer: Any) -> None:
    optimizer.state.pop(model[0].weight)
    del optimizer.state[model[1].bias]


def replace_entry(model: nn.Module, optimizer: Any) -> None:
    for state in optimizer.state.values():
        for key, value in list(state.items()):
            state[key] = value * 0.5 if key != "step" else value + 3


def replace_state(model: nn.Module, optimizer: Any) -> None:
    for parameter in (model[0].weight, model[2].bias):
        optimizer.state[parameter] = {k: torch.full_like(v, 0.125) for k, v in optimizer.state[parameter].items()}


def replace_all(model: nn.Module, optimizer: Any) -> None:
    optimizer.state = collections.defaultdict(dict)


def keep_one(model: nn.Module, optimizer: Any) -> None:
    kept = {k: v.clone() for k, v in optimizer.state[model[2].weight].items()}
    optimizer.state = collections.defaultdict(dict, {model[2].weight: kept})


def update_entries(model: nn.Module, optimizer: Any) -> None:
    state = optimizer.state[model[1].weight]
    state.update({key: torch.zeros_like(value) for key, value in state.items()})
    optimizer.state.update({model[2].bias: {}})
    optimizer.state.setdefault(model[0].weight, {}).setdefault("step", None)


def twice_the_same(model: nn.Module, optimizer: Any) -> None:
    """Two looks at one tensor are looks at one tensor."""
    key = next(k for k, v in optimizer.state[model[0].weight].items() if isinstance(v, torch.Tensor) and v.dim())
    one, other = optimizer.state[model[0].weight][key], optimizer.state[model[0].weight][key]
    one[0].zero_()
    other[1].fill_(2.0)
    row = optimizer.state[model[0].weight][key][2]
    del one, other
    optimizer.state[model[0].weight][key][3].fill_(1.0)
    row.fill_(5.0)


WAYS: dict[str, Callable[[nn.Module, Any], None]] = {
    "zero_": in_place(lambda tensor: tensor.zero_()),
    "mul_": in_place(lambda tensor: tensor.mul_(0.5)),
    "copy_": in_place(lambda tensor: tensor.copy_(torch.ones_like(tensor))),
    "[]": in_place(lambda tensor: tensor.__setitem__(slice(1, 3), 0.5)),
    "out=": in_place(lambda tensor: torch.add(tensor, 1.0, out=tensor)),
    "nn.init": in_place(lambda tensor: nn.init.constant_(tensor, 0.5)),
    "nn.init at random": in_place(lambda tensor: nn.init.uniform_(tensor)),
    "foreach": lambda model, optimizer: torch._foreach_mul_(tensors(model, optimizer), 0.25),
    "an alias": in_place(through_an_alias),
    "pop and del": drop_first,
    "an entry": replace_entry,
    "a parameter's": replace_state,
    "clear": lambda _, optimizer: optimizer.state.clear(),
    "clear a parameter's": lambda model, optimizer: optimizer.state[model[1].weight].clear(),
    "all": replace_all,
    "all but one": keep_one,
    "update": update_entries,
    "the same twice": twice_the_same,
    "popitem": lambda _, optimizer: optimizer.state.popitem() and None,
}
PLACES: dict[str, dict[str, Any]] = {
    "nvme": {},
    "host": {"params": "host", "optimizer_state": "host"},
    "device": {"device": "late", "device_memory": 8 << 20, "update_on": "device", "optimizer_state": "device"},
}


@pytest.mark.parametrize("place, update", [*((p, "step") for p in PLACES), ("nvme", "deferred"), ("nvme", "backward")])
@pytest.mark.parametrize("make", [adamw, sgd])
def test_changes_of_the_state_act_as_in_plain_torch(twins: MakeTwins, make: Any, place: str, update: str) -> None:
    options = {**PLACES[place], "room_bytes": 1 << 19, "update": update}
    if "device" in options:
        options["device"] = HostDevice(options["device"])
    pair = twins(layers(), make, **options)
    pair.train(step, steps=1)
    for name, way in WAYS.items():
        if name != "update" or make is adamw:
            pair.both(way)
        for ours, theirs in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
            assert_same(dict(pair.optimizer.state[ours]), dict(pair.plain_optimizer.state.get(theirs, {})), name)
        pair.train(step, steps=2)
        pair.assert_same_state()
    pair.finish(paged=False)


def test_step_counters_can_be_set(twins: MakeTwins) -> None:
    def change(model: nn.Module, optimizer: Any) -> None:
        optimizer.state[model[0].weight]["step"] += 7
        optimizer.state[model[0].bias]["step"].fill_(3)
        optimizer.state[model[1].bias]["step"] = torch.tensor(9.0)

    pair = twins(layers(), adamw)
    pair.train(step, steps=2)
    pair.both(change)
    pair.train(step, steps=2)
    pair.finish(paged=False)


def test_changes_are_committed_with_the_next_step(twins: MakeTwins) -> None:
    """Masters are the parameters': they stay."""
    pair = twins(layers().bfloat16(), adamw, master=True, select=lambda model: list(model.parameters()))

    def bf16_step(model: nn.Module, optimizer: Any) -> None:
        model(torch.randn(4, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    pair.train(bf16_step, steps=2)
    inner = pair.plain_optimizer.inner
    for ours, theirs in zip(pair.swapped.parameters(), pair.plain_optimizer.masters, strict=True):
        pair.optimizer.state[ours]["exp_avg"].mul_(0.5)
        inner.state[theirs]["exp_avg"].mul_(0.5)
    pair.train(bf16_step, steps=1)
    pair.manager.close()
    model = layers().bfloat16()
    with swapper.SwapManager(pair.directory, "64MiB", resume="auto") as manager:
        _, optimizer = manager.offload(
            model, adamw(model.parameters()), master_weights=torch.float32, params="nvme", optimizer_state="nvme"
        )
        assert manager.step == 3
        assert_same(optimizer.state_dict()["state"], inner.state_dict()["state"])


def test_what_has_gone_on_is_not_written_to(twins: MakeTwins) -> None:
    """In plain torch it would act: here it is a copy of an earlier step, and says so."""
    pair = twins(layers(), adamw)
    pair.train(step, steps=2)
    state = pair.optimizer.state[pair.swapped[0].weight]
    kept, same = state["exp_avg"], state["exp_avg"].clone()
    view, alias = kept[2:], kept.data
    pair.train(step, steps=1)
    assert torch.equal(kept, same)  # whatever happens
    for write in (kept.zero_, view.zero_, alias.zero_, lambda: kept.__setitem__(0, 1.0), lambda: nn.init.zeros_(kept)):
        with pytest.raises(
            swapper.StateError, match=r"'exp_avg' of 0\.weight as it was before the last step.*read it again"
        ):
            write()
    assert_same(dict(state), dict(pair.plain_optimizer.state[pair.plain[0].weight]))  # a look at it is a new one
    state["exp_avg"].zero_()
    pair.plain_optimizer.state[pair.plain[0].weight]["exp_avg"].zero_()
    pair.train(step, steps=1)
    pair.finish(paged=False)


def test_what_cannot_be_state_is_refused_and_nothing_changes(twins: MakeTwins) -> None:
    pair = twins(layers(), adamw)
    pair.train(step, steps=2)
    weight, bias = pair.swapped[0].weight, pair.swapped[0].bias
    full = {key: value.clone() for key, value in pair.optimizer.state[bias].items()}
    state = pair.optimizer.state

    def refused(change: Callable[[], Any], match: str) -> None:
        with pytest.raises(swapper.StateError, match=match):
            change()

    refused(lambda: state.__setitem__(weight, full), r"0\.weight has the shape \[160\]")
    refused(lambda: state[weight].__setitem__("exp_avg", torch.zeros(3)), r"0\.weight has the shape \[3\]")
    refused(
        lambda: state[weight].__setitem__("exp_avg", torch.zeros(WIDTH, WIDTH).half()), "not torch.float16: convert"
    )
    refused(lambda: state[weight].__setitem__("mine", torch.zeros(3)), "'mine'")
    refused(lambda: state[weight].pop("exp_avg"), r"0\.weight has \['exp_avg_sq', 'step'\]")
    refused(lambda: state.__setitem__(nn.Parameter(torch.zeros(3)), full), r"shape \[3\].*does not train")
    refused(lambda: setattr(pair.optimizer, "state", {bias: full, weight: full}), r"0\.weight has the shape \[160\]")
    assert dict(state[nn.Parameter(torch.zeros(3))]) == {}
    assert nn.Parameter(torch.zeros(3)) not in state
    with pytest.raises(KeyError):
        state.pop(nn.Parameter(torch.zeros(3)))
    assert state.pop(nn.Parameter(torch.zeros(3)), None) is None
    with pytest.raises(ValueError, match="read-only"):
        state[weight]["exp_avg"].numpy()[0] = 3
    pair.train(step, steps=1)
    pair.finish(paged=False)


def test_state_is_copied_and_saved_as_plain_tensors(twins: MakeTwins) -> None:
    pair = twins(layers(), adamw)
    pair.train(step, steps=1)
    weight = pair.swapped[0].weight
    expected = dict(pair.plain_optimizer.state[pair.plain[0].weight])
    file = io.BytesIO()
    torch.save(pair.optimizer.state[weight], file)
    file.seek(0)
    for made in (copy.deepcopy(pair.optimizer.state[weight]), torch.load(file, weights_only=True)):
        assert_same(dict(made), expected)
        assert all(type(value) is torch.Tensor for value in made.values())
        made["exp_avg"].zero_()
    shown = pair.optimizer.state[weight]["exp_avg"]
    assert repr(shown) == repr(expected["exp_avg"])
    for made in (shown.clone(), shown * 2, shown.double(), shown.sum(), torch.zeros(3) + shown[0, 0]):
        assert type(made) is torch.Tensor
        made.zero_()
    pair.train(step, steps=1)
    pair.finish(paged=False)


def test_a_state_dicts_tensors_are_not_written_to(twins: MakeTwins) -> None:
    """In plain torch they are the state: here they only show it, the small ones too."""
    pair = twins(layers(), adamw)
    pair.train(step, steps=2)
    shown = pair.optimizer.state_dict()["state"]
    for number in (0, 1):
        for write in (torch.Tensor.zero_, nn.init.zeros_, lambda t: nn.init.normal_(t), lambda t: t.data[0].fill_(1)):
            with pytest.raises(swapper.StateError, match=r"state_dict\(\), which only shows the state"):
                write(shown[number]["exp_avg"])
    pair.train(step, steps=1)
    assert shown[1]["exp_avg"].sum() is not None  # a small one stays what it was
    for state in pair.optimizer.state_dict()["state"].values():
        state["exp_avg"] = state["exp_avg"].to(torch.float32).mul_(2)  # memory of its own
    pair.finish(paged=False)


def keeps_a_list() -> type[torch.optim.Optimizer]:
    class Counting(torch.optim.Optimizer):
        """Keeps how far it went."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 1e-2})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        seen = state.setdefault("seen", [1.0])
                        parameter.sub_(parameter.grad, alpha=group["lr"] * seen[-1])

    return Counting


def test_a_list_in_the_state_is_the_optimizers_own(twins: MakeTwins) -> None:
    pair = twins(layers(), keeps_a_list())
    pair.train(step, steps=1)
    pair.both(lambda model, optimizer: optimizer.state[model[0].weight]["seen"].append(0.5))
    pair.train(step, steps=2)
    pair.finish(paged=False)

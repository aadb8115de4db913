"""Holds for the hooks of every model: of training and of inference, on the CPU and on a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_users import USERS, WIDTH, User, make
from torch import nn

from swapper.modules.cold import is_cold


@pytest.fixture(params=[name for name in USERS if name != "an expert"])
def user(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[User]:
    made = USERS[request.param](tmp_path)
    yield made
    made.close()


def check_nothing_is_leased(user: User) -> None:
    assert user.hooks._running == []
    assert not any(group.is_leased for group in user.groups)


def check_runs(user: User) -> None:
    found = user.run()
    with torch.no_grad():
        expected = make()(torch.ones(2, WIDTH))
    for tensor, same in zip(found, expected, strict=True):
        assert torch.equal(tensor.cpu(), same)
    check_nothing_is_leased(user)


def test_a_forward_finds_its_parameters_and_an_output_outlives_them(user: User) -> None:
    for _ in range(3):
        check_runs(user)
    assert any(is_cold(parameter) for group in user.groups for parameter in group.parameters)


def test_an_exception_in_a_forward_gives_everything_back(user: User) -> None:
    for layer in (user.model.layers[0], user.model.layers[4], user.model):  # type: ignore[index]
        handle = layer.register_forward_pre_hook(lambda *_: 1 / 0)  # type: ignore[union-attr]
        with pytest.raises(ZeroDivisionError):
            user.run()
        handle.remove()
        check_nothing_is_leased(user)
        check_runs(user)


def test_an_exception_that_passes_by_the_hooks_is_made_good_by_the_next_forward(user: User) -> None:
    """As Ctrl-C does between two lines of torch's: the hooks behind a forward do not run."""
    layer = user.model.layers[4]  # type: ignore[index]

    def stop(*_: object) -> None:
        for module in user.model.modules():
            module._forward_hooks_always_called.clear()
        raise KeyboardInterrupt

    handle = layer.register_forward_pre_hook(stop)  # type: ignore[union-attr]
    always = {module: dict(module._forward_hooks_always_called) for module in user.model.modules()}
    with pytest.raises(KeyboardInterrupt):
        user.run()
    handle.remove()
    for module, hooks in always.items():
        module._forward_hooks_always_called.update(hooks)
    check_runs(user)


def test_a_parameter_is_brought_in_for_the_forward_that_contains_it(user: User) -> None:
    seen: list[torch.Tensor] = []

    def look(module: nn.Module, _: object) -> None:
        seen.append(user.model.layers[5].weight.sum().cpu())  # type: ignore[index, union-attr, operator]
        assert user.hooks._running[0].groups

    handle = user.model.layers[2].register_forward_pre_hook(look)  # type: ignore[index, union-attr]
    check_runs(user)
    handle.remove()
    assert torch.equal(seen[0], user.content["layers.5.weight"].sum())


def test_after_they_are_removed_nothing_of_them_is_left(user: User) -> None:
    user.hooks.remove()
    for module in user.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._forward_hooks_always_called

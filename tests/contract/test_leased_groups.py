"""Holds for every leased group: of training and of inference, on the CPU and on a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_users import USERS, Trained, User, is_away

import swapper
from swapper.errors import InvariantError


@pytest.fixture(params=USERS)
def user(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[User]:
    made = USERS[request.param](tmp_path)
    yield made
    made.close()


def content_of(user: User) -> dict[str, torch.Tensor]:
    group = user.group()
    return {name: p.detach().clone() for name, p in zip(group.names, group.parameters, strict=True)}


def check_content(user: User) -> None:
    for name, tensor in content_of(user).items():
        assert torch.equal(tensor.cpu(), user.content[name])


def test_parameters_are_there_from_the_first_lease_to_the_last_release(user: User) -> None:
    group = user.group()
    assert is_away(group) and not group.is_leased
    group.lease()
    group.lease()
    check_content(user)
    group.release()
    check_content(user)
    assert group.is_leased
    group.release()
    assert is_away(group) and not group.is_leased


def test_what_could_not_be_read_is_not_leased_and_is_read_again(user: User) -> None:
    group = user.group()
    user.forget_frames()
    with user.broken_drive():
        for _ in range(2):
            with pytest.raises(swapper.IoError):
                group.lease()
            assert is_away(group) and not group.is_leased
    group.lease()
    check_content(user)
    group.release()


def test_a_change_while_it_is_leased_is_told(user: User) -> None:
    group = user.group()
    group.lease()
    with torch.no_grad():
        group.parameters[0].add_(1)
    if user.tells == "raises":
        with pytest.raises(swapper.StateError, match="was changed in a forward"):
            group.release()
    else:
        group.release()
        user.forget_frames()
        group.lease()
        assert torch.equal(group.parameters[0].detach().cpu(), user.content[group.names[0]] + 1)
        group.release()
    assert is_away(group) and not group.is_leased


@pytest.mark.parametrize("name", ["trained", "trained on a device"])
def test_leases_of_a_pass_that_never_ended_are_forgotten_in_training(name: str, tmp_path: Path) -> None:
    user = USERS[name](tmp_path)
    assert isinstance(user, Trained)
    group = user.group()
    group.lease()
    group.lease()
    user.forget_leases()
    assert is_away(group) and not group.is_leased
    group.lease()
    check_content(user)
    group.release()
    user.close()


def test_a_view_of_it_is_known_by_its_storage(user: User) -> None:
    from swapper.tensors.torch_private import storage_of

    group = user.group()
    group.lease()
    of_views = {storage_of(parameter.detach()[:1]) for parameter in group.parameters}
    group.release()
    assert of_views <= group.storages or user.group().names == ["experts.1.weight"]  # what an expert shows stays


def test_a_release_without_a_lease_raises_and_changes_nothing(user: User) -> None:
    group = user.group()
    with pytest.raises(InvariantError, match=rf"group {group.index} \({group.names[0]} and others\) is not leased"):
        group.release()
    group.lease()
    check_content(user)
    group.release()
    assert is_away(group) and not group.is_leased

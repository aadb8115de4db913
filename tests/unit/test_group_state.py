"""Every move that a group's part in a step consists of is allowed, and no other."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import swapper
from swapper.errors import InvariantError
from swapper.train.groups.group_state import GroupState
from swapper.train.groups.parameter_group import GroupParameters

STORIES = {
    "deferred": "CURRENT DUE UPDATING CURRENT",
    "deferred, failed and done again": "CURRENT DUE UPDATING DUE UPDATING CURRENT",
    "deferred, and the step was undone": "CURRENT DUE CURRENT",
    "in backward": "CURRENT UPDATING SEALED CURRENT",
    "in backward, failed": "CURRENT UPDATING CURRENT",
    "in backward, one module behind": "CURRENT READY UPDATING SEALED CURRENT",
    "in backward, which ended before": "CURRENT READY CURRENT",
}
ALLOWED = {pair for story in STORIES.values() for pair in itertools.pairwise(GroupState[n] for n in story.split())}
PAIRS = [pair for pair in itertools.product(GroupState, repeat=2) if pair[0] is not pair[1]]


@pytest.fixture
def group(tmp_path) -> GroupParameters:
    model = nn.Linear(4, 4)
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        manager.offload(model, torch.optim.SGD(model.parameters(), lr=0.1))
        yield manager.current.run.model.groups[0]


@pytest.mark.parametrize("old, new", PAIRS, ids=lambda state: state.name)
def test_a_move_is_allowed_or_raises_names_the_group_and_changes_nothing(group, old, new):
    group.state = old
    if (old, new) in ALLOWED:
        group.move(new)
        assert group.state is new
        return
    with pytest.raises(
        InvariantError, match=rf"group 0 \(weight and others, leased 0 times\): {old.name} -> {new.name} is not a legal"
    ):
        group.move(new)
    assert group.state is old


def test_a_leased_group_is_current(group):
    group.lease()
    with pytest.raises(InvariantError, match=r"leased 1 times\): CURRENT -> DUE is not a legal move"):
        group.move(GroupState.DUE)
    group.release()
    group.move(GroupState.DUE)


@pytest.mark.parametrize("state", [state for state in GroupState if state is not GroupState.CURRENT])
def test_a_group_that_is_not_current_is_not_used(group, state):
    group.state = state
    for use in (group.lease, lambda: group.pin(write=False)):
        with pytest.raises(InvariantError, match=f"group 0 .* is used while it is {state.name}"):
            use()
        assert not group.is_leased and not group.home.pins

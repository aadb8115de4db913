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
        InvariantError, match=rf"group 0 \(weight and others\): {old.name} -> {new.name} is not a legal"
    ):
        group.move(new)
    assert group.state is old

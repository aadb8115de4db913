"""A forked child that touches the model or its manager gets a clear error and ends as any other; its parent goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from e2e.processes import run_python

from bad_input.forked import WAYS

HARMLESS = {"close", "nothing", "collecting everything"}


@pytest.fixture(scope="module", params=["nvme", "host"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = run_python("-m", "bad_input.forked", tmp_path_factory.mktemp("forked"), request.param)
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    found = {message["way"]: message for message in messages if "way" in message}
    found["parent"] = {"finished": messages[-1:] == [{"finished": True}], "stderr": done.stderr, "place": request.param}
    return found


@pytest.mark.parametrize("way", [way for way in WAYS if way not in HARMLESS])
def test_touching_the_manager_in_a_child_raises_there(outcomes: dict[str, Any], way: str) -> None:
    outcome = outcomes[way]
    assert outcome.get("type") == "StateError", outcome
    assert "forked child" in outcome["message"]
    assert outcome["status"] == 0


@pytest.mark.parametrize("way", sorted(HARMLESS))
def test_a_child_that_does_not_touch_it_ends_as_any_other(outcomes: dict[str, Any], way: str) -> None:
    assert outcomes[way] == {"way": way, "status": 0, "type": None, "message": ""}


@pytest.mark.whole
def test_the_parent_goes_on_bit_equal(outcomes: dict[str, Any]) -> None:
    assert outcomes["parent"]["finished"], outcomes["parent"]["stderr"]

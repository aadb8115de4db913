"""Cold parameters never lie or crash. With cold="raise" what needs their data raises an error that names the way."""

from __future__ import annotations

import json
from typing import Any

import devices
import pytest

from e2e.cold_process import REFUSED, WORKS
from e2e.processes import run_python

Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What came of each operation. One that ends its process is followed by a new process for the others."""
    found: dict[str, Outcome] = {}
    left = [*REFUSED, *WORKS]
    while left:
        directory = tmp_path_factory.mktemp("cold")
        done = run_python("-m", "e2e.cold_process", directory, "raise", json.dumps(left))
        messages = [json.loads(line) for line in done.stdout.splitlines()]
        begun = None
        for message in messages:
            if "begin" in message:
                begun = message["begin"]
                found[begun] = {"result": f"ended the process with {done.returncode}", "message": done.stderr}
            elif "result" in message:
                found[begun] = message
        assert begun is not None, done.stderr
        left = left[left.index(begun) + 1 :]
        if not left:
            found["the end"] = {"finished": messages[-1].get("finished", False), "message": done.stderr}
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_data_is_refused_by_an_error_that_names_gather(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[name]
    assert outcome["result"] == "raises", outcome
    assert outcome["ours"], outcome
    assert "manager.gather" in outcome["message"]


@pytest.mark.whole
@pytest.mark.parametrize("name", WORKS)
def test_what_can_be_done_gives_the_right_result(outcomes: dict[str, Outcome], name: str) -> None:
    if name in ("gradients", "zero_grad to zeros", "clip_grad_norm_"):
        devices.skip_on_device("it looks at gradients, which have left a device")
    assert outcomes[name]["result"] == "works", outcomes[name].get("message")


def test_training_goes_on_bit_equal_after_all_of_it(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["the end"]["finished"], outcomes["the end"]["message"]

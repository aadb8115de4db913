"""Whatever torch does to a cold parameter gives plain torch's result, bit for bit, or an error of ours; nothing crashes."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from e2e.cold_table import TABLE
from e2e.processes import run_python

RUNS: dict[str, dict[str, Any]] = {
    "step": {},
    "deferred": {"update": "deferred"},
    "backward": {"update": "backward"},
    "never committed": {"commit_every": None},
}
ALL = bool(os.environ.get("SWAPPER_TEST_ALL"))
EVERY = 1 if ALL else 60
"""By default each run does one in so many of the table, each run others."""

REFUSED = (
    *("data_ptr", "numpy", "is_shared", "t_", "resize_", "apply_", "set data", "vector_to_parameters", "as_strided from an offset"),
    *("func.", "torch.tensor", "as_tensor"),  # which go past the guard; and what changes a tensor that only shows the state:
    ".detach()",
)  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_an_operation_on_a_cold_parameter_is_plain_torchs_or_refused(tmp_path: Any, run: str) -> None:
    names = list(TABLE)[list(RUNS).index(run) * 7 :: EVERY]
    done = run_python("-m", "e2e.cold_table_process", tmp_path, json.dumps(RUNS[run]), json.dumps(names))
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    begun = [message["begin"] for message in messages if "begin" in message]
    found = dict(zip(begun, [message["result"] for message in messages if "result" in message], strict=False))
    wrong = {name: result for name, result in found.items() if result not in ("works", "refused")}
    assert not wrong
    assert messages[-1] == {"finished": True}, (begun[-1], done.stderr)
    unexpected = [n for n, result in found.items() if result == "refused" and not any(part in n for part in REFUSED)]
    assert not unexpected
    assert set(found) == set(names)

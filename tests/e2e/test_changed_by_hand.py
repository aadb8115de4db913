"""Changes by hand after a step are part of that step: a run that goes on has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e import changed_by_hand
from e2e.changed_by_hand import CHANGES, plain, swapped
from e2e.processes import run_python
from e2e.twins import assert_same

STEPS = 6


@pytest.mark.parametrize("end", ["closed", "killed"])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("change", [when + name for when in ("", "late ") for name in CHANGES])
@pytest.mark.parametrize("params", ["nvme", "host"])
def test_a_run_that_goes_on_has_what_was_changed_after_its_last_step(
    tmp_path: Path, params: str, change: str, update: str, end: str
) -> None:
    if change.endswith("noise") and update == "backward":
        pytest.skip("between a backward that has updated and optimizer.step() nothing can be changed")
    for steps in (1, 3):
        if end == "killed":
            ran = run_python(changed_by_hand.__file__, tmp_path, change, update, steps, params, end)
            assert ran.returncode == 0, ran.stderr
        else:
            swapped(tmp_path, change, update, steps, params, is_killed=False)
    begun, found = swapped(tmp_path, change, update, STEPS, params, is_killed=False)
    assert begun == 3 if end == "closed" else begun in (2, 3)
    assert_same(found, plain(change, STEPS))

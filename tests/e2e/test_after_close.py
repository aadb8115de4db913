"""Memory that was shown stays as long as somebody refers to it, also after `manager.close()`. A fault would end the process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import devices
import pytest

from e2e import closed_reads
from e2e.processes import run_python
from e2e.twins import Twins, send_away
from swapper.modules import resources

MakeTwins = Callable[..., Twins]


@pytest.mark.parametrize("kind", closed_reads.KINDS)
def test_what_was_kept_is_read_after_the_close(tmp_path: Path, kind: str) -> None:
    if kind in closed_reads.OF_ARRAYS:
        devices.skip_on_device("memory of a device has no arrays, and gradients have left it")
    if kind.startswith("keys"):
        pytest.importorskip("transformers")
    done = run_python("-m", "e2e.closed_reads", tmp_path, kind)
    assert (done.returncode, done.stdout) == (0, f"{kind}: same\n"), done.stderr[-4000:]
    if not (
        devices.NAME and kind == "a graph"
    ):  # which refers to more than fits the device, and whose backward is refused
        assert "which would end the process" not in done.stderr


def test_where_nobody_refers_to_it_nothing_is_kept(twins: MakeTwins, caplog: pytest.LogCaptureFixture) -> None:
    pair = twins(closed_reads.layers())
    pair.train(closed_reads.step, steps=2)
    held = pair.optimizer.state_dict()  # which expires
    pair.train(closed_reads.step, steps=1)
    with caplog.at_level(logging.INFO, logger="swapper"):
        pair.close()
    assert "close:" not in caplog.text and held


@devices.without_device("what a gather shows of a device is no host memory")
def test_what_does_not_fit_in_memory_is_named(
    twins: MakeTwins, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = twins(closed_reads.layers())
    with pair.manager.gather(pair.swapped[3].weight):
        kept = pair.swapped[3].weight.detach()
    send_away(pair.manager)
    monkeypatch.setattr(resources, "headroom_bytes", lambda: 4096)
    pair.close()
    assert "still refer to" in caplog.text and "3.weight" in caplog.text and kept is not None

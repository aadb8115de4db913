"""Runs twins of the tests on the device: a sample, another one with each commit, each bit-equal to plain torch there."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gpu import stand_in
from gpu.bench import Bench, Row
from gpu.bounded import run_bounded
from gpu.install import ROOT

TWINS = "twins of the tests on the device, a sample, bit-equal"
FILES = (
    "test_equivalence",
    "test_device_kept_gradients",
    "test_device_kept_state",
    "test_device_sums",
    "test_device_training",
)
LIMIT_S = 50


def twins(bench: Bench) -> Iterator[Row]:
    lacking = [name for name in ("pytest", "hypothesis", "safetensors") if importlib.util.find_spec(name) is None]
    if lacking:
        yield Row(TWINS, reason=f"{', '.join(lacking)} is not installed", is_open=True)
        return
    files = [str(ROOT / "tests" / "e2e" / f"{name}.py") for name in (FILES[1:2] if bench.is_rehearsal else FILES)]
    command = [sys.executable, "-m", "pytest", *stand_in.pytest_options(), "-rf", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "SWAPPER_TEST_SAMPLE": "1", "SWAPPER_TEST_DEVICE": "late" if bench.on_cpu else "cuda"}
    paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(dir=bench.directory) as place:
        environment |= {"TMPDIR": place, "PYTHONPATH": os.pathsep.join(paths)}
        log = Path(place) / "log"
        with log.open("w") as output:  # from a directory without a package swapper
            status = run_bounded(command, output, LIMIT_S, environment, Path(place))
        told = log.read_text()
    print(told[-4000:], file=sys.stderr)
    counts = ", ".join(f"{count} {kind}" for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", told))
    reason = f"they took longer than {LIMIT_S} s" if status is None else ""
    yield Row(TWINS, "all pass", counts if status is not None else "", status == 0, reason, is_equal=status == 0)

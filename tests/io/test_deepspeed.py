"""DeepSpeed on swapper's engine: an unchanged ZeRO-3 training, and DeepSpeed's own tests of its handle.

    SWAPPER_DEEPSPEED_PYTHON=/path/to/venv/bin/python DEEPSPEED_CHECKOUT=/path/to/DeepSpeed pytest tests/io/test_deepspeed.py

The interpreter has deepspeed and swapper; the checkout is DeepSpeed's repository. Without them these tests are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("SWAPPER_DEEPSPEED_PYTHON", "")
CHECKOUT = Path(os.environ.get("DEEPSPEED_CHECKOUT", ""))
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
LAUNCH = [PYTHON, "-m", "swapper.integrations.deepspeed"]

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="SWAPPER_DEEPSPEED_PYTHON names no interpreter with deepspeed"),
    pytest.mark.timeout(1800),
]


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT, **options)  # type: ignore


def losses(directory: Path, kind: str, ranks: int) -> tuple[list[str], list[str]]:
    """Return what the training printed, sorted: the losses of four steps by rank, and of two that were taken again."""
    directory.mkdir()
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    script = str(Path(__file__).with_name("zero3_training.py"))
    done = run([*LAUNCH, *several, script, str(directory), kind])
    found, again = (sorted(re.findall(rf"^{word} (.*)$", done.stdout, re.MULTILINE)) for word in ("loss", "again"))
    assert done.returncode == 0 and (len(found), len(again)) == (4 * ranks, 2 * ranks), done.stderr[-3000:]
    return found, again


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "pipelined"])
def test_an_unchanged_zero3_training_gives_the_same_losses_from_nvme(tmp_path: Path, kind: str, ranks: int) -> None:
    """It goes back to its checkpoint as well, to which DeepSpeed copies swapped files; not exactly, whatever handle it has."""
    found, _ = losses(tmp_path / kind, kind, ranks)
    expected, again = losses(tmp_path / "none", "none", ranks)
    assert found == expected and set(again) < set(expected)
    assert len({path.parent for path in (tmp_path / kind / "checkpoints").rglob("*.swp")}) >= ranks


def test_install_and_uninstall() -> None:
    script = """
import swapper, swapper.integrations.deepspeed as ours
from deepspeed.ops.op_builder import AsyncIOBuilder
before = AsyncIOBuilder.load
ours.install()
ours.install()
import deepspeed
from deepspeed.ops.op_builder import GDSBuilder
module = AsyncIOBuilder().load()
assert module.aio_handle is swapper.AioHandle and GDSBuilder().load().gds_handle is swapper.GdsHandle
import torch, tempfile, os
with tempfile.TemporaryDirectory() as place:
    tensor, back = torch.randn(1003), torch.zeros(1003)
    assert module.aio_write(tensor, place + "/x", 4096, 8, False, True, True) == 0
    assert module.aio_read(back, place + "/x", 4096, 8, False, True, True) == 0
    assert torch.equal(tensor, back)
assert module.deepspeed_memcpy(back, tensor + 1) == 0 and torch.equal(back, tensor + 1)
ours.uninstall()
assert AsyncIOBuilder.load is before
print("fine")
"""
    done = run([PYTHON, "-c", script])
    assert done.stdout.splitlines()[-1:] == ["fine"], done.stderr[-3000:]


def test_tune_prints_what_deepspeed_loads(tmp_path: Path) -> None:
    script = """
import sys
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from swapper.io.tuning import Tuning
config = Tuning(262144, 64, "uring", 1e9, 1e9).deepspeed_config()
loaded = get_aio_config(config)
assert {key: loaded[key] for key in config["aio"]} == config["aio"], loaded
print("fine")
"""
    done = run([PYTHON, "-c", script])
    assert done.stdout.splitlines()[-1:] == ["fine"], done.stderr[-3000:]


@pytest.mark.skipif(not (CHECKOUT / "op_builder").is_dir(), reason="DEEPSPEED_CHECKOUT names no checkout of DeepSpeed")
def test_deepspeeds_own_tests_of_its_handles_pass(tmp_path: Path) -> None:
    places = [place for place in ("unit/v1/nvme", "unit/ops/aio") if (CHECKOUT / "tests" / place).is_dir()]
    assert places, "no tests of the handles in this checkout"
    command = [
        *LAUNCH,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path / 'theirs'}",
        "-m",
        "",
        *places,
    ]
    done = run(command, cwd=CHECKOUT / "tests")
    summary = done.stdout.splitlines()[-1]
    assert done.returncode == 0 and "passed" in summary and "failed" not in summary, done.stdout[-4000:]

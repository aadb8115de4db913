"""DeepSpeed on swapper's engine: unchanged ZeRO trainings of each stage, its checkpoints, and its own tests of its handles.

    tools/setup peers && tools/test tests/io/test_deepspeed.py

The interpreter is .venv-peers', which that makes, or SWAPPER_DEEPSPEED_PYTHON's: one with deepspeed and swapper.
DEEPSPEED_CHECKOUT=/path/to/DeepSpeed, a checkout of its repository, has its own tests run too. What is missing is skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PEERS = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
PYTHON = os.environ.get("SWAPPER_DEEPSPEED_PYTHON") or (str(PEERS) if PEERS.exists() else "")
CHECKOUT = Path(os.environ.get("DEEPSPEED_CHECKOUT", ""))
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
LAUNCH = [PYTHON, "-m", "swapper.integrations.deepspeed"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="no interpreter with deepspeed: tools/setup peers makes one"),
    pytest.mark.timeout(1800),
]


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, **options.pop("variables", {})}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, **options)


@dataclass(frozen=True)
class Training:
    """What a run of zero_training.py printed, and left.

    Attributes:
        losses, again: of each step, by rank: of four, and of the last two after the checkpoint was loaded.
        digests: of all parameters at the end, by rank.
        files: the checkpoint's, by path.
    """

    losses: list[str]
    again: list[str]
    digests: list[str]
    files: dict[str, bytes]

    @classmethod
    def of(
        cls,
        directory: Path,
        configuration: dict[str, Any],
        *,
        by_swapper: bool = True,
        ranks: int = 2,
        renames: bool = False,
    ) -> Training:
        """Run it in a new directory, on swapper's handles or DeepSpeed's own."""
        directory.mkdir()
        done = launched(directory, configuration, by_swapper, ranks, renames)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        words = {
            word: sorted(re.findall(rf"^{word} (.*)$", done.stdout, re.MULTILINE))
            for word in ("loss", "again", "digest", "loaded")
        }
        assert [len(lines) for lines in words.values()] == [4 * ranks, 2 * ranks, ranks, ranks], done.stdout
        assert not any("None" in line for line in words["loaded"])
        files = {
            str(path.relative_to(directory)): path.read_bytes()
            for path in sorted((directory / "checkpoints").rglob("*"))
            if path.suffix in (".pt", ".swp")
        }
        return cls(words["loss"], words["again"], words["digest"], files)


def launched(
    directory: Path, configuration: dict[str, Any], by_swapper: bool = True, ranks: int = 2, renames: bool = False
) -> subprocess.CompletedProcess[str]:
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    script = str(Path(__file__).with_name("zero_training.py"))
    command = [*(LAUNCH if by_swapper else [PYTHON]), *several, script, json.dumps(configuration)]
    variables = {"DS_PIN_MEMORY_BACKEND": "native"} if "checkpoint" in configuration else {}
    return run([*command, *(["RENAMES"] if renames else [])], cwd=directory, variables=variables)


def on_nvme(pipelined: bool = False, parameters: bool = False) -> dict[str, Any]:
    """Return the configuration of stage 3 with its optimizer's state on NVMe, or parameters too."""
    optimizer = {
        "device": "nvme", "nvme_path": ".", "buffer_count": 12 if pipelined else 4,
        "pipeline_read": pipelined, "pipeline_write": pipelined,
    }  # fmt: skip
    found: dict[str, Any] = {"stage": 3, "offload_optimizer": optimizer}
    if parameters:
        found["offload_param"] = {"device": "nvme", "nvme_path": ".", "buffer_size": 300_000, "max_in_cpu": 0}
        found["stage3_param_persistence_threshold"] = 0
    return {"zero_optimization": found}


def writer(kind: str, **options: Any) -> dict[str, Any]:
    """Return the configuration of one of DeepSpeed's writers of checkpoints."""
    return {"checkpoint": {"writer": {"type": kind, "io_buffer_size": 1 << 20, **options}}}


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the training of a stage with nothing on NVMe, which is run once."""
    found: dict[Any, Training] = {}

    def of(stage: int, ranks: int = 2) -> Training:
        if (stage, ranks) not in found:
            directory = tmp_path_factory.mktemp("memory") / "run"
            found[stage, ranks] = Training.of(directory, {"zero_optimization": {"stage": stage}}, ranks=ranks)
        return found[stage, ranks]

    return of


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "pipelined"])
def test_an_unchanged_zero3_training_gives_the_same_losses_from_nvme(
    tmp_path: Path, in_memory: Any, kind: str, ranks: int
) -> None:
    """After it has loaded a checkpoint it goes on as with DeepSpeed's own handle: not as from memory, whichever handle it has."""
    configuration = on_nvme(kind == "pipelined")
    found = Training.of(tmp_path / "swapper", configuration, ranks=ranks)
    theirs = Training.of(tmp_path / "theirs", configuration, by_swapper=False, ranks=ranks)
    assert found.losses == in_memory(3, ranks).losses and found == theirs
    assert len({Path(name).parent for name in found.files if name.endswith(".swp")}) == ranks


def test_parameters_on_nvme_too(tmp_path: Path) -> None:
    """DeepSpeed's own handle gives the same: losses, the checkpoint, and how it goes on after that is loaded."""
    configuration = on_nvme(parameters=True)
    found = Training.of(tmp_path / "swapper", configuration)
    assert list((tmp_path / "swapper" / "zero_stage_3").rglob("bfloat16params/rank1/*"))
    assert found == Training.of(tmp_path / "theirs", configuration, by_swapper=False)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"io_buffer_double": False}, {"decoupled": True}], ids=str)
def test_fast_checkpoints(tmp_path: Path, in_memory: Any, stage: int, options: dict[str, Any]) -> None:
    """Written by handles, on the CPU, where DeepSpeed has no operator for that; read back, the training goes on from it exactly."""
    configuration = {"zero_optimization": {"stage": stage}, **writer("fast", **options)}
    found, expected = Training.of(tmp_path / "run", configuration, renames=stage < 3), in_memory(stage)
    assert (found.losses, found.again, found.digests) == (expected.losses, expected.again, expected.digests)
    assert set(found.again) < set(found.losses) and found.files.keys() == expected.files.keys()


def test_fast_checkpoints_of_state_on_nvme(tmp_path: Path) -> None:
    """Another writer changes nothing of what a swapped training goes on with."""
    found = Training.of(tmp_path / "fast", {**on_nvme(), **writer("fast")})
    plain = Training.of(tmp_path / "plain", on_nvme())
    assert (found.losses, found.again, found.digests) == (plain.losses, plain.again, plain.digests)


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
from deepspeed.ops.op_builder import UtilsBuilder
cast = UtilsBuilder().load().cast_to_byte_tensor
halves = torch.arange(6, dtype=torch.bfloat16)
whole, (first, flag) = cast(halves), cast([halves.view(2, 3), torch.tensor(True)])
halves[0] = 7
assert whole.dtype == first.dtype == torch.uint8 and whole.shape == first.shape == (12,) and flag.tolist() == [1]
assert torch.equal(whole.view(torch.bfloat16), halves) and torch.equal(first, whole)
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

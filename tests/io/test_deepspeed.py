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
FAST = {"DS_PIN_MEMORY_BACKEND": "native", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
"""What DeepSpeed's fast checkpoints need: page-locked memory without a GPU, and, to be loaded, torch.load as before torch 2.6."""
LAUNCH = [PYTHON, "-m", "swapper.integrations.deepspeed"]

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="no interpreter with deepspeed: tools/setup peers makes one"),
    pytest.mark.timeout(1800),
]


needs_their_operator = pytest.mark.skipif(
    not list(PEERS.parents[1].glob("operators/async_io/*.so")),
    reason="DeepSpeed's own operator for files is not compiled: tools/setup peers does it",
)


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
    variables = FAST if "checkpoint" in configuration else {}
    return run([*command, *(["RENAMES"] if renames else [])], cwd=directory, variables=variables)


def on_nvme(pipelined: bool = False, parameters: bool = False) -> dict[str, Any]:
    """Return the configuration of stage 3 with its optimizer's state on NVMe, or parameters too."""
    optimizer = {
        "device": "nvme", "nvme_path": ".", "buffer_count": 12 if pipelined else 4,
        "pipeline_read": pipelined, "pipeline_write": pipelined,
    }  # fmt: skip
    found: dict[str, Any] = {"stage": 3, "offload_optimizer": optimizer}
    if parameters:
        found["offload_param"] = {
            "device": "nvme",
            "nvme_path": ".",
            "buffer_count": 8,
            "buffer_size": 600_000,
            "max_in_cpu": 0,
        }
        found["stage3_param_persistence_threshold"] = 0
    return {"zero_optimization": found}


def fast_writer(**options: Any) -> dict[str, Any]:
    """Return the configuration of checkpoints that handles write, with buffers that are filled many times."""
    return {
        "checkpoint": {"writer": {"type": "fast", "io_buffer_size": 1 << 20, "data_parallel": "replica", **options}}
    }


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the training of a stage with nothing on NVMe, which is run once."""
    found: dict[Any, Training] = {}

    def of(stage: int, ranks: int = 2) -> Training:
        if (stage, ranks) not in found:
            directory = tmp_path_factory.mktemp("memory") / "run"
            configuration = {"zero_optimization": {"stage": stage}}
            found[stage, ranks] = Training.of(directory, configuration, by_swapper=False, ranks=ranks)
        return found[stage, ranks]

    return of


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "pipelined"])
def test_an_unchanged_zero3_training_gives_the_same_losses_from_nvme(
    tmp_path: Path, in_memory: Any, kind: str, ranks: int
) -> None:
    """It goes back to its checkpoint as well, to which DeepSpeed copies swapped files; not exactly, whatever handle it has."""
    found = Training.of(tmp_path / "run", on_nvme(kind == "pipelined"), ranks=ranks)
    assert found.losses == in_memory(3, ranks).losses
    assert len({Path(name).parent for name in found.files if name.endswith(".swp")}) == ranks


def test_parameters_on_nvme_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has 1 MiB of each, the least that DeepSpeed puts there."""
    monkeypatch.setitem(ENVIRONMENT, "ZERO_TRAINING_WIDTH", "1024")
    found = Training.of(tmp_path / "run", on_nvme(parameters=True))
    assert found.losses == Training.of(tmp_path / "memory", {"zero_optimization": {"stage": 3}}).losses
    assert all(list((tmp_path / "run").glob(f"zero_stage_3/bfloat16params/rank{rank}/*")) for rank in range(2))


@needs_their_operator
def test_all_is_as_with_deepspeeds_own_handle(tmp_path: Path) -> None:
    """The losses, also those after a checkpoint was loaded, and the parameters in the end."""
    found, theirs = (
        Training.of(tmp_path / str(by_swapper), on_nvme(), by_swapper=by_swapper) for by_swapper in (True, False)
    )
    assert (found.losses, found.again, found.digests) == (theirs.losses, theirs.again, theirs.digests)
    assert found.files.keys() == theirs.files.keys()


@pytest.mark.parametrize("options", [{}, {"io_buffer_double": False}], ids=["two buffers", "one buffer"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fast_checkpoints(tmp_path: Path, in_memory: Any, stage: int, options: dict[str, Any]) -> None:
    """Handles write them; on the CPU DeepSpeed has no operator for that. The training goes on from them exactly."""
    configuration = {"zero_optimization": {"stage": stage}, **fast_writer(**options)}
    found, expected = Training.of(tmp_path / "run", configuration, renames=stage < 3), in_memory(stage)
    assert (found.losses, found.again, found.digests) == (expected.losses, expected.again, expected.digests)
    assert set(found.again) < set(found.losses) and found.files.keys() == expected.files.keys()


def test_fast_checkpoints_of_state_on_nvme(tmp_path: Path) -> None:
    """Another writer changes nothing of what a swapped training goes on with."""
    fast = Training.of(tmp_path / "fast", {**on_nvme(), **fast_writer()})
    plain = Training.of(tmp_path / "plain", on_nvme())
    assert (fast.losses, fast.again, fast.digests) == (plain.losses, plain.again, plain.digests)


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_puts_nothing_of_stages_1_and_2_on_nvme(tmp_path: Path, in_memory: Any, stage: int) -> None:
    """It takes the option, and says nothing."""
    found = Training.of(tmp_path / "run", {"zero_optimization": {**on_nvme()["zero_optimization"], "stage": stage}})
    assert found.losses == in_memory(stage).losses
    assert not list((tmp_path / "run").rglob("*.swp"))


@pytest.mark.parametrize(
    "options, error",
    [
        ({"data_parallel": None}, "'UniversalParallelInfo' object has no attribute 'dp_rank'"),
        ({"decoupled": True}, "Cowardly refusing to serialize non-leaf tensor"),
    ],
    ids=str,
)
def test_what_fails_in_deepspeed_itself(tmp_path: Path, options: dict[str, Any], error: str) -> None:
    """As docs/reference/handles.md says: if this fails because it works by now, say so there."""
    configuration = {"zero_optimization": {"stage": 1}, **fast_writer(**options)}
    done = launched(tmp_path, configuration)
    assert done.returncode != 0 and error in done.stderr, done.stderr[-3000:]


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
from swapper.io.drives import Tuning
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


def test_gpu_check_measures_zero_beside_swapper(tmp_path: Path) -> None:
    tool = PEERS.parents[2] / "tools" / "gpu_check"
    options = ["--rehearse", "--no-build", "--directory", str(tmp_path), "--json", str(tmp_path / "rows.json")]
    ran = run([PYTHON, str(tool), *options, "--only", "zero-2", "zero-3"])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["rehearsed"] * 4
    assert all("losses equal" in row["number"] and "DeepSpeed" in row["number"] for row in rows)

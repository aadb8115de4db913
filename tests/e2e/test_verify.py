"""`swapper verify`: what is whole passes, and each fault is found and named."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import swapper
from e2e import corrupted, killed_run
from swapper.cli import app
from swapper.durability.commit import read_commit
from swapper.durability.verify import Fault, verify
from swapper.formats.container import MANIFEST_NAME


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run that was closed, and its snapshot whole.pt."""
    directory = tmp_path_factory.mktemp("verified")
    corrupted.make_snapshot(directory).chmod(0o600)
    gc.collect()  # the run: what other tests find would not be their own
    return directory


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "copy")
    return tmp_path / "copy"


def flip(path: Path, offset: int) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def faults(path: Path) -> list[Fault]:
    return [fault for report in verify(path) for fault in report.faults]


def test_a_whole_snapshot_and_a_whole_run_pass(directory: Path) -> None:
    seen: list[tuple[int, int]] = []
    (report,) = verify(directory / "whole.pt", lambda done, total: seen.append((done, total)))
    assert report.faults == []
    assert report.checked_bytes == (directory / "whole.pt").stat().st_size
    assert seen[-1] == (report.checked_bytes, report.checked_bytes)
    assert faults(directory) == faults(directory / "rank-0-of-1") == []


def test_torch_and_unzip_accept_a_sealed_file(directory: Path) -> None:
    path = directory / "whole.pt"
    for options in ({"mmap": True}, {"weights_only": False}):
        assert torch.load(path, **options)["extra"] == {"note": "of a test"}
    with torch.utils.serialization.config.patch("load.calculate_storage_offsets", True):
        torch.load(path, mmap=True)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert any(name.endswith(MANIFEST_NAME) for name in archive.namelist())
    if shutil.which("unzip") is None:
        pytest.skip("unzip is not installed")
    assert subprocess.run(["unzip", "-t", "-qq", str(path)], capture_output=True, check=False).returncode == 0


def test_a_changed_tensor_is_named_with_record_and_offset(directory: Path) -> None:
    path = directory / "whole.pt"
    weight = torch.load(path, mmap=True)["optimizer"]["state"][3]["exp_avg"]
    content = path.read_bytes()
    offset = content.index(weight.numpy().tobytes())
    flip(path, offset + weight.nbytes // 2)
    (fault,) = faults(path)
    assert "3.weight exp_avg" in fault.tensors, fault.tensors
    assert fault.record.startswith("data/")
    assert fault.offset <= offset + weight.nbytes // 2 < fault.offset + fault.nbytes
    assert "CRC-32" in fault.what


@pytest.mark.whole
@pytest.mark.parametrize("kept", [0, 1000, 0.5, 0.999])
def test_a_cut_off_snapshot_is_found(directory: Path, kept: float) -> None:
    path = directory / "whole.pt"
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * kept if isinstance(kept, float) else kept))
    assert "missing or damaged" in faults(path)[0].what


def test_bytes_behind_the_end_are_found(directory: Path) -> None:
    path = directory / "whole.pt"
    with path.open("ab") as file:
        file.write(b"more")
    assert faults(path)


def test_a_lost_block_is_named_in_each_tensor(directory: Path) -> None:
    path = directory / "whole.pt"
    with path.open("r+b") as file:
        file.seek(1 << 20)
        file.write(bytes(1 << 20))
    found = faults(path)
    assert {name for fault in found for name in fault.tensors}
    assert len(found) > 1


def swap_file(directory: Path) -> Path:
    run = directory / "rank-0-of-1"
    record = read_commit(run)
    assert record is not None
    return run / record.files[record.sections[-1].files[0]]


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda run: remove(swap_file(run)), "cannot be opened"),
        (lambda run: cut(swap_file(run)), "cannot be read"),
        (lambda run: flip(swap_file(run), 3 << 20), "CRC-32"),
        (lambda run: flip(swap_file(run), 1), "CRC-32"),  # a header
        (lambda run: flip(run / "rank-0-of-1" / "commit.pt", 1), "damaged"),
        (lambda run: flip(run / "rank-0-of-1" / "commit.pt", 3000), "damaged"),
        (lambda run: cut(run / "rank-0-of-1" / "commit.pt"), "damaged"),
    ],
)
def test_faults_of_a_run_are_named(directory: Path, harm: Callable[[Path], None], found: str) -> None:
    harm(directory)
    assert found in faults(directory)[0].what


def test_a_flip_in_a_run_names_the_tensor(directory: Path) -> None:
    flip(swap_file(directory), 3 << 20)
    assert any(name.endswith(("exp_avg", "exp_avg_sq", "weight")) for name in faults(directory)[0].tensors)


def test_a_run_in_use_is_left_alone(directory: Path) -> None:
    with swapper.SwapManager(directory, host_memory=killed_run.BUDGET, resume="auto"):
        with pytest.raises(swapper.CheckpointError, match="in use"):
            verify(directory)


def test_any_torch_checkpoint_is_checked_by_its_crcs(tmp_path: Path) -> None:
    path = tmp_path / "plain.pt"
    weight = torch.randn(1000, 1000)
    torch.save({"weight": weight}, path)
    assert faults(path) == []
    flip(path, path.read_bytes().index(weight.numpy().tobytes()) + 12345)
    assert "data/0" in faults(path)[0].record


def test_the_command_says_it_in_words_json_and_exit_codes(directory: Path) -> None:
    runner = CliRunner()
    path = directory / "whole.pt"
    done = runner.invoke(app, ["verify", str(path)])
    assert done.exit_code == 0 and "every byte" in done.output
    flip(path, 2 << 20)
    done = runner.invoke(app, ["verify", str(path)])
    assert done.exit_code == 1 and "corrupt:" in done.output
    done = runner.invoke(app, ["verify", str(path), "--json"])
    (report,) = json.loads(done.stdout)
    assert done.exit_code == 1
    assert report["faults"][0]["offset"] <= 2 << 20
    done = runner.invoke(app, ["verify", str(directory / "missing.pt")])
    assert done.exit_code == 2 and "does not exist" in done.output

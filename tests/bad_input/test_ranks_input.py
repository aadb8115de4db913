"""Arguments of ranks that do not go together are named on every rank, before anything has begun."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from e2e import ranks_run
from e2e.models import Net
from e2e.processes import run_python
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import swapper
from swapper.durability import directory
from swapper.options import parse_host_memory

CASES: dict[str, tuple[list[str], str, list[str]]] = {  # orders, the error on every rank, and what it says
    "model": (
        ["sharded", "depth=1:2"],
        "ConfigError",
        ["different models", "rank 0 has ", "and rank 1 has blocks.1.", "Build the same model"],
    ),
    "policy of fully_shard": (
        ["sharded", "policy=1:bfloat16"],
        "ConfigError",
        ["different fully_shard calls", "param_dtype=None", "param_dtype=torch.bfloat16", "with the same options"],
    ),
    "what stays gathered": (
        ["sharded", "stays=1"],
        "ConfigError",
        ["different fully_shard calls", "reshard_after_forward=True", "reshard_after_forward=False"],
    ),
    "modules of fully_shard": (
        ["sharded", "depth=2", "sharding=1:1"],
        "ConfigError",
        [
            "different fully_shard calls",
            "and rank 1 has embedding.weight, position.table, blocks.1.",
            "on the same modules of all ranks",
        ],
    ),
    "optimizer's class": (
        ["sharded", "optimizer=1:SGD"],
        "ConfigError",
        ["different optimizers", "adamw.AdamW", "sgd.SGD"],
    ),
    "optimizer's settings": (
        ["lr=1:0.5"],
        "ConfigError",
        ["different optimizers", "lr=0.001 in group 0, and rank 1 has lr=0.5 in group 0", "the same settings"],
    ),
    "optimizer of whole matrices": (
        ["sharded", "optimizer=Muon"],
        "UnsupportedError",
        ["Muon does not treat each element by itself", "use an elementwise optimizer", "or DistributedDataParallel"],
    ),
    "update time": (["update=1:deferred"], "ConfigError", ["update='step', and rank 1 has update='deferred'"]),
    "codec of the state": (
        ["sharded", "codec=1:8bit"],
        "ConfigError",
        ["state_codec='exact', and rank 1 has state_codec='8bit'", "Pass the same to manager.offload on all ranks"],
    ),
    "master weights": (
        ["dtype=bfloat16", "masters=1:float32"],
        "ConfigError",
        ["master_weights=None, and rank 1 has master_weights=torch.float32"],
    ),
    "version": (
        ["version=1:9.9"],
        "ConfigError",
        ["different versions", "rank 1: swapper 9.9, torch", "Install the same"],
    ),
    "a bad option on one": (["memory=1:many"], "Error", ["host_memory='many' is not a size"]),
    "a part of a machine whose ranks are not together": (
        ["memory=1GiB/node", "ranks=alone"],
        "ConfigError",
        ["LOCAL_WORLD_SIZE", "torchrun"],
    ),
    "a part of a machine": (["sharded", "memory=128KiB/node"], "BudgetError", ["host_memory=64.0 KiB is too small"]),
    "a rank without a drive": (
        ["sharded", "drive=1:/none/here"],
        "Error",
        ["/none/here lies beneath /none, which does not exist", "mkdir -p"],
    ),
    "a file for a drive": (["sharded", "drive=1:/etc/passwd"], "Error", ["/etc/passwd is not a directory"]),
    "budget": (["sharded", "memory=1:64KiB"], "Error", ["host_memory=64.0 KiB is too small"]),
}


def launch(directory: Path, *orders: str) -> list[str]:
    done = run_python(Path(ranks_run.__file__), directory, 2, *orders)
    assert done.returncode != 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_go_together_is_named_on_every_rank(name: str, tmp_path: Path) -> None:
    orders, kind, texts = CASES[name]
    said = launch(tmp_path, *orders)
    assert len(said) == 2
    for line in said:
        assert kind in line
        for text in texts:
            assert text in line, line
    assert [path for path in tmp_path.rglob("*") if path.suffix in (".swap", ".pt")] == []


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files: a model; a copy of it; and the same model trained a little more."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)  # as ranks_run.py's
    values = Net(depth=1).state_dict()
    torch.save(values, folder / "one.pt")
    (folder / "elsewhere").mkdir()
    shutil.copy(folder / "one.pt", folder / "elsewhere" / "copy.pt")
    torch.save({name: value + 1e-3 for name, value in values.items()}, folder / "later.pt")
    return folder


VALUES: dict[str, tuple[list[str], list[str]]] = {  # orders, and what the error says
    "another checkpoint": (
        ["meta", "init={0}/one.pt", "init=1:{0}/later.pt"],
        [
            "rank 0 has embedding.weight from a file, torch.float32 [512, 128], sample ",
            "and rank 1 has embedding.weight from a file, torch.float32 [512, 128], sample ",
            ", init='{0}/one.pt', and rank 1",
            ", init='{0}/later.pt'. Pass",
        ],
    ),
    "another file of frozen parameters": (
        ["meta", "frozen", "init={0}/one.pt", "external={0}/one.pt", "external=1:{0}/later.pt"],
        ["rank 0 has blocks.0.norm.weight from a file", "external='{0}/one.pt'", "external='{0}/later.pt'"],
    ),
    "values on one rank": (
        ["init=1:{0}/one.pt"],
        [
            "rank 0 has embedding.weight from the model as it is, and rank 1 ",
            "has embedding.weight from a file",
        ],
    ),
    "another function": (
        ["meta", "init=ones_", "init=1:zeros_"],
        ["rank 0 has embedding.weight from the function __main__.ones_, and rank 1", "__main__.zeros_"],
    ),
    "a function for a checkpoint": (
        ["meta", "init=ones_", "init=1:{0}/one.pt"],
        ["from the function ", "and rank 1 has embedding.weight from a file"],
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_are_not_the_same_are_named_on_every_rank(name: str, tmp_path: Path, checkpoints: Path) -> None:
    orders, texts = VALUES[name]
    for line in launch(tmp_path, "sharded", *(order.format(checkpoints) for order in orders)):
        assert "ConfigError: ranks give different initial values to manager.offload: " in line
        for text in (*texts, "Pass the same init= and external= on all ranks, or copies of the same files"):
            assert text.format(checkpoints) in line, line
    assert not list(tmp_path.rglob("*.swap"))


def test_copies_of_the_same_files_are_taken_and_a_resumed_run_needs_no_values(
    tmp_path: Path, checkpoints: Path
) -> None:
    one, copy = checkpoints / "one.pt", checkpoints / "elsewhere" / "copy.pt"
    orders = ["sharded", "meta", "frozen", f"init={one}", f"init=1:{copy}", f"external={copy}", f"external=1:{one}"]
    for begun in range(2):
        again = [f"init=0:{checkpoints / 'later.pt'}"] if begun else []
        done = run_python(Path(ranks_run.__file__), tmp_path, 2, *orders, *again, "steps=1", "every=1")
        assert sorted(done.stdout.splitlines()) == [
            f"rank {rank}: began at {begun}, ended at {begun + 1}" for rank in range(2)
        ], done.stderr


def test_frozen_parameters_may_be_in_a_file_on_one_rank_and_copied_on_another(
    tmp_path: Path, checkpoints: Path
) -> None:
    """The file has the model's values: they were compared."""
    orders = ["sharded", "frozen", f"external=1:{checkpoints / 'one.pt'}", "steps=1"]
    done = run_python(Path(ranks_run.__file__), tmp_path, 2, *orders)
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: began at 0, ended at 1" for rank in range(2)]


def test_what_may_differ_is_taken(tmp_path: Path) -> None:
    """Where bytes lie changes none of them."""
    done = run_python(
        Path(ranks_run.__file__), tmp_path, 2, "sharded", "memory=1:24MiB", "steps=2", "every=1", "params=1:host"
    )
    assert sorted(done.stdout.splitlines()) == ["rank 0: began at 0, ended at 2", "rank 1: began at 0, ended at 2"]


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    (said,) = launch(tmp_path, "absent=1", "timeout=2")
    assert "rank 0: StateError: rank 1 of 2 did not arrive at the making of a SwapManager" in said
    assert list(tmp_path.iterdir()) == []


def test_two_processes_that_do_not_know_of_each_other_are_refused_one_directory(tmp_path: Path) -> None:
    with swapper.SwapManager(tmp_path, host_memory="16MiB"):
        (said,) = (
            line
            for line in run_python(Path(ranks_run.__file__), tmp_path, 1, "plain").stdout.splitlines()
            if "rank" in line
        )
    assert "DirectoryError" in said and "in use by another run (process" in said


def test_a_network_file_system_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one of this test is in memory, and passes for one."""
    here = Path("/dev/shm") / tmp_path.name
    monkeypatch.setattr(directory, "OVER_NETWORK", {"tmpfs"})
    with caplog.at_level(logging.WARNING, "swapper"), swapper.SwapManager(here, host_memory="16MiB"):
        pass
    for path in sorted(here.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    here.rmdir()
    assert f"{here}/rank-0-of-1 is on a network file system" in caplog.text
    caplog.clear()
    with swapper.SwapManager(tmp_path, host_memory="16MiB"):
        pass
    assert "network" not in caplog.text


def test_each_rank_tells_of_a_network_file_system_before_anything_begins(tmp_path: Path) -> None:
    """And of all that may be meant to be there: with a budget that is too small nothing is begun either."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as there:
        done = run_python(Path(ranks_run.__file__), there, 2, "sharded", "network", "memory=64KiB")
        assert sorted(path.name for path in Path(there).glob("*/*")) == ["lock", "lock"]
    for rank in range(2):
        assert f"{there}/rank-{rank}-of-2 is on a network file system, and every step reads" in done.stderr
    assert done.stdout.count("BudgetError") == 2


def test_a_number_of_ranks_that_divides_nothing_is_taken(tmp_path: Path) -> None:
    """Three ranks have 171, 171 and 170 of 512 rows; what the plan names is what each needs."""
    done = run_python(Path(ranks_run.__file__), tmp_path, 3, "sharded", "memory=16MiB", "steps=1")
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: began at 0, ended at 1" for rank in range(3)]


def test_the_memory_of_a_machine_is_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert parse_host_memory("64GiB/node") == 8 << 30
    assert parse_host_memory("1GiB") == 1 << 30
    for wrong in ("64/nodes", "much/node", "-1GiB/node", "/node"):
        with pytest.raises(swapper.ConfigError, match="is not a size"):
            parse_host_memory(wrong)
    for ranks in ("", "0", "many"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        with pytest.raises(swapper.ConfigError, match=f"LOCAL_WORLD_SIZE={ranks} does not tell .*torchrun"):
            parse_host_memory("64GiB/node")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(swapper.ConfigError, match=r"torchrun, which sets it, .* or give each rank its own part"):
        parse_host_memory("64GiB/node")
    assert parse_host_memory("64GiB/node", ranks_here=2) == 32 << 30


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("keeps_parameters", [False, True])
@pytest.mark.parametrize("is_inner", [False, True], ids=["as it is", "the module in it, as Lightning's"])
def test_flat_tensors_of_the_first_fsdp_are_refused(
    tmp_path: Path, one_rank: None, keeps_parameters: bool, is_inner: bool
) -> None:
    flat = FullyShardedDataParallel(
        torch.nn.Linear(64, 64), device_id=torch.device("cpu"), use_orig_params=keeps_parameters
    )
    model = flat.module if is_inner else flat
    with swapper.SwapManager(tmp_path, "8MiB") as manager:
        with pytest.raises(
            swapper.UnsupportedError, match=r"FullyShardedDataParallel.*fully_shard.*ModelParallelStrategy"
        ):
            manager.offload(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_model_around_one_that_is_sharded_is_refused(tmp_path: Path, one_rank: None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    with swapper.SwapManager(tmp_path, "8MiB") as manager:
        with pytest.raises(
            swapper.UnsupportedError, match=r"0\.weight is a DTensor.*given Sequential.*call it on this one"
        ):
            manager.offload(model, torch.optim.SGD(model.parameters(), lr=0.1))

"""FSDP2's shards on NVMe, in the smallest budget: losses, shards and state bit-equal to plain FSDP2's."""

from __future__ import annotations

import os
import pickle
import random
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from infer.host_device import ORDERS, HostDevice
from numa import may_choose_nodes, policies
from sampling import runs_a_sample
from torch.distributed.fsdp import fully_shard

import swapper
from e2e import fsdp_open_step, fsdp_run, fsdp_snapshot, fsdp_tensor_parallel, fsdp_unfrozen, replicated_run
from e2e.device_twins import used
from e2e.processes import run_python
from e2e.twins import named_budget
from swapper.device.device import Device
from swapper.train.sharded.shards import param_groups_of

__all__ = ["used"]


def torchrun(ranks: int, program: ModuleType, *arguments: object, **variables: str) -> list[str]:
    """Run `program` in each rank, with `variables` in the environment; return what they have said."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    done = run_python(*launcher, Path(program.__file__ or ""), *arguments, **variables)
    assert done.returncode == 0, done.stderr[-6000:]
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))


def run(directory: Path, ranks: int, cases: list[str], update: str, **variables: str) -> None:
    cases = [case for case in cases if update != "backward" or "clip" not in fsdp_run.CASES[case]]
    said = torchrun(ranks, fsdp_run, directory, update, *cases, **variables)
    assert said == sorted(f"rank {rank}, {case}: same" for rank in range(ranks) for case in cases)


def some_loops(number: int) -> list[str]:
    """Return that many, others with each commit, and never "plain"."""
    return random.Random(os.environ.get("SWAPPER_TEST_SEED")).sample(sorted(fsdp_run.CASES.keys() - {"plain"}), number)


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_two_ranks_train_load_and_go_on(tmp_path: Path, update: str) -> None:
    run(tmp_path, 2, ["plain", *some_loops(1)], update)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_of_ranks_is_predicted_which_changes_nothing(tmp_path: Path, ranks: int) -> None:
    run(tmp_path, ranks, ["bf16 compute"], "step")


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_loop(tmp_path: Path, ranks: int, update: str) -> None:
    run(tmp_path, ranks, some_loops(3) if runs_a_sample() else list(fsdp_run.CASES), update)


@pytest.mark.gpu
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_shards_of_models_on_accelerators(tmp_path: Path, update: str) -> None:
    """Each rank computes on a device of its own, with gloo. The plain model's shards are in host memory by CPUOffloadPolicy."""
    if torch.cuda.device_count() < 2:
        pytest.skip("it needs two devices")
    run(tmp_path, 2, ["plain", *some_loops(2)], update, FSDP_RUN_DEVICE="cuda")
    if update == "deferred":
        looks = ["shown", "changed by to_local", "state of all", "loaded"]  # gradients have left the device
        said = torchrun(2, fsdp_open_step, tmp_path / "looks", *looks, FSDP_RUN_DEVICE="cuda")
        assert said == [f"rank {rank}: same" for rank in range(2)]


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_update_on_a_device_what_they_gather_from_host_memory(tmp_path: Path, ranks: int, update: str) -> None:
    """The device is one of host memory whose copies come late; gradients go there from a mesh of CPUs."""
    order = random.Random(os.environ.get("SWAPPER_TEST_SEED")).choice(ORDERS)
    cases = ["plain", *some_loops(2)] if runs_a_sample() else list(fsdp_run.CASES)
    run(tmp_path, ranks, cases, update, FSDP_RUN_UPDATES=order)


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_shards_of_tensors_that_are_split_already(tmp_path: Path, update: str) -> None:
    """FSDP2 over tensor parallelism, on a mesh of 2 x 2."""
    assert torchrun(4, fsdp_tensor_parallel, tmp_path, update) == [f"rank {rank}: same" for rank in range(4)]
    if update == "step":
        said = torchrun(2, fsdp_tensor_parallel, tmp_path, "reshard")
        assert len(said) == 2 and all("tensor parallelism cannot be resharded" in line for line in said), said


def test_composable_replicas_of_ddp_are_exact_or_refused(tmp_path: Path) -> None:
    assert torchrun(2, replicated_run, tmp_path) == [f"rank {rank}: same" for rank in range(2)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_whoever_looks_while_a_deferred_step_is_open_sees_what_plain_torch_has(tmp_path: Path, ranks: int) -> None:
    looks = (
        random.Random(os.environ.get("SWAPPER_TEST_SEED")).sample(list(fsdp_open_step.LOOKS), 8)
        if runs_a_sample()
        else []
    )
    assert torchrun(ranks, fsdp_open_step, tmp_path, *looks) == [f"rank {rank}: same" for rank in range(ranks)]


def test_more_is_trained_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    said = torchrun(2, fsdp_unfrozen, tmp_path)
    first, second = ([line for line in said if line.startswith(f"rank {rank}: ")] for rank in range(2))
    assert len(first) == len(second) == 6, said
    for reason, count in (
        ("has a gradient", 2),
        ("lr=0.02 in group 0", 2),
        ("File too large", 4),
        (": same", 2),
        (": loaded", 2),
    ):
        assert sum(reason in line for line in said) == count, said
    assert sum(line.startswith("rank 1: StateError: a sharded model") for line in said) == 1
    assert sum("rank 0: StateError: another rank could not train more" in line for line in said) == 3


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"master_weights": torch.float32}, "master_weights"),
        ({"params": "device", "device": HostDevice(), "device_memory": "32MiB"}, "params='device'"),
        ({"gradients": "device", "device": HostDevice(), "device_memory": "32MiB"}, "gradients='device'"),
    ],
    ids=["masters", "params", "gradients"],
)
def test_what_is_not_done_yet_is_refused_by_name(
    tmp_path: Path, alone: None, options: dict[str, object], named: str
) -> None:
    model, optimizer = fsdp_run.make({})
    with (
        swapper.SwapManager(tmp_path, host_memory="64MiB") as manager,
        pytest.raises(swapper.UnsupportedError, match=named),
    ):
        manager.offload(model, optimizer, **options)


@pytest.mark.whole
@pytest.mark.parametrize(
    "part", ["FSDPParamGroup._all_gather_result", "FSDPParamGroup.wait_for_unshard", "FSDPParam._orig_size"]
)
def test_what_another_version_of_torch_lacks_is_named(
    tmp_path: Path, alone: None, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = part.split(".")
    model, optimizer = fsdp_run.make({})
    (group, *_) = param_groups_of(model)
    owners = {"FSDPParamGroup": type(group), "FSDPParam": type(group.fsdp_params[0])}
    monkeypatch.setattr(owners[owner], name, property(lambda _: getattr(None, name)), raising=False)
    with (
        swapper.SwapManager(tmp_path, host_memory="64MiB") as manager,
        pytest.raises(
            swapper.UnsupportedError, match=f"torch {re.escape(torch.__version__)} has no {part}, which swapper uses"
        ),
    ):
        manager.offload(model, optimizer)


def test_a_model_on_meta_without_values_is_refused(tmp_path: Path, alone: None) -> None:
    model, optimizer = fsdp_run.make({}, is_meta=True)
    with (
        swapper.SwapManager(tmp_path, host_memory="64MiB") as manager,
        pytest.raises(swapper.UnsupportedError, match=r"embedding.weight is on the meta device.*init="),
    ):
        manager.offload(model, optimizer)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_part_that_is_sharded_in_a_model_that_is_not_is_refused(tmp_path: Path, alone: None) -> None:
    model = fsdp_run.Model()
    torch.distributed.fsdp.fully_shard(model.blocks[0], mesh=fsdp_run.mesh_of({}))
    with (
        swapper.SwapManager(tmp_path, host_memory="64MiB") as manager,
        pytest.raises(swapper.UnsupportedError, match=r"blocks.0|fully_shard"),
    ):
        manager.offload(model, fsdp_run.adamw(model))


@pytest.mark.whole
@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.Muon])
def test_a_matrix_optimizer_is_refused(tmp_path: Path, alone: None, optimizer: type[torch.optim.Optimizer]) -> None:
    model = fully_shard(torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3))))
    with (
        swapper.SwapManager(tmp_path, host_memory="64MiB") as manager,
        pytest.raises(swapper.UnsupportedError, match=r"elementwise optimizer.*DistributedDataParallel"),
    ):
        manager.offload(model, optimizer(model.parameters()))


def test_after_close_the_model_says_so(tmp_path: Path, alone: None) -> None:
    model, optimizer = fsdp_run.make({})
    manager = swapper.SwapManager(tmp_path, host_memory="64MiB")
    _, paged = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
    fsdp_run.train(model, paged, {}, None, 0)
    manager.close()
    for look in (
        lambda: model(torch.arange(8).view(1, 8)),
        lambda: model.head.weight.full_tensor(),
        lambda: model.head.weight.to_local() + 1,
        lambda: model.head.weight.norm(),
        lambda: model.state_dict()["head.weight"].full_tensor(),
    ):
        with pytest.raises(swapper.StateError, match="manager was closed"):
            look()


def test_a_gradient_on_nvme_refuses_what_needs_its_data(tmp_path: Path, alone: None) -> None:
    model, optimizer = fsdp_run.make({})
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        manager.offload(model, optimizer, params="nvme", optimizer_state="nvme", gradients="nvme")
        fsdp_run.loss_of(model, 0).backward()
        gradient = model.blocks[2].down.weight.grad
        for look in (
            lambda: gradient.to_local(),
            lambda: gradient.full_tensor(),
            lambda: gradient.clone(),
            lambda: gradient.sum(),
            lambda: torch._foreach_add([gradient], 1.0),
            lambda: pickle.dumps(gradient._local_tensor),
        ):
            with pytest.raises(swapper.ColdParameterError, match=r"gradient of blocks.2.down.weight is on NVMe .*clip"):
                look()
        gradient.norm()
        optimizer.zero_grad()
        fsdp_run.loss_of(model, 1).backward()
        with pytest.raises(swapper.ColdParameterError, match="not any more"):
            gradient.norm()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("which", ["given", "another"])
def test_a_step_of_another_optimizer_is_refused(tmp_path: Path, alone: None, which: str) -> None:
    model, optimizer = fsdp_run.make({})
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        model(torch.arange(8).view(1, 8)).sum().backward()
        with pytest.raises(swapper.StateError, match=r"manager\.offload"):
            (optimizer if which == "given" else fsdp_run.adamw(model)).step()


def test_between_backward_and_step_nothing_shows_a_half_done_step(tmp_path: Path, alone: None) -> None:
    plain, plain_optimizer = fsdp_run.make({})
    model, original = fsdp_run.make({})
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        _, optimizer = manager.offload(model, original, params="nvme", optimizer_state="nvme", update="backward")
        head = model.head.weight
        for step in range(2):
            fsdp_run.loss_of(model, step).backward()
            for look in (
                lambda: model(torch.arange(8).view(1, 8)),
                lambda: head.full_tensor(),
                lambda: head.to_local() + 1,
                lambda: head.norm(),
                lambda: head.grad.norm(),
                lambda: head.grad.mul_(2),
                lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
                lambda: model.state_dict()["head.weight"].full_tensor(),
                lambda: optimizer.state_dict(),
                lambda: manager.gather(model).__enter__(),
                lambda: manager.snapshot(tmp_path / "snapshot"),
                lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
                lambda: fsdp_run.loss_of(model, 0).backward(),
            ):
                with pytest.raises(swapper.StateError, match=r"optimizer\.step\(\)|has a gradient"):
                    look()
            optimizer.step()
            optimizer.zero_grad()
            fsdp_run.loss_of(plain, step).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        fsdp_run.same_state(model, optimizer, plain, plain_optimizer, "after looks")


@pytest.mark.usefixtures("alone")
def test_the_plan_counts_ddps_buckets(tmp_path: Path) -> None:
    whole = fsdp_run.Model()
    whole.blocks[1].requires_grad_(False)
    model = torch.nn.parallel.DistributedDataParallel(whole, bucket_cap_mb=1)
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        plan = manager.plan(model, fsdp_run.adamw(model), params="nvme", optimizer_state="nvme")
    buckets = model._get_ddp_logging_data()["bucket_sizes"].split(",")
    assert plan.buffer_bytes == sum(map(int, buckets))
    assert plan.memory["DDP's buckets"] == plan.buffer_bytes and "DDP's buckets" in str(plan)


@pytest.mark.usefixtures("alone")
def test_memory_is_taken_near_the_device_of_the_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 copies from it to there. Here the CPU stands for a device that is attached to the first node."""
    monkeypatch.setattr(Device, "node", property(lambda device: 0 if device.device.type == "cpu" else None))
    model, optimizer = fsdp_run.make({})
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        said, lines = manager.current.run._resources.describe(), policies()
    assert (", on node 0" in said, "node 0 was refused" in said) == (may_choose_nodes(), not may_choose_nodes())
    if lines:
        assert any(" prefer" in line for line in lines.values()) == may_choose_nodes()


@pytest.mark.usefixtures("alone")
def test_a_snapshot_of_one_rank_has_what_torch_saves(tmp_path: Path) -> None:
    """Of more ranks: test_fsdp_ranks.py."""
    fsdp_snapshot.stage(tmp_path, None)
    fsdp_snapshot.damage(tmp_path / "ours-1")


@pytest.mark.whole
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("case", "update"),
    [
        ("on meta, tied, by a function", "deferred"),
        ("on meta, frozen, tied, from a file", "step"),
        ("gradients on NVMe, clipped and accumulated", "step"),
        ("external", "step"),
        ("unfrozen, gradients on NVMe", "deferred"),
    ],
)
def test_a_rank_alone_goes_the_way_of_plain_fsdp2(
    tmp_path: Path, case: str, update: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of all loops, and more ranks: test_every_loop."""
    fsdp_run.run(tmp_path / "run", case, update)
    assert capfd.readouterr().out == f"rank 0, {case}: same\n"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("case", "update"),
    [
        ("plain", "step"),
        ("clipped", "deferred"),
        ("accumulated", "backward"),
        ("gradients on NVMe, clipped and accumulated", "step"),
        ("parameters in host memory", "backward"),
    ],
)
def test_shards_that_are_updated_on_a_device_go_the_way_of_plain_fsdp2(
    tmp_path: Path, case: str, update: str, order: str, capfd: pytest.CaptureFixture[str]
) -> None:
    fsdp_run.run(tmp_path / "run", case, update, order)
    assert capfd.readouterr().out == f"rank 0, {case}: same\n"


@pytest.mark.usefixtures("alone")
def test_state_of_shards_stays_on_a_device(tmp_path: Path) -> None:
    plain, plain_optimizer = fsdp_run.make({})
    model, original = fsdp_run.make({})
    options = {"device": HostDevice("late"), "device_memory": "64MiB", "optimizer_state": "device", "params": "nvme"}
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        _, optimizer = manager.offload(model, original, **options)
        for step in range(3):
            expected = fsdp_run.train(plain, plain_optimizer, {}, None, step)
            fsdp_run.same(fsdp_run.train(model, optimizer, {}, None, step), expected, f"step {step}")
        fsdp_run.same_state(model, optimizer, plain, plain_optimizer, "at the end")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_state_of_shards_goes_up_to_a_device_before_their_gradients_are_there(
    tmp_path: Path, used: list[bool], update: str
) -> None:
    plain, plain_optimizer = fsdp_run.make({})
    model, original = fsdp_run.make({})
    where: Any = {"params": "host", "optimizer_state": "host", "update": update}
    with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
        _, optimizer = manager.offload(model, original, **where, device=HostDevice("late"), device_memory="64MiB")
        for step in range(3):
            expected = fsdp_run.train(plain, plain_optimizer, {}, None, step)
            fsdp_run.same(fsdp_run.train(model, optimizer, {}, None, step), expected, f"step {step}")
        fsdp_run.same_state(model, optimizer, plain, plain_optimizer, "at the end")
    assert any(used)


@pytest.mark.usefixtures("alone")
def test_another_device_than_that_of_the_mesh_is_refused(tmp_path: Path) -> None:
    elsewhere = HostDevice()
    elsewhere.device = torch.device("meta")
    with (
        swapper.SwapManager(tmp_path, host_memory="64MiB") as manager,
        pytest.raises(swapper.DeviceError, match=r"mesh computes on cpu: leave device= out"),
    ):
        manager.offload(*fsdp_run.make({}), device=elsewhere, device_memory="32MiB")


@pytest.mark.usefixtures("alone")
def test_a_step_moves_the_bytes_that_the_prediction_counts(tmp_path: Path) -> None:
    """Of each parameter, where next to nothing stays in memory: tools/predict_ranks counts so."""
    path = Path(__file__).parents[2] / "tools" / "predict_ranks"
    predicted = runpy.run_path(str(path))
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(16)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    places = {"params": "nvme", "optimizer_state": "nvme"}
    with swapper.SwapManager(tmp_path, host_memory=1) as manager:
        with pytest.raises(swapper.BudgetError) as refused:
            manager.plan(model, optimizer, **places)
    with swapper.SwapManager(tmp_path, host_memory=named_budget(refused.value), resume="discard") as manager:
        traffic = manager.plan(model, optimizer, **places).traffic
    found = predicted["predict"](count, 1, predicted["Machine"](nodes=1, gpus=1))
    assert traffic.total_read_bytes == pytest.approx(found.read_bytes, rel=0.1)
    assert traffic.total_written_bytes == pytest.approx(found.written_bytes, rel=0.1)

"""Commits and resume: what was committed is gone on from exactly, and nothing else is."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import swapper
from e2e import killed_ranks, killed_run
from e2e.keywords import for_manager
from e2e.twins import assert_same
from swapper.durability.commit import encode_commit, files_of, publish_commit, read_commit
from swapper.durability.directory import COMMIT_NAME, SPARE_NAME

STEPS = 5


def go(directory: Path, until: int, **options: Any) -> list[float]:
    """Begin or go on with the run in `directory` until step `until`; returns the losses of the steps taken."""
    manager_options = {key: options.pop(key) for key in ("commit_every", "fsync", "host_memory") if key in options}
    manager_options = {"host_memory": killed_run.BUDGET, **manager_options}
    model, optimizer, scheduler = killed_run.make()
    losses = []
    with swapper.SwapManager(directory, resume="auto", **for_manager(manager_options)) as manager:
        placement = {"params": "nvme", "optimizer_state": "nvme", **options}
        model, optimizer = manager.offload(model, optimizer, **placement)
        manager.register(scheduler=scheduler)
        while manager.step < until:
            losses.append(killed_run.train_step(model, optimizer, scheduler, manager.step))
    return losses


def test_a_closed_run_goes_on_exactly_with_its_scheduler(tmp_path: Path) -> None:
    assert go(tmp_path, 2) + go(tmp_path, 4) + go(tmp_path, STEPS) == killed_run.plain_losses(STEPS)


def test_commits_remove_no_file(tmp_path: Path) -> None:
    """A filesystem that discards what is freed at once makes each removal wait for the drive."""
    names = [tmp_path / "rank-0-of-1" / name for name in (COMMIT_NAME, SPARE_NAME)]
    with contextlib.ExitStack() as stack:  # of open files, whose numbers no others get
        found = []
        for step in range(1, STEPS):
            go(tmp_path, step)
            found.append({os.fstat(stack.enter_context(path.open("rb")).fileno()).st_ino for path in names})
    assert found == [found[0]] * (STEPS - 1) and len(found[0]) == 2


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: (step + 1) / 10),
    "warmup": lambda optimizer: LinearLR(optimizer, 0.1, total_iters=8),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 1e-2, total_steps=20),  # changes the betas too
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 10)], [2]
    ),
}


def settings_of_a_run(
    directory: Path,
    make: Callable[[torch.optim.Optimizer], Any],
    rate: Any,
    ends: tuple[int, ...],
    wrap: Callable[[Any, Any], Any] = lambda scheduler, optimizer: scheduler,
) -> list[Any]:
    """Stop and resume a run at each of `ends`; return each step's loss, rate and betas."""
    found = []
    for end in ends:
        model, optimizer, _ = killed_run.make()
        for group in optimizer.param_groups:
            group["lr"] = copy.deepcopy(rate)
        with swapper.SwapManager(directory, host_memory=killed_run.BUDGET, resume="auto") as manager:
            model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
            scheduler = make(optimizer)  # as the guides say: after offload
            manager.register(scheduler=wrap(scheduler, optimizer))
            while manager.step < end:
                settings = [(float(group["lr"]), group["betas"]) for group in optimizer.param_groups]
                found.append((settings, killed_run.train_step(model, optimizer, scheduler, manager.step)))
    return found


@pytest.mark.parametrize(
    ("scheduler", "rate"), [*((name, 1e-3) for name in SCHEDULERS), ("lambda", torch.tensor(1e-3))]
)
def test_a_scheduler_that_is_made_after_offload_goes_on_with_its_rate(
    tmp_path: Path, scheduler: str, rate: Any
) -> None:
    """Its constructor sets the optimizer's rate, and betas, to those of a first step."""
    make = SCHEDULERS[scheduler]
    assert settings_of_a_run(tmp_path / "parts", make, rate, (2, 4, 6)) == settings_of_a_run(
        tmp_path / "one", make, rate, (6,)
    )


def test_a_scheduler_of_accelerate_goes_on_with_its_rate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)  # its optimizer asks for its state

    def wrap(scheduler: Any, optimizer: Any) -> Any:
        return accelerate.scheduler.AcceleratedScheduler(
            scheduler, accelerate.optimizer.AcceleratedOptimizer(optimizer)
        )

    make = SCHEDULERS["lambda"]
    whole = settings_of_a_run(tmp_path / "one", make, 1e-3, (6,))
    assert settings_of_a_run(tmp_path / "parts", make, 1e-3, (3, 6), wrap) == whole


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("gathers", [False, True])
def test_a_registered_average_goes_on_with_the_update_of_the_last_step(
    tmp_path: Path, update: str, gathers: bool
) -> None:
    """Its update reads the parameters, the first use of them after the step, and belongs to the step all the same."""

    def go(directory: Path, ends: tuple[int, ...]) -> dict[str, torch.Tensor]:
        for end in ends:
            model, optimizer, scheduler = killed_run.make()
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
            with swapper.SwapManager(directory, host_memory=killed_run.BUDGET, resume="auto") as manager:
                model, optimizer = manager.offload(
                    model, optimizer, params="nvme", optimizer_state="nvme", update=update
                )
                manager.register(scheduler=scheduler, average=average)
                while manager.step < end:
                    killed_run.train_step(model, optimizer, scheduler, manager.step)
                    with manager.gather(model) if gathers else contextlib.nullcontext():
                        average.update_parameters(model)
        return {name: value.clone() for name, value in average.state_dict().items()}

    expected = go(tmp_path / "one", (4,))
    actual = go(tmp_path / "parts", (1, 2, 4))
    assert actual["n_averaged"] == 4
    assert_same(actual, expected)


def take_snapshot(manager: swapper.SwapManager, directory: Path) -> None:
    manager.snapshot(directory / "snapshot.pt")


def wait_for_snapshot(manager: swapper.SwapManager, directory: Path) -> None:
    manager.snapshot(directory / "snapshot.pt").wait()


def wait_for_two(manager: swapper.SwapManager, directory: Path) -> None:
    wait_for_snapshot(manager, directory)
    manager.extra["position"] = 2
    manager.snapshot(directory / "second.pt").wait()


def park(manager: swapper.SwapManager, directory: Path) -> None:
    with manager.parked():
        pass


EARLY = {
    "a snapshot": take_snapshot,
    "a snapshot, waited for": wait_for_snapshot,
    "two snapshots": wait_for_two,
    "parking": park,
    "nothing": lambda *_: None,
}


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed in the next forward"])
@pytest.mark.parametrize("early", EARLY)
def test_what_a_script_changes_after_an_early_commit_belongs_to_its_step(
    tmp_path: Path, early: str, is_closed: bool
) -> None:
    def begin(manager: swapper.SwapManager) -> tuple[Any, Any, Any]:
        model, optimizer, scheduler = killed_run.make()
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        manager.register(scheduler=scheduler)
        return model, optimizer, scheduler

    with swapper.SwapManager(tmp_path / "run", host_memory=killed_run.BUDGET) as manager:
        model, optimizer, scheduler = begin(manager)
        for _ in range(2):
            killed_run.train_step(model, optimizer, scheduler, manager.step)
        EARLY[early](manager, tmp_path)
        scheduler.step()
        optimizer.param_groups[0]["weight_decay"] = 0.5
        manager.extra["position"] = 3
        rate = optimizer.param_groups[0]["lr"]
        if not is_closed:
            while read_commit(tmp_path / "run" / "rank-0-of-1").extra != manager.extra:  # its writes are under way
                model(killed_run.batch(2))
            shutil.copytree(tmp_path / "run", tmp_path / "killed")
    place = tmp_path / ("run" if is_closed else "killed")
    with swapper.SwapManager(place, host_memory=killed_run.BUDGET, resume="auto") as manager:
        model, optimizer, scheduler = begin(manager)
        assert (manager.step, scheduler.last_epoch, manager.extra) == (2, 3, {"position": 3})
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (rate, 0.5)


def end_after_a_snapshot(directory: Path, change: str) -> None:
    """Train one of two ranks. After the snapshot all set another rate, or the first one alone something of its own."""
    model = nn.Linear(64, 64)
    options = {"host_memory": killed_run.BUDGET, "commits": swapper.CommitPolicy(every=2)}
    with swapper.SwapManager(directory / "run", resume="auto", **options) as manager:
        _, optimizer = manager.offload(model, torch.optim.SGD(model.parameters(), lr=1.0), params="nvme")
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        manager.snapshot(directory / "snapshot.pt").wait()
        if change == "the rate":
            optimizer.param_groups[0]["lr"] = 0.5
        elif dist.get_rank() == 0:
            manager.extra["mine"] = 1


def assert_goes_on(directory: Path, change: str) -> None:
    model = nn.Linear(64, 64)
    with swapper.SwapManager(directory / "run", host_memory=killed_run.BUDGET, resume="auto") as manager:
        _, optimizer = manager.offload(model, torch.optim.SGD(model.parameters(), lr=1.0), params="nvme")
        expected = {"mine": 1} if change != "the rate" and dist.get_rank() == 0 else {}
        assert (manager.step, manager.extra) == (3, expected)
        assert optimizer.param_groups[0]["lr"] == (0.5 if change == "the rate" else 1.0)


@pytest.mark.parametrize("change", ["the rate", "one rank's own"])
def test_what_ranks_change_after_a_snapshot_is_committed_by_closing(tmp_path: Path, change: str) -> None:
    for number, work in enumerate((end_after_a_snapshot, assert_goes_on)):
        assert killed_ranks.launch(2, tmp_path / f"meeting-{number}", lambda w=work: w(tmp_path, change)) == [0, 0]


@pytest.mark.parametrize("is_again", [False, True])
def test_a_step_that_is_committed_again_keeps_the_commit_before_its_snapshot(tmp_path: Path, is_again: bool) -> None:
    """Which may be a second name of the swap file: somebody changes it."""
    model, optimizer, scheduler = killed_run.make()
    with swapper.SwapManager(tmp_path / "run", host_memory=killed_run.BUDGET) as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        losses = [killed_run.train_step(model, optimizer, scheduler, number) for number in range(2)]
        wait_for_snapshot(manager, tmp_path)
        if is_again:
            manager.extra["position"] = 3
    record = read_commit(tmp_path / "run" / "rank-0-of-1")
    assert record is not None and record.id == (2, is_again)
    (tmp_path / "snapshot.pt").chmod(0o600)
    with (tmp_path / "snapshot.pt").open("r+b") as file:
        file.seek(1 << 18)
        file.write(b"changed" * 4096)
    model, optimizer, scheduler = killed_run.make()
    with swapper.SwapManager(tmp_path / "run", host_memory=killed_run.BUDGET, resume="auto") as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        assert manager.step == 1
        assert killed_run.train_step(model, optimizer, scheduler, 1) == losses[1]


def test_a_script_that_changes_nothing_has_no_step_committed_again(tmp_path: Path) -> None:
    model, optimizer, scheduler = killed_run.make()
    with swapper.SwapManager(tmp_path / "run", host_memory=killed_run.BUDGET) as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        manager.register(scheduler=scheduler)
        killed_run.train_step(model, optimizer, scheduler, 0)
        wait_for_snapshot(manager, tmp_path)
        model(killed_run.batch(1))
    record = read_commit(tmp_path / "run" / "rank-0-of-1")
    assert record is not None and record.id == (1, 0)


@pytest.mark.parametrize("options", [{"fsync": True}, {"params": "host", "commit_every": 1}, {"commit_every": 2}])
def test_every_way_to_commit_is_gone_on_from_exactly(tmp_path: Path, options: dict[str, Any]) -> None:
    assert go(tmp_path, 2, **options) + go(tmp_path, STEPS, **options) == killed_run.plain_losses(STEPS)


def test_a_run_may_go_on_with_a_larger_budget(tmp_path: Path) -> None:
    assert go(tmp_path, 2) + go(tmp_path, STEPS, host_memory="40MiB") == killed_run.plain_losses(STEPS)


def test_only_what_was_committed_is_gone_on_from(tmp_path: Path) -> None:
    go(tmp_path, 3, commit_every=2)
    assert go(tmp_path, 3, commit_every=2) == killed_run.plain_losses(3)[2:]


def test_a_swap_file_that_the_commit_names_and_does_not_need_may_be_gone(tmp_path: Path) -> None:
    """As one that was published as a snapshot, with nothing of the commit in it, before a kill."""
    go(tmp_path, 2)
    (path,) = tmp_path.rglob("commit.pt")
    record = read_commit(path.parent)
    assert record is not None
    (unneeded,) = record.files.keys() - files_of(record)
    (path.parent / record.files[unneeded]).unlink()
    assert go(tmp_path, STEPS) == killed_run.plain_losses(STEPS)[2:]


def test_kills_right_after_snapshots_do_not_gather_swap_files(tmp_path: Path) -> None:
    run, counts = tmp_path / "run", []
    go(run, 2)
    for number in range(4):
        child = killed_run.fork(lambda number=number: resume_publish_and_die(run, tmp_path / f"snapshot-{number}.pt"))
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        counts.append(len(list(run.rglob("*.swap"))))
    assert max(counts) <= 4, counts  # what the commit needs, a file that is published, and two that alternate
    assert go(run, STEPS) == killed_run.plain_losses(STEPS)[2:]
    assert len(list(run.rglob("*.swap"))) <= 3


def resume_publish_and_die(run: Path, snapshot: Path) -> None:
    model, optimizer, scheduler = killed_run.make()
    manager = swapper.SwapManager(run, host_memory=killed_run.BUDGET, resume="auto")
    manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
    manager.register(scheduler=scheduler)
    manager.snapshot(snapshot).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def test_without_commits_a_run_begins_anew(tmp_path: Path) -> None:
    go(tmp_path, 2, commit_every=None)
    assert len(list(tmp_path.rglob("*.swap"))) == 1
    assert go(tmp_path, 1, commit_every=None) == killed_run.plain_losses(1)


def test_parameters_in_memory_are_not_committed_for_free(tmp_path: Path) -> None:
    go(tmp_path, 2, params="host")
    assert read_commit(tmp_path / "rank-0-of-1") is None


def test_fp32_masters_go_on_exactly(tmp_path: Path) -> None:
    def steps(directory: Path, until: int) -> list[float]:
        model, optimizer, scheduler = killed_run.make()
        model = model.to(torch.bfloat16)
        losses = []
        with swapper.SwapManager(directory, host_memory=killed_run.BUDGET, resume="auto") as manager:
            options: dict[str, Any] = {"params": "nvme", "optimizer_state": "nvme", "master_weights": torch.float32}
            model, optimizer = manager.offload(model, optimizer, **options)
            manager.register(scheduler=scheduler)
            while manager.step < until:
                losses.append(killed_run.train_step(model, optimizer, scheduler, manager.step))
        return losses

    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    assert steps(tmp_path / "parts", 2) + steps(tmp_path / "parts", STEPS) == steps(tmp_path / "whole", STEPS)


def test_a_directory_with_a_run_is_refused_unless_resume_says_otherwise(tmp_path: Path) -> None:
    go(tmp_path, 1)
    with pytest.raises(swapper.DirectoryError, match=r"resume=.auto.*resume=.discard"):
        swapper.SwapManager(tmp_path, host_memory=killed_run.BUDGET)
    with swapper.SwapManager(tmp_path, host_memory=killed_run.BUDGET, resume="discard") as manager:
        assert manager.step == 0
        assert not list(tmp_path.rglob("*.swap"))


def test_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    go(tmp_path, 1)
    model = nn.Sequential(nn.Embedding(512, 192), nn.Linear(192, 512))
    with swapper.SwapManager(tmp_path, host_memory="40MiB", resume="auto") as manager:
        with pytest.raises(swapper.CheckpointError, match=r"only in the run: 9.weight param"):
            manager.offload(model, torch.optim.AdamW(model.parameters()), params="nvme", optimizer_state="nvme")
        assert torch.isfinite(model[0].weight).all()  # the model is as it was


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    go(tmp_path, 1)
    model, _, _ = killed_run.make()
    with swapper.SwapManager(tmp_path, host_memory=killed_run.BUDGET, resume="auto") as manager:
        with pytest.raises(swapper.CheckpointError, match=r"optimizer torch\.optim\.adam\.Adam instead of"):
            manager.offload(model, torch.optim.Adam(model.parameters()), params="nvme", optimizer_state="nvme")


def test_another_placement_is_refused(tmp_path: Path) -> None:
    go(tmp_path, 1)
    with pytest.raises(swapper.CheckpointError, match="params='host', but the directory's run has params='nvme'"):
        go(tmp_path, 2, params="host", host_memory="40MiB")


def damage_record(run: Path) -> None:
    record = run / "commit.pt"
    content = bytearray(record.read_bytes())
    content[len(content) // 3] ^= 1
    record.write_bytes(content)


def remove_file(run: Path) -> None:
    next(run.rglob("*.swap")).unlink()


def cut_file(run: Path) -> None:
    with next(run.rglob("*.swap")).open("r+b") as file:
        file.truncate(4096)


def flip_byte_and_restart_the_system(run: Path) -> None:
    """A crash of the system lost a write: another boot id, and one byte of a committed page is not what it was."""
    record = read_commit(run)
    assert record is not None
    publish_commit(run, encode_commit(dataclasses.replace(record, boot_id="another")), durable=False)
    with (run / record.files[record.sections[-1].files[0]]).open("r+b") as file:
        file.seek(-5000, 2)
        byte = file.read(1)[0]
        file.seek(-5000, 2)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("harm", [damage_record, remove_file, cut_file, flip_byte_and_restart_the_system])
def test_a_damaged_run_is_refused_with_a_remedy(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    go(tmp_path, 2)
    harm(tmp_path / "rank-0-of-1")
    with pytest.raises(swapper.CheckpointError, match="resume='discard'"):
        go(tmp_path, 3)


def test_a_changed_byte_of_the_record_is_found_wherever_it_is(tmp_path: Path) -> None:
    """Also where torch.load would read it: a step, a place or a checksum that is another one is no commit of this run."""
    go(tmp_path, 1)
    run = tmp_path / "rank-0-of-1"
    whole = (run / "commit.pt").read_bytes()
    for at in range(0, len(whole), 61):
        with (run / "commit.pt").open("r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ 1]))
        with pytest.raises(swapper.CheckpointError, match="damaged"):
            read_commit(run)
        with (run / "commit.pt").open("r+b") as file:
            file.seek(at)
            file.write(whole[at : at + 1])
    assert read_commit(run) is not None


def test_a_run_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(tmp_path, 1)
    monkeypatch.setattr("swapper.durability.commit.FORMAT", 999)
    with pytest.raises(swapper.CheckpointError, match=r"is of format \d+, this swapper reads 999.*resume='discard'"):
        go(tmp_path, 2)


def test_after_a_restart_of_the_system_an_undamaged_run_goes_on(tmp_path: Path) -> None:
    losses = go(tmp_path, 2)
    run = tmp_path / "rank-0-of-1"
    record = read_commit(run)
    assert record is not None
    publish_commit(run, encode_commit(dataclasses.replace(record, boot_id="another")), durable=True)
    assert losses + go(tmp_path, STEPS) == killed_run.plain_losses(STEPS)


def test_a_run_goes_on_from_a_copy_of_its_directory(tmp_path: Path) -> None:
    losses = go(tmp_path, 2)
    shutil.copytree(tmp_path / "rank-0-of-1", tmp_path / "copy" / "rank-0-of-1")
    assert losses + go(tmp_path / "copy", STEPS) == killed_run.plain_losses(STEPS)


def test_what_cannot_be_kept_is_refused_when_it_is_registered(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"value": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("never loaded")

    with swapper.SwapManager(tmp_path, host_memory=killed_run.BUDGET) as manager:
        with pytest.raises(swapper.ConfigError, match="weights_only"):
            manager.register(odd=Odd())

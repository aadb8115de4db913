"""A parked manager: its memory is the system's, nothing is lost, and what cannot be done meanwhile is refused by name."""

from __future__ import annotations

import gc
import json
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e import parked_run
from e2e.models import Net, loss_of, tokens, train_step
from e2e.processes import run_python, started_python
from e2e.twins import Twins, assert_same, smallest_device_budget
from swapper.paging.store.swap_files import Store
from swapper.train.session.training_session import TrainingSession

MakeTwins = Callable[..., Twins]

OPTIONS: dict[str, dict[str, Any]] = {
    "all on NVMe": {},
    "state on NVMe": {"params": "host"},
    "parameters on NVMe": {"optimizer_state": "host"},
    "nothing on NVMe": {"params": "host", "optimizer_state": "host"},
    "gradients too": {"gradients": "nvme"},
    "deferred": {"update": "deferred"},
    "in backward": {"update": "backward"},
    "commits every third step": {"params": "host", "commit_every": 3},
    "no commits": {"commit_every": None},
}


def step_and_clear(model: Any, optimizer: Any) -> torch.Tensor:
    loss = train_step(model, optimizer)
    optimizer.zero_grad()
    return loss


def park(pair: Twins) -> None:
    assert pair.manager is not None
    with pair.manager.parked():
        pass


@pytest.mark.parametrize("name", OPTIONS)
def test_training_goes_on_bit_for_bit(twins: MakeTwins, name: str) -> None:
    pair = twins(Net(), room_bytes=4 << 20, **OPTIONS[name])
    park(pair)
    for _ in range(2):
        pair.train(step_and_clear, steps=2)
        park(pair)
    pair.train(step_and_clear, steps=2)
    pair.finish(paged=False)


@pytest.mark.parametrize("update", ["step", "deferred"])
def test_with_masters_it_is_bit_equal(twins: MakeTwins, update: str) -> None:
    pair = twins(Net().to(torch.bfloat16), master=True, room_bytes=4 << 20, update=update)
    pair.train(step_and_clear, steps=2)
    park(pair)
    pair.train(step_and_clear, steps=2)
    pair.finish(paged=False)


@pytest.mark.parametrize("stays", [False, True])
def test_on_a_device_it_is_bit_equal(twins: MakeTwins, tmp_path: Path, stays: bool) -> None:
    options: dict[str, Any] = {"device": HostDevice("late")}
    if stays:
        options.update(update_on="device", gradients="device", optimizer_state="device", device_memory=64 << 20)
    else:
        options["device_memory"] = smallest_device_budget(tmp_path, Net(), **options) + (1 << 20)
    pair = twins(Net(), room_bytes=8 << 20, **options)
    pair.train(step_and_clear, steps=2)
    park(pair)
    pair.train(step_and_clear, steps=2)
    pair.finish(paged=False)


def test_with_encoded_state_it_is_that_of_a_run_that_was_not_parked(tmp_path: Path) -> None:
    def losses(directory: Path, parks: bool) -> list[float]:
        directory.mkdir()
        torch.manual_seed(0)
        model = Net().to(torch.bfloat16)
        with swapper.SwapManager(directory, host_memory="32MiB") as manager:
            model, optimizer = manager.offload(
                model,
                torch.optim.AdamW(model.parameters()),
                params="nvme",
                optimizer_state="nvme",
                master_weights=torch.float32,
                state_codec="8bit",
            )
            found = []
            for _ in range(4):
                found.append(float(step_and_clear(model, optimizer)))
                if parks:
                    with manager.parked():
                        pass
            return found

    assert losses(tmp_path / "parked", True) == losses(tmp_path / "plain", False)


def test_it_gives_the_pool_back_and_takes_it_again(tmp_path: Path) -> None:
    done = run_python(parked_run.__file__, "measure", tmp_path / "run", tmp_path / "losses")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["before"] - figures["parked"] >= figures["pool"], figures
    assert figures["after"] - figures["parked"] >= figures["pool"], figures
    assert_expected(tmp_path / "losses")


def test_a_run_that_is_killed_while_parked_resumes_exactly(tmp_path: Path) -> None:
    with started_python(parked_run.__file__, "wait", tmp_path / "run", tmp_path / "losses") as process:
        assert process.stdout.readline() == "parked\n", process.stderr.read()
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    done = run_python(parked_run.__file__, "go", tmp_path / "run", tmp_path / "losses")
    assert done.returncode == 0, done.stderr
    assert_expected(tmp_path / "losses")


def assert_expected(losses: Path) -> None:
    model, optimizer = parked_run.make()
    expected = [parked_run.train_step(model, optimizer, number) for number in range(parked_run.STEPS)]
    assert [float.fromhex(line.split()[1]) for line in losses.read_text().splitlines()] == expected


@pytest.mark.parametrize("params", ["nvme", "host"])
def test_it_moves_only_what_memory_alone_has(twins: MakeTwins, params: str) -> None:
    """Of a committed run on NVMe nothing: no page is written twice, or read before it is used. Else what is resident, once."""
    pair = twins(Net(), room_bytes=64 << 20, params=params)
    pair.train(step_and_clear, steps=2)
    manager = pair.manager
    assert manager is not None
    run = manager.current.run
    run.committer.finish()
    run.pager.flush()
    resident = sum(-section.plan.nbytes // 4096 * -4096 for section in run.sections if section.resident)
    assert (resident > 0) == (params == "host")
    del run
    before = manager.counters.bytes_written, manager.counters.bytes_read
    park(pair)
    written, read = manager.counters.bytes_written - before[0], manager.counters.bytes_read - before[1]
    assert (written, read) == (resident, resident)


USES: dict[str, Callable[[Twins], object]] = {
    "forward": lambda pair: pair.swapped(tokens()),
    "step": lambda pair: pair.optimizer.step(),
    "read": lambda pair: pair.swapped.blocks[0].up.weight.sum(),
    "read of what was resident": lambda pair: pair.swapped.norm.weight.sum(),
    "copy": lambda pair: pair.swapped.norm.weight.detach().clone(),
    "view": lambda pair: pair.swapped.blocks[0].up.weight[0],
    "array": lambda pair: pair.swapped.norm.bias.numpy(force=True),
    "data": lambda pair: pair.swapped.norm.bias.data,
    "state_dict": lambda pair: pair.swapped.state_dict(),
    "load_state_dict": lambda pair: pair.swapped.norm.bias.copy_(torch.zeros(128)),
    "optimizer.state": lambda pair: pair.optimizer.state[pair.swapped.norm.bias],
    "optimizer.state_dict": lambda pair: pair.optimizer.state_dict(),
    "add_param_group": lambda pair: pair.optimizer.add_param_group({"params": []}),
    "snapshot": lambda pair: pair.manager.snapshot(pair.directory / "x.pt"),
    "gather": lambda pair: pair.manager.gather(pair.swapped).__enter__(),
    "parked": lambda pair: pair.manager.parked().__enter__(),
    "offload": lambda pair: pair.manager.offload(nn.Linear(1, 1)),
    "dump": lambda pair: pair.manager.dump(),
}


def test_uses_in_the_context_are_refused_by_name(twins: MakeTwins) -> None:
    pair = twins(Net(), room_bytes=8 << 20)
    pair.train(step_and_clear, steps=1)
    assert pair.manager is not None
    weight = pair.swapped.blocks[0].up.weight
    form = (weight.shape, weight.dtype, weight.device, weight.requires_grad, weight.grad)
    with pair.manager.parked():
        for name, use in USES.items():
            with pytest.raises(swapper.StateError, match="parked") as caught, torch.no_grad():
                use(pair)
            assert "with manager.parked" in str(caught.value), name
        assert pair.swapped.blocks[0].up.weight is weight
        assert (weight.shape, weight.dtype, weight.device, weight.requires_grad, weight.grad) == form
        assert "away" in repr(weight)
        pair.optimizer.zero_grad()
        assert pair.manager.step == 1
    pair.train(step_and_clear, steps=2)
    pair.finish(paged=False)


def test_an_error_in_the_context_unparks(twins: MakeTwins) -> None:
    pair = twins(Net(), room_bytes=8 << 20)
    pair.train(step_and_clear, steps=1)
    assert pair.manager is not None
    with pytest.raises(ZeroDivisionError), pair.manager.parked():
        raise ZeroDivisionError
    pair.train(step_and_clear, steps=2)
    pair.finish(paged=False)


def backward(model: Any, _: Any) -> torch.Tensor:
    loss = loss_of(model, tokens())
    loss.backward()
    return loss.detach()


def test_what_is_open_is_named(twins: MakeTwins, may_publish: threading.Event) -> None:
    pair = twins(Net(), room_bytes=8 << 20)
    manager = pair.manager
    assert manager is not None
    pair.train(step_and_clear, steps=1)

    def refused(match: str) -> None:
        with pytest.raises(swapper.StateError, match=match), manager.parked():
            raise AssertionError("it was parked")

    with manager.gather(pair.swapped.norm):
        refused("in the middle of manager.gather: park between two steps")

    def iteration(model: Any, optimizer: Any) -> torch.Tensor:
        with manager.one_step() if model is pair.swapped else nullcontext():
            loss = step_and_clear(model, optimizer)
            if model is pair.swapped:
                refused("in the middle of a training step, which goes on until manager.one_step ends")
        return loss

    pair.both(iteration)
    pair.both(backward)
    refused("with gradients .* call optimizer.zero_grad")
    pair.both(lambda _, optimizer: optimizer.step())
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    ticket = manager.snapshot(pair.directory / "step.pt")
    refused("while a snapshot is being written: wait for it before")
    may_publish.set()
    ticket.wait()
    park(pair)
    pair.train(step_and_clear, steps=1)
    pair.finish(paged=False)


def test_an_update_that_backward_has_begun_is_named(backward: MakeTwins) -> None:
    pair = backward(room_bytes=8 << 20)
    loss_of(pair.swapped, tokens()).backward()
    assert pair.manager is not None
    with (
        pytest.raises(swapper.StateError, match=r"before the optimizer\.step\(\)|with gradients"),
        pair.manager.parked(),
    ):
        raise AssertionError("it was parked")
    pair.optimizer.step()


def test_a_graph_of_before_is_refused(twins: MakeTwins) -> None:
    pair = twins(Net(), room_bytes=8 << 20)
    pair.train(step_and_clear, steps=1)
    loss = loss_of(pair.swapped, tokens())
    park(pair)
    with pytest.raises(swapper.StateError, match="run the forward again"):
        loss.backward()
    del loss
    pair.optimizer.zero_grad()
    pair.train(step_and_clear, steps=1)


def test_a_manager_that_is_closed_in_the_context_stays_closed(twins: MakeTwins) -> None:
    pair = twins(Net(), room_bytes=8 << 20)
    pair.train(step_and_clear, steps=1)
    assert pair.manager is not None
    with pair.manager.parked():
        pair.manager.close()
    with pytest.raises(swapper.ColdParameterError, match="stayed on NVMe when its manager was closed"):
        pair.swapped.norm.weight.sum()
    pair.resume(Net())
    assert pair.manager.step == 1
    pair.plain_optimizer.zero_grad()
    pair.train(step_and_clear, steps=1)


def test_memory_that_cannot_be_taken_again_leaves_a_run_to_resume(
    twins: MakeTwins, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = twins(Net(), room_bytes=8 << 20)
    pair.train(step_and_clear, steps=2)
    manager = pair.manager
    assert manager is not None

    def refuse(*_: object) -> None:
        raise swapper.IoError("populate memory", "memfd:swapper-arena", 0, 1, 12, "none is left")

    with monkeypatch.context() as patch, pytest.raises(swapper.IoError), manager.parked():
        patch.setattr(Store, "take_over", refuse)
    with pytest.raises(swapper.StateError, match="could not take its memory back"):
        pair.optimizer.step()
    pair.resume(Net())
    assert pair.manager is not None and pair.manager.step == 2
    pair.train(step_and_clear, steps=1)
    pair.finish(paged=False)


def test_the_last_snapshot_and_the_way_back_stay(twins: MakeTwins) -> None:
    """The record that a run falls back to if somebody changes its snapshot is still there after a park."""
    pair = twins(Net(), room_bytes=8 << 20)
    pair.train(step_and_clear, steps=2)
    manager = pair.manager
    assert manager is not None
    manager.snapshot(pair.directory / "step.pt").wait()
    fallback = sorted(path.name for path in manager._directory.path.iterdir())
    park(pair)
    assert sorted(path.name for path in manager._directory.path.iterdir()) == fallback
    state = torch.load(pair.directory / "step.pt", weights_only=True)
    assert_same(dict(state["model"]), dict(pair.plain.state_dict()))
    pair.train(step_and_clear, steps=2)
    pair.finish(paged=False)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_keeps_the_old_session(twins: MakeTwins) -> None:
    pair = twins(Net(), room_bytes=8 << 20)
    pair.train(step_and_clear, steps=1)
    assert pair.manager is not None
    descriptors = open_files()
    for _ in range(3):
        park(pair)
        with suppress(ZeroDivisionError), pair.manager.parked():
            raise ZeroDivisionError
    gc.collect()
    assert open_files() == descriptors
    sessions = [found for found in gc.get_objects() if type(found) is TrainingSession]
    assert len(sessions) == 1

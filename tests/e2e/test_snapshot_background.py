"""Snapshots while training goes on: what the ticket says, what fails, what is kept, and what a run that goes on knows."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import swapper
from e2e import killed_run
from e2e.processes import is_refused_in_a_fork, run_python
from e2e.test_snapshot_sharing import Run
from swapper import _C
from swapper.durability.publication import Publication
from swapper.durability.verify import verify


def test_training_goes_on_before_it_is_published_and_it_has_the_step_it_was_taken_of(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1)
    tickets = []
    for number in range(4):
        tickets.append(run.manager.snapshot(tmp_path / f"{number}.pt"))
        run.train(1)
    run.manager.close()
    model, optimizer, scheduler = killed_run.make()
    for number, ticket in enumerate(tickets):
        assert ticket.done and ticket.exception() is None
        killed_run.train_step(model, optimizer, scheduler, number)
        state = torch.load(ticket.path, weights_only=True)
        assert state["swapper"]["step"] == ticket.step == number + 1
        assert state["registered"]["scheduler"]["last_epoch"] == number + 1
        for name, tensor in model.state_dict().items():
            assert torch.equal(state["model"][name], tensor)
        assert verify(ticket.path)[0].faults == []


def test_nothing_is_written_by_the_call_and_no_payload_by_the_snapshot(tmp_path: Path) -> None:
    """Counted by the engine, over whole runs: one with snapshots, one without."""
    written = []
    for snapshots in (False, True):
        (tmp_path / str(snapshots)).mkdir()
        run = Run(tmp_path / str(snapshots))
        for number in range(4):
            run.train(1)
            run.manager.current.run.pager.flush()
            run.manager.current.run.committer.finish()  # of the step nothing is on its way any more
            if snapshots:
                before = run.manager.counters.bytes_written
                run.manager.snapshot(tmp_path / f"{number}.pt").wait()
                resident = sum(section.plan.nbytes for section in run.manager.current.run.sections if section.resident)
                assert run.manager.counters.bytes_written - before <= resident
        run.manager.close()
        written.append(run.manager.counters.bytes_written)
    assert written[1] - written[0] <= 4 * resident


def test_a_ticket_can_be_awaited_and_waited_for_elsewhere(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1)

    async def take() -> Path:
        return await run.manager.snapshot(tmp_path / "a.pt")

    assert asyncio.run(take()) == tmp_path / "a.pt"
    ticket = run.manager.snapshot(tmp_path / "b.pt")
    results: list[Path] = []
    thread = threading.Thread(target=lambda: results.append(ticket.result()))
    thread.start()
    run.train(1)
    run.manager.close()
    thread.join()
    assert results == [tmp_path / "b.pt"]
    assert "published" in repr(ticket)


def test_a_failure_nobody_asked_for_is_raised_by_the_next_snapshot_or_by_close(
    tmp_path: Path, may_publish: threading.Event
) -> None:
    run = Run(tmp_path)
    run.train(1)
    for again in (True, False):
        folder = tmp_path / "folder"
        folder.mkdir()
        may_publish.clear()
        run.manager.snapshot(folder / "a.pt")
        folder.rmdir()
        may_publish.set()
        run.train(2)
        run.manager.current.run.publisher.finish()
        with pytest.raises(swapper.CheckpointError, match="was removed"):
            run.manager.snapshot(tmp_path / "b.pt") if again else run.manager.close()
        assert not (tmp_path / "b.pt").exists()


def test_of_two_failures_that_nobody_asked_for_one_is_raised_and_the_other_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, may_publish: threading.Event
) -> None:
    run = Run(tmp_path)
    run.train(1)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        run.manager.snapshot(tmp_path / name / "a.pt")
        (tmp_path / name / "a.pt").write_bytes(b"mine")
    may_publish.set()
    run.train(1)
    run.manager.current.run.publisher.finish()
    with pytest.raises(swapper.CheckpointError, match=r"one/a\.pt appeared while"):
        run.manager.close()
    assert "another snapshot failed" in caplog.text and "two/a.pt appeared while" in caplog.text


def test_a_failure_that_was_told_is_not_told_again(tmp_path: Path, may_publish: threading.Event) -> None:
    run = Run(tmp_path)
    run.train(1)
    ticket = run.manager.snapshot(tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes(b"mine")
    may_publish.set()
    with pytest.raises(swapper.CheckpointError, match="appeared while"):
        ticket.wait()
    assert isinstance(ticket.exception(), swapper.CheckpointError)
    assert (tmp_path / "a.pt").read_bytes() == b"mine"
    run.manager.snapshot(tmp_path / "b.pt").wait()
    run.manager.close()


def test_one_name_is_not_promised_twice(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1)
    run.manager.snapshot(tmp_path / "a.pt")
    with pytest.raises(swapper.CheckpointError, match="exists already"):
        run.manager.snapshot(tmp_path / "a.pt")
    run.manager.close()
    assert (tmp_path / "a.pt").exists()


def test_what_cannot_be_kept_is_refused_by_the_call(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1)
    with pytest.raises(swapper.CheckpointError, match="cannot be in a container"):
        run.manager.snapshot(tmp_path / "a.pt", extra={"odd": object()})
    with pytest.raises(swapper.ConfigError, match="keep=0"):
        run.manager.snapshot(tmp_path / "a.pt", keep=0)
    run.manager.close()
    assert not (tmp_path / "a.pt").exists()


def test_keep_removes_only_what_this_run_published_by_this_pattern(tmp_path: Path) -> None:
    run = Run(tmp_path)
    folder = tmp_path / "snapshots"
    folder.mkdir()
    (folder / "step-0.pt").write_bytes(b"of the user")

    def take(manager: swapper.SwapManager, name: str, keep: int | None) -> None:
        run.train(1) if manager is run.manager else None
        manager.snapshot(folder / name, keep=keep).wait()

    take(run.manager, "step-1.pt", None)
    for number in range(2, 6):
        take(run.manager, f"step-{number}.pt", 2)
    take(run.manager, "best.pt", 2)
    (folder / "step-4.pt").unlink()
    (folder / "step-4.pt").write_bytes(b"another file of the user")
    take(run.manager, "step-6.pt", 2)
    take(run.manager, "step-7.pt", 2)
    run.manager.close()
    names = ["best.pt", "step-0.pt", "step-1.pt", "step-4.pt", "step-6.pt", "step-7.pt"]
    assert sorted(path.name for path in folder.iterdir()) == names
    second = Run(tmp_path)  # a run that goes on knows what it published
    second.train(1)
    second.manager.snapshot(folder / "step-8.pt", keep=2).wait()
    second.manager.close()
    assert not (folder / "step-6.pt").exists() and (folder / "step-7.pt").exists()
    assert (folder / "step-4.pt").read_bytes() == b"another file of the user"


def test_extra_is_in_snapshots_and_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(2)
    run.manager.extra["epoch"] = 7
    path = run.manager.snapshot(tmp_path / "a.pt", extra={"note": torch.arange(3)}).result()
    extra = torch.load(path, weights_only=True)["extra"]
    assert extra["epoch"] == 7 and extra["note"].tolist() == [0, 1, 2]
    run.manager.close()
    second = Run(tmp_path)
    assert second.manager.extra == {"epoch": 7}
    second.manager.close()


def test_random_numbers_go_on_where_the_step_ended(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [random.random(), float(numpy.random.rand()), torch.rand(2).tolist()]

    def begin() -> tuple[swapper.SwapManager, Any, Any, Any]:
        model, optimizer, scheduler = killed_run.make(dropout=0.1)
        manager = swapper.SwapManager(tmp_path, host_memory=killed_run.BUDGET, resume="auto", rng=True)
        return manager, *manager.offload(model, optimizer, params="nvme", optimizer_state="nvme"), scheduler

    manager, model, optimizer, scheduler = begin()
    killed_run.train_step(model, optimizer, scheduler, 0)
    expected = draw()
    path = manager.snapshot(tmp_path / "a.pt").result()
    manager.close()
    for module in (random, numpy.random, torch):
        getattr(module, "manual_seed" if module is torch else "seed")(5)
    manager, *_ = begin()
    assert draw() == expected
    manager.close()
    assert torch.load(path, weights_only=True)["rng"].keys() == {"python", "torch", "numpy"}


def test_without_crash_resume_it_takes_half_the_space_and_snapshots_work(tmp_path: Path) -> None:
    model, optimizer, scheduler = killed_run.make()
    with pytest.raises(swapper.ConfigError, match="crash_resume"):
        swapper.CommitPolicy(crash_resume=False, every=3)
    with swapper.SwapManager(
        tmp_path, host_memory=killed_run.BUDGET, commits=swapper.CommitPolicy(crash_resume=False)
    ) as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        files = tmp_path / "rank-0-of-1"
        for number in range(3):
            killed_run.train_step(model, optimizer, scheduler, number)
            assert len(list(files.glob("*.swap"))) == 1
        path = manager.snapshot(tmp_path / "a.pt").result()
        for number in range(3, 6):
            killed_run.train_step(model, optimizer, scheduler, number)
        manager.current.run.pager.flush()  # without commits pages are written when their frame is needed
        manager.current.run.committer.finish()
        assert len(list(files.glob("*.swap"))) == 1
        assert not (files / "commit.pt").exists()
        assert verify(path)[0].faults == []


FORGETFUL = """
import sys
from pathlib import Path
import swapper
from e2e import killed_run
model, optimizer, scheduler = killed_run.make()
manager = swapper.SwapManager(sys.argv[1], host_memory=killed_run.BUDGET)
model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
killed_run.train_step(model, optimizer, scheduler, 0)
manager.snapshot(Path(sys.argv[1]) / "a.pt")
"""


def test_a_program_that_ends_without_closing_still_gets_its_snapshot(tmp_path: Path) -> None:
    done = run_python("-c", FORGETFUL, tmp_path)
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "a.pt")["swapper"]["step"] == 1


def test_a_thread_that_has_published_refers_to_nothing_of_a_closed_run(tmp_path: Path) -> None:
    """It is held at its last line, until `close` waits for it, or is over."""
    is_closed, found = threading.Event(), list[bool]()
    main = threading.main_thread().ident
    assert main is not None

    def is_waited_for() -> bool:
        frame = sys._current_frames()[main]
        while frame is not None and frame.f_code is not threading.Thread.join.__code__:
            frame = frame.f_back  # type: ignore[assignment]
        return frame is not None and frame.f_locals["self"] is threading.current_thread()

    def hold(frame: Any, event: str, _: Any) -> Any:
        if event == "return" and frame.f_code is Publication._run.__code__:
            while not is_closed.is_set() and not is_waited_for():
                pass
            found.append(is_closed.is_set())
        return hold

    run = Run(tmp_path)
    run.train(1)
    threading.settrace(hold)
    try:
        run.manager.snapshot(tmp_path / "snapshot.pt").wait()
        run.manager.close()
        is_closed.set()
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    assert found == [False]


def test_a_ticket_is_refused_in_a_forked_child(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1)
    ticket = run.manager.snapshot(tmp_path / "a.pt")
    assert is_refused_in_a_fork(ticket.wait)
    run.manager.close()


def test_closing_goes_on_past_a_part_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.train(1)
    inner = run.manager.current.run
    engine = inner.engine

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inner.publisher, "finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.manager.close()
    assert inner.engine is None
    with (tmp_path / "any").open("wb") as stream:
        stream.write(bytes(4096))
    memory = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(swapper.IoError, match="closed"):
        engine.read(_C.File(str(tmp_path / "any")), 0, memory.data_ptr(), 4096, keep=memory)

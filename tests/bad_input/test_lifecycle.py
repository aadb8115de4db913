"""Before offload, after close, and again and again: clear errors, and nothing left of any of it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.leaks import held_by_swapper, held_since
from e2e.models import Net, loss_of, tokens, train_step
from e2e.processes import run_python
from e2e.twins import Twins, adamw

import swapper

MakeTwins = Callable[..., Twins]

USES: dict[str, Callable[[Twins], Any]] = {
    "forward": lambda pair: loss_of(pair.swapped, tokens()),
    "parameter": lambda pair: pair.swapped.head.weight.sum(),
    "step": lambda pair: pair.optimizer.step(),
    "optimizer.state_dict": lambda pair: pair.optimizer.state_dict(),
    "optimizer.load_state_dict": lambda pair: pair.optimizer.load_state_dict(pair.plain_optimizer.state_dict()),
    "load_state_dict": lambda pair: pair.swapped.load_state_dict(pair.plain.state_dict()),
    "gather": lambda pair: pair.manager.gather(pair.swapped).__enter__(),
    "clip_grad_norm_": lambda pair: pair.manager.clip_grad_norm_(1.0),
    "snapshot": lambda pair: pair.manager.snapshot(pair.directory / "late.pt").result(),
    "offload": lambda pair: pair.manager.offload(pair.plain, pair.plain_optimizer),
}


def test_every_use_after_close_is_refused(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=1)
    pair.close()
    pair.close()  # once more does nothing
    for name, use in USES.items():
        with pytest.raises((swapper.StateError, swapper.ColdParameterError, RuntimeError)) as caught:
            use(pair)
        assert "closed" in str(caught.value), name
    assert not (pair.directory / "late.pt").exists()


def test_statistics_can_be_read_after_close(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=2)
    pair.close()
    assert pair.manager.step == 2
    assert pair.manager.counters.bytes_read > 0


def test_parameters_on_the_host_stay_usable_after_close(twins: MakeTwins) -> None:
    pair = twins(Net(), params="host")
    pair.train(train_step, steps=2)
    pair.close()
    pair.both(lambda model, _: loss_of(model, tokens()).backward())
    for parameter, other in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
        assert torch.equal(parameter, other)
        assert torch.equal(parameter.grad, other.grad)
    adamw(pair.swapped.parameters()).step()  # an ordinary model again


def test_values_come_back_into_a_model_that_was_closed(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=2)
    path = pair.manager.snapshot(pair.directory / "a.pt").result()
    pair.close()
    pair.swapped.load_state_dict(torch.load(path)["model"], assign=True)
    pair.both(lambda model, _: loss_of(model, tokens()).detach())


def test_a_backward_after_close_is_refused(twins: MakeTwins) -> None:
    pair = twins(Net())
    loss = loss_of(pair.swapped, tokens())
    pair.close()
    with pytest.raises(swapper.SwapperError, match="closed"):
        loss.backward()


def test_close_inside_gather_is_refused_or_ends_it(twins: MakeTwins) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=1)
    try:
        with pair.manager.gather(pair.swapped.head, write=True):
            pair.manager.close()
    except swapper.StateError as error:
        assert "gather" in str(error)
    pair.close()


def test_leaving_the_with_statement_by_an_exception_closes_and_lets_it_through(tmp_path: Path) -> None:
    model = Net()
    with (
        pytest.raises(ZeroDivisionError),
        swapper.SwapManager(tmp_path, host_memory="32MiB") as manager,
    ):
        model, _ = manager.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        loss_of(model, tokens())
        raise ZeroDivisionError
    swapper.SwapManager(tmp_path, host_memory="32MiB", resume="discard").close()


def test_a_close_that_fails_frees_the_directory_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = swapper.SwapManager(tmp_path, host_memory="32MiB")
    model = Net()
    manager.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
    resources = manager.current.run._resources
    close = resources.close

    def close_and_fail() -> None:
        close()
        raise swapper.IoError("close", "the drive", 0, 0, 5)

    monkeypatch.setattr(resources, "close", close_and_fail)
    with pytest.raises(swapper.IoError, match="the drive"):
        manager.close()
    swapper.SwapManager(tmp_path, host_memory="32MiB", resume="discard").close()


def test_verbs_before_offload_say_what_to_do_first(tmp_path: Path) -> None:
    model = Net()
    with swapper.SwapManager(tmp_path, host_memory="32MiB") as manager:
        for use in (
            lambda: manager.gather(model).__enter__(),
            lambda: manager.snapshot(tmp_path / "a.pt").result(),
            lambda: manager.clip_grad_norm_(1.0),
        ):
            with pytest.raises(swapper.StateError, match=r"call manager\.offload first"):
                use()
        assert manager.step == 0
        assert manager.counters.bytes_read == 0


def test_what_cannot_be_registered_is_refused(tmp_path: Path) -> None:
    with (
        swapper.SwapManager(tmp_path, host_memory="32MiB") as manager,
        pytest.raises(swapper.ConfigError, match=r"scheduler=.*state_dict"),
    ):
        manager.register(scheduler=object())


def test_again_and_again_nothing_piles_up(tmp_path: Path) -> None:
    counts = []
    before = held_by_swapper()
    for number in range(6):
        with swapper.SwapManager(tmp_path, host_memory="32MiB", resume="discard") as manager:
            model = Net(depth=2)
            model, optimizer = manager.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
            train_step(model, optimizer)
            manager.snapshot(tmp_path / f"{number}.pt").result()
        assert not [thing for thing in held_since(before) if "swapper-arena" not in thing]
        del manager, model, optimizer
        gc.collect()
        assert held_by_swapper() == before
        counts.append((len(list(Path("/proc/self/fd").iterdir())), threading.active_count()))
    assert len(set(counts[1:])) == 1, counts


class Keeping(Net):
    """Keeps what it returned last, with its graph."""

    def forward(self, *inputs: Any) -> torch.Tensor:
        self.last: torch.Tensor = super().forward(*inputs)
        return self.last


@pytest.mark.parametrize("params", ["nvme", "host"])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_a_model_that_keeps_a_graph_on_itself_keeps_nothing_of_the_run(
    tmp_path: Path, params: str, update: str
) -> None:
    before = held_by_swapper()
    with swapper.SwapManager(tmp_path, host_memory="32MiB") as manager:
        model = Keeping(depth=2)
        model, optimizer = manager.offload(
            model, adamw(model.parameters()), params=params, optimizer_state="nvme", update=update
        )
        train_step(model, optimizer)
        model(tokens())
        loss = model.last.sum()
    with pytest.raises(swapper.StateError, match="the manager was closed"):
        loss.backward()
    del manager, model, optimizer, loss
    gc.collect()
    assert held_by_swapper() == before


def test_failed_offloads_leave_nothing(tmp_path: Path) -> None:
    model = Net()
    before = held_by_swapper()
    for _ in range(3):
        with swapper.SwapManager(tmp_path, host_memory="1MiB") as manager, pytest.raises(swapper.BudgetError):
            manager.offload(model, adamw(model.parameters()))
        assert held_by_swapper() == before
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lock"]


UNCLOSED = """
import sys, swapper
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import adamw
model = Net()
manager = swapper.SwapManager(sys.argv[1], host_memory="16MiB")
optimizer = adamw(model.parameters())
choices = dict(choice.split("=") for choice in sys.argv[3:])
model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme", **choices)
train_step(model, optimizer)
if sys.argv[2] == "in the middle":
    loss = loss_of(model, tokens())
    context = manager.gather(model.head)
    context.__enter__()
elif sys.argv[2] == "raises":
    loss_of(model, tokens()).backward()
    raise ZeroDivisionError
elif sys.argv[2] == "collected":
    import gc
    del manager, model, optimizer
    gc.collect()
    from e2e.leaks import held_by_swapper
    assert held_by_swapper() == [], held_by_swapper()
    import threading
    for thread in threading.enumerate():
        if thread.name.startswith("swapper"):
            thread.join(60)
            assert not thread.is_alive(), thread
print("end", flush=True)
"""


@pytest.mark.parametrize(
    ("state", "choices"),
    [
        ("in the middle", []),
        ("raises", []),
        ("collected", []),
        ("collected", ["gradients=nvme"]),
        ("collected", ["update=deferred"]),
        ("collected", ["update=backward"]),
        ("raises", ["update=backward"]),
    ],
)
def test_a_process_that_never_closes_ends_by_itself(tmp_path: Path, state: str, choices: list[str]) -> None:
    done = run_python("-c", UNCLOSED, tmp_path, state, *choices)
    if state == "raises":
        assert done.returncode == 1
        assert done.stderr.strip().endswith("ZeroDivisionError")
    else:
        assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    swapper.SwapManager(tmp_path, host_memory="16MiB", resume="discard").close()

"""Ctrl-C in the middle of a step: the step is whole or as if it had never begun, and the manager can be used or closed."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from e2e.processes import LONG_S, run_python, started_python

from bad_input.injected import Injected, Injector
from swapper.modules.turns import Turns


def test_ctrl_c_at_any_place_of_a_step_leaves_it_whole_or_untaken(tmp_path: Path) -> None:
    done = run_python("-m", "bad_input.interrupted", tmp_path, 60)
    lines = done.stdout.splitlines()
    assert lines[-1] == "finished", f"after {lines[-2:]}: {done.stderr}"
    assert sum(line.startswith("interrupted") for line in lines) > 30


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("way", ["signal", "thread"])
def test_what_is_raised_at_any_instruction_of_a_step_leaves_it_whole_or_untaken(
    tmp_path: Path, update: str, way: str
) -> None:
    done = run_python("-m", "bad_input.injected", tmp_path, way, update, 24, 1)
    assert done.returncode == 0, done.stderr
    assert "all exact" in done.stdout


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_a_step_is_counted_if_its_updates_were_made(tmp_path: Path, update: str) -> None:
    done = run_python("-m", "bad_input.injected", tmp_path, "thread", update, "training_step.py", 1)
    assert done.returncode == 0, done.stderr
    assert "all exact" in done.stdout


def test_any_signal_is_deferred_however_its_handler_was_set_and_wherever_it_arrives(tmp_path: Path) -> None:
    done = run_python("-c", DEFERRED)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "raised at the end: set before, set after, by a thread, interrupt_main, twice\n"


DEFERRED = """
import _thread, os, signal, threading
from swapper.runtime.interrupts import defer_signals, make_lock

class Raised(Exception):
    pass
def handler(number, frame):
    raise Raised
def is_deferred(send):
    reached = False
    try:
        with defer_signals, make_lock():
            send()
            os.getpid()
            reached = True
        return False
    except Raised:
        return reached
def by_thread():
    thread = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGALRM))
    thread.start()
    thread.join()
signal.signal(signal.SIGTERM, handler)
cases = {
    "set before": lambda: signal.raise_signal(signal.SIGTERM),
    "set after": lambda: (signal.signal(signal.SIGALRM, handler), signal.raise_signal(signal.SIGALRM)),
    "by a thread": by_thread,
    "interrupt_main": lambda: (signal.signal(signal.SIGINT, handler), _thread.interrupt_main()),
    "twice": lambda: [signal.raise_signal(signal.SIGTERM) for _ in range(2)],
}
deferred = [name for name, send in cases.items() if is_deferred(send)]
assert all(signal.getsignal(number) is handler for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT))
assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is handler and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
print("raised at the end:", ", ".join(deferred))
"""


LOOP = """
import signal, sys, torch, swapper
from e2e.models import Net, train_step, loss_of, tokens
from e2e.twins import adamw
signal.signal(signal.SIGINT, signal.default_int_handler)
where, directory = sys.argv[1:3]
model = Net()
class Stop(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value.clone()
    @staticmethod
    def backward(context, gradient):
        if where == "backward":
            pause()
        return gradient
def pause():
    print("ready", flush=True)
    while True:
        sys.stdin.readline()
manager = swapper.SwapManager(directory, host_memory="32MiB")
model, optimizer = manager.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
train_step(model, optimizer)
handle = model.blocks[2].register_forward_hook(lambda module, args, output: pause() if where == "forward" else Stop.apply(output))
try:
    train_step(model, optimizer)
except KeyboardInterrupt:
    print("interrupted", flush=True)
handle.remove()
optimizer.zero_grad()
if sys.argv[3] == "goes on":
    where = ""
    train_step(model, optimizer)
    print("went on", manager.step, all(page.leases == 0 for page in manager.current.run.pager._pages), flush=True)
manager.close()
print("closed", flush=True)
"""


@pytest.mark.parametrize(("where", "then"), [("forward", "closes"), ("backward", "goes on")])
def test_ctrl_c_from_outside_while_user_code_runs(tmp_path: Path, where: str, then: str) -> None:
    with started_python("-c", LOOP, where, tmp_path, then) as process:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        process.send_signal(signal.SIGINT)
        process.stdin.close()
        rest = process.stdout.read()
        assert process.wait() == 0, process.stderr.read()
    expected = ["interrupted", *(["went on 2 True"] if then == "goes on" else []), "closed"]
    assert rest.splitlines() == expected


def test_an_exception_of_another_thread_at_any_place_of_a_turn_leaves_it_to_others() -> None:
    turns = Turns()

    def use() -> None:
        with turns.turn():
            pass

    use()
    counter = Injector(-1, "thread")
    assert counter.run(use) is None
    for at in range(1, counter.count + 1):
        injector = Injector(at, "thread")
        assert isinstance(injector.run(use), Injected)
        other = threading.Thread(target=use, daemon=True)
        other.start()
        other.join(LONG_S)
        assert not other.is_alive(), injector.where
    assert counter.count > 10

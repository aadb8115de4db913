"""Ctrl-C in the middle of a step: the step is whole or as if it had never begun, and the manager can be used or closed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from e2e.processes import run_python, started_python


def test_ctrl_c_at_any_place_of_a_step_leaves_it_whole_or_untaken(tmp_path: Path) -> None:
    done = run_python("-m", "bad_input.interrupted", tmp_path, 60)
    lines = done.stdout.splitlines()
    assert lines[-1] == "finished", f"after {lines[-2:]}: {done.stderr}"
    assert sum(line.startswith("interrupted") for line in lines) > 30


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

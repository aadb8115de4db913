"""Probes swapper's changes of a process from inside: each probe is a process of its own, with and without SWAPPER_OFF.

    python process_probes.py DIRECTORY WORD...

runs those of these words, as forks of one process that has imported torch and nothing of swapper, and writes what each printed and
how it ended to DIRECTORY/results.json, by word and "on" or "off".
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH = 256


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def model_and_optimizer(kind: Any = torch.optim.SGD) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    return model, kind(model.parameters(), lr=0.1)


def offloaded(directory: Path, **places: str) -> tuple[Any, Any, Any]:
    """Return an open manager with a model, and its optimizer, of which one step was taken."""
    import swapper

    manager = swapper.SwapManager(directory, "8MiB" if places.get("params") == "nvme" else "64MiB")
    model, optimizer = manager.offload(*model_and_optimizer(), **places)
    train(model, optimizer)
    return manager, model, optimizer


def train(model: Any, optimizer: Any) -> None:
    model(torch.ones(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def catches(number: int) -> bool:
    """Whether the process has a handler of a signal, of whatever language."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def sigsegv(directory: Path) -> None:
    before = catches(signal.SIGSEGV)
    manager, model, _ = offloaded(directory, params="nvme", optimizer_state="nvme")
    say(before=before, handler=catches(signal.SIGSEGV), step=manager.step)
    first = model[0].weight
    with manager.gather(first, write=True):
        expected = first.detach().add_(1).clone()
    from e2e.twins import send_away

    send_away(manager)
    with torch._C.DisableTorchFunctionSubclass():
        address = first.data_ptr()
    content = ctypes.string_at(address, 4 * WIDTH)
    say(same=content == bytes(expected[0].numpy()))


def mapped_file(directory: Path) -> tuple[Path, Any]:
    """Return a file and the state_dict() of a model that is loaded from it."""
    import swapper

    directory.mkdir()
    model, path = torch.nn.Linear(WIDTH, WIDTH), directory / "model.pt"
    torch.save(model.state_dict(), path)
    return path, swapper.load(model, path).state_dict()


def sigbus(directory: Path) -> None:
    before = catches(signal.SIGBUS)
    path, state = mapped_file(directory)
    with torch._C.DisableTorchFunctionSubclass():
        address = state["weight"].data_ptr()
    say(before=before, handler=catches(signal.SIGBUS))
    os.truncate(path, 0)
    say(zeros=not any(ctypes.string_at(address, 4 * WIDTH * WIDTH)))


def save(directory: Path) -> None:
    import swapper

    path, state = mapped_file(directory)
    weight = torch.load(path)["weight"]
    try:
        torch.save(state, path)
        say(same=torch.equal(torch.load(path)["weight"], weight))
    except swapper.SwapperError as error:
        say(same=False, error=type(error).__name__)


def mallopt(directory: Path) -> None:
    from swapper.runtime.free_memory import anonymous_bytes, watch_free_memory

    watch = watch_free_memory(1 << 30)
    before = anonymous_bytes()
    tensors = [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(16)]
    while tensors:
        tensors.pop()  # the last one first: what is free is always at the end
    say(stays=(anonymous_bytes() - before) / (128 << 20))
    watch.end()


def mlock(directory: Path) -> None:
    import swapper

    def locked_kb() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmLck:")[1].split()[0])

    handle = swapper.AioHandle()
    try:
        tensor = handle.new_cpu_locked_tensor(1 << 18, torch.empty(0))
        say(locked=locked_kb() > 0, refused="", elements=tensor.numel())
    except swapper.IoError as error:
        say(locked=locked_kb() > 0, refused=str(error))


def signals(directory: Path) -> None:
    from swapper.runtime.interrupts import defer_signals

    reached = False
    try:
        with defer_signals:
            os.kill(os.getpid(), signal.SIGINT)
            reached = signal.getsignal(signal.SIGINT) is not None
    except KeyboardInterrupt:
        say(deferred=reached)


def sigusr1(directory: Path) -> None:
    manager, _, _ = offloaded(directory)
    say(handler=catches(signal.SIGUSR1), dump=bool(manager.dump()))
    os.kill(os.getpid(), signal.SIGUSR1)
    manager.close()
    say(went_on=True)


def watchdog(directory: Path) -> None:
    manager, _, _ = offloaded(directory)
    threads = [thread.name for thread in threading.enumerate()]
    say(thread="swapper-watchdog" in threads, handler=catches(signal.SIGUSR1))
    manager.close()


def fork(directory: Path) -> None:
    import swapper

    manager, model, _ = offloaded(directory, params="host")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reading, 1)
        try:
            model[0].weight.sum()
        except (RuntimeError, swapper.SwapperError) as error:
            say(error=type(error).__name__)
        os._exit(0)
    manager.close()
    try:
        swapper.SwapManager(directory, "64MiB", resume="discard").close()
        in_use = False
    except swapper.DirectoryError as error:
        in_use = "in use" in str(error)
    os.write(writing, b"x")
    say(child=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), in_use=in_use)


def at_end(directory: Path) -> None:
    """Ends with a snapshot under way and the manager open."""
    before = atexit._ncallbacks()
    manager, model, optimizer = offloaded(directory, params="nvme", optimizer_state="nvme")
    train(model, optimizer)
    manager.snapshot(directory / "snapshot.pt")
    say(callbacks=atexit._ncallbacks() - before)
    globals()["kept"] = manager, model, optimizer


def optimizers(directory: Path) -> None:
    import swapper

    manager, model, _ = offloaded(directory, params="host")
    say(hooks=len(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks))
    before = model[0].weight.detach().clone()
    model(torch.ones(4, WIDTH)).square().mean().backward()
    try:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        say(refused=False, changed=not torch.equal(model[0].weight, before))
    except swapper.StateError:
        say(refused=True, changed=not torch.equal(model[0].weight, before))
    manager.close()


def ddp(directory: Path) -> None:
    from torch.nn.parallel import distributed

    manager, _, _ = offloaded(directory, params="host")
    say(replaced=distributed._sync_module_states.__module__.startswith("swapper."))
    manager.close()


def everything(directory: Path) -> None:
    """Trains next to plain torch, and goes on with the run."""
    from e2e.twins import smallest_budget

    import swapper

    plain, plain_optimizer = model_and_optimizer(torch.optim.AdamW)
    places = {"params": "nvme", "optimizer_state": "nvme"}
    budget = smallest_budget(directory, *model_and_optimizer(torch.optim.AdamW), **places)
    for _ in range(2):
        with swapper.SwapManager(directory, budget, resume="auto") as manager:
            model, optimizer = manager.offload(*model_and_optimizer(torch.optim.AdamW), **places)
            for _ in range(3):
                train(model, optimizer)
                train(plain, plain_optimizer)
            same = []
            for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
                with manager.gather(actual):
                    same.append(torch.equal(actual, expected))
            say(same=all(same), step=manager.step)


PROBES = {
    probe.__name__: probe
    for probe in (sigsegv, sigbus, save, mallopt, mlock, signals, sigusr1, watchdog, fork, optimizers, ddp, everything)
} | {"atexit": at_end}


def main() -> None:
    """Run each probe in a forked process, which ends as any other does: by the end of its interpreter."""
    place, words, results = Path(sys.argv[1]), sys.argv[2:], {}
    gc.freeze()
    importlib.import_module("torch._dynamo")  # every optimizer does
    for word in words:
        for off in ("", ",".join(PROBES.keys() - {"everything"}) if word == "everything" else word):
            directory = place / f"{word}-{'off' if off else 'on'}"
            directory.mkdir()
            child = os.fork()
            if child == 0:
                file = os.open(directory / "output", os.O_WRONLY | os.O_CREAT)
                os.dup2(file, 1)
                os.dup2(file, 2)
                os.environ["SWAPPER_OFF"] = off
                PROBES[word](directory / "run")
                return
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output = (directory / "output").read_text()
            found: dict[str, Any] = {"code": code, "output": output}
            for line in output.splitlines():
                found |= json.loads(line) if line.startswith("{") else {}
            found["files"] = sorted(path.name for path in directory.glob("run/*.pt"))
            results[directory.name] = found
    (place / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()

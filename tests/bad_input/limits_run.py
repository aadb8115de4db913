"""Uses of swapper under limits of open files, addresses or threads, from nearly none on: python -m bad_input.limits_run LIMIT.

Prints a line for each try. A process of its own, since limits are the process'.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import swapper
from swapper.checkpoint import load, save
from swapper.checkpoint.exporting import export
from swapper.durability.verify import verify


def make_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))


def train(directory: Path) -> None:
    model = make_model()
    with swapper.SwapManager(directory / "run", host_memory="8MiB", resume="discard") as manager:
        optimizer: Any = torch.optim.AdamW(model.parameters())
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        with swapper.offload_activations(manager, min_bytes=1 << 16):
            model(torch.randn(400, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.stack([p.detach().norm() for p in model.parameters()])
        model.state_dict()["0.weight"].clone()
        optimizer.state_dict()["state"][0]["exp_avg"].clone()
        (directory / "snapshot.pt").unlink(missing_ok=True)
        manager.snapshot(directory / "snapshot.pt").wait()


def infer(directory: Path) -> None:
    model = swapper.load(make_model(), directory / "weights.pt", host_memory="2MiB")
    try:
        with torch.no_grad():
            model(torch.randn(2, 256))
        model.state_dict()["0.weight"].clone()
    finally:
        swapper.loaded(model).unload()


def checkpoints(directory: Path) -> None:
    save({"0.weight": torch.randn(256, 256)}, directory / "saved.pt")
    load(directory / "saved.pt", verify=True)
    verify(directory / "saved.pt")
    export(directory / "saved.pt", directory / "exported.safetensors", "safetensors", overwrite=True)


USES: dict[str, Callable[[Path], None]] = {"train": train, "infer": infer, "checkpoints": checkpoints}


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def addresses() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def become_somebody() -> None:
    """The limit of threads is a user's, and root has none: go on as a user who runs nothing else."""
    os.setgroups([])
    os.setresuid(*[60_000 + os.getpid() % 5000] * 3)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: or /proc/self is root's


LIMITS: dict[str, tuple[int, Callable[[], int], list[int]]] = {
    "files": (resource.RLIMIT_NOFILE, open_files, [-1, 1, 3, 6, 8, 32]),
    "addresses": (resource.RLIMIT_AS, addresses, [n << 20 for n in (0, 8, 24, 128)]),
    "threads": (resource.RLIMIT_NPROC, threads, [-64, 0, 1, 8]),  # threads that are about to end count as used
}


def run(limit: str) -> None:
    kind, used, steps = LIMITS[limit]
    before = resource.getrlimit(kind)
    for (name, use), more in itertools.product(USES.items(), steps):
        with in_directory() as directory:
            resource.setrlimit(kind, (max(used() + more, 1), before[1]))
            try:
                use(directory)
                print(f"{name} {limit} {more} OK", flush=True)
            except Exception as error:
                resource.setrlimit(kind, before)
                whose = "ours" if isinstance(error, swapper.SwapperError) else "RAW"
                where = "".join(traceback.format_tb(error.__traceback__)[-3:]) if whose == "RAW" else ""
                print(
                    f"{name} {limit} {more} {whose} {type(error).__name__}: {error}{where}".replace("\n", " "),
                    flush=True,
                )
            finally:
                resource.setrlimit(kind, before)


@contextmanager
def in_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        torch.save(make_model().state_dict(), Path(made) / "weights.pt")
        yield Path(made)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    for use in USES.values():
        with in_directory() as directory:
            use(directory)  # imports what it needs, and what is shared is made
    if sys.argv[1] == "threads":
        become_somebody()
    run(sys.argv[1])

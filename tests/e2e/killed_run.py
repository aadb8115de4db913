"""A run that is killed again and again, as a program: it trains, its parent kills it, the next one goes on.

Usage: killed_run.py DIRECTORY SEED KILLS [CODEC] [SECOND]. With SECOND, a directory, each run lies over two drives. With a state
codec ("8bit") the model is in bf16 with fp32 masters, the state is encoded, and what is expected is a run of swapper that nobody
killed. The parent has torch imported and forks each run, so that a kill costs little. A run writes a byte to a pipe at each forward
and backward of each layer and around each step; the parent kills it with SIGKILL a little after a random number of them, so the
kills fall anywhere in a step, with snapshots on their way, and every second time with the workers of a DataLoader alive. The runs
take turns over all placements of parameters, state and gradients, and all times of the updates, each in the smallest budget that
works; and after some kills somebody writes into a snapshot, which may be the very file that the run was to go on from. Whatever is
seen must equal a run of plain torch that nobody killed: losses, parameters, random numbers, and every snapshot that has its name.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import swapper
from e2e.keywords import for_manager
from e2e.twins import smallest_budget
from swapper.durability.verify import verify
from swapper.train.layout.state_codecs import PRESETS

STEPS = 12
WORDS = 512
BUDGET = "10MiB"
SNAPSHOT_STEPS = 3
"""From snapshot to snapshot."""
LONGEST_DELAY_S = 0.02
"""After the last tick, so that kills do not all fall on one."""


def make(dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(192, 192), nn.GELU())]
    model = nn.Sequential(nn.Embedding(WORDS, 192), *layers, nn.Linear(192, WORDS))
    if dropout:
        model.append(nn.Dropout(dropout))
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)


def batch(number: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(number))


def train_step(model: nn.Module, optimizer: Any, scheduler: Any, number: int, words: Any = None) -> float:
    words = batch(number) if words is None else words
    loss = cross_entropy(model(words).view(-1, WORDS), words.view(-1))
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.item()


def plain_losses(steps: int) -> list[float]:
    """Return the losses of the first steps in plain torch: those of a run that nothing harmed."""
    model, optimizer, scheduler = make()
    return [train_step(model, optimizer, scheduler, number) for number in range(steps)]


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, number: int) -> torch.Tensor:
        return batch(number)


def batches(begin: int, end: int, workers: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator()  # of its own: the loader must not draw from the one that training uses
    yield from DataLoader(
        Batches(), batch_size=None, sampler=range(begin, end), num_workers=workers, generator=generator
    )


def run(directory: Path, losses: Path, tick: Callable[[bytes], Any], steps: int = STEPS, **options: Any) -> None:
    """Train to the end, from wherever the last run was committed."""
    workers = options.pop("workers", 0)
    options = {"host_memory": BUDGET, **options}
    placed = {"params": "nvme", "optimizer_state": "nvme"}
    kinds = (*placed, "gradients", "update", "state_codec", "master_weights")
    placed |= {name: options.pop(name) for name in kinds if name in options}
    keep = options.pop("keep", 2)
    drives = [directory, *options.pop("others", ())]
    model, optimizer, scheduler = make(0.1, torch.bfloat16 if "master_weights" in placed else torch.float32)
    warnings.simplefilter("ignore")  # the first layer's backward hook has no gradient to look at
    for module in model:
        module.register_forward_hook(lambda *_: tick(b"f") and None)
        module.register_full_backward_hook(lambda *_: tick(b"b") and None)
    with swapper.SwapManager(drives, resume="auto", rng=True, **for_manager(options)) as manager:
        model, optimizer = manager.offload(model, optimizer, **placed)
        manager.register(scheduler=scheduler)
        tick(b"o")
        with losses.open("a") as log:
            for words in batches(manager.step, steps, workers):
                number = manager.step
                assert manager.extra.get("step", 0) == number
                log.write(f"{number} {train_step(model, optimizer, scheduler, number, words).hex()}\n")
                log.flush()
                manager.extra["step"] = manager.step
                tick(b"s")
                path = directory / f"step-{manager.step}.pt"
                if manager.step % SNAPSHOT_STEPS == 0 and not path.exists():
                    manager.snapshot(path, keep=keep)
        final = directory / "final.pt"
        if not final.exists():
            manager.snapshot(final)


class Expected:
    """The run that nobody killed."""

    def __init__(self, steps: int = STEPS) -> None:
        model, optimizer, scheduler = make(dropout=0.1)
        self.steps = steps
        self.losses: list[float] = []
        self.models: list[dict[str, torch.Tensor]] = []
        for number in range(steps + 1):
            self.models.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            if number < steps:
                self.losses.append(train_step(model, optimizer, scheduler, number))
        self.optimizer = optimizer.state_dict()
        self.masters: dict[str, Any] = {}

    def check(self, directory: Path, losses: Path) -> None:
        """Assert that a run which came to its end, however often it was killed, is the same."""
        seen = [line.split() for line in losses.read_text().splitlines()]
        for number, loss in seen:
            assert float.fromhex(loss) == self.losses[int(number)], f"step {number} differs after a kill"
        assert {int(number) for number, _ in seen} == set(range(self.steps))
        final = torch.load(directory / "final.pt", weights_only=True)
        assert final["registered"]["scheduler"]["last_epoch"] == self.steps
        assert final["extra"] == {"step": self.steps}
        for number, state in self.optimizer["state"].items():
            for name, value in state.items():
                assert is_same(final["optimizer"]["state"][number][name], value), f"{name} differs after kills"
        assert is_same(final.get("master", {}), self.masters), "masters differ after kills"
        self.check_snapshots(directory)

    def check_snapshots(self, directory: Path) -> None:
        """Assert that whatever has a snapshot's name is whole, and what it says it is."""
        for path in directory.glob("*.pt"):
            assert verify(path)[0].faults == [], path
            state = torch.load(path, weights_only=True)
            for name, tensor in self.models[state["swapper"]["step"]].items():
                assert torch.equal(state["model"][name], tensor), f"{name} differs in {path}"


class ExpectedOfRun(Expected):
    """A run with a state codec that nobody killed, all in memory."""

    def __init__(self, directory: Path, codec: str) -> None:
        directory.mkdir()
        self.steps = STEPS
        options = {
            "params": "host",
            "optimizer_state": "host",
            "host_memory": "1GiB",
            "keep": None,
            **codec_options(codec),
        }
        child = fork(lambda: run(directory, directory / "losses", lambda _: None, **options))
        assert os.waitpid(child, 0)[1] == 0
        self.losses = [float.fromhex(line.split()[1]) for line in (directory / "losses").read_text().splitlines()]
        states = {path.name: torch.load(path, weights_only=True) for path in directory.glob("*.pt")}
        self.models = {state["swapper"]["step"]: state["model"] for state in states.values()}  # type: ignore[assignment]
        self.optimizer = states["final.pt"]["optimizer"]
        self.masters = states["final.pt"]["master"]
        shutil.rmtree(directory)


def codec_options(codec: str) -> dict[str, Any]:
    """Return the options of `offload` for a codec: with one there are masters."""
    return {} if codec == "exact" else {"state_codec": codec, "master_weights": torch.float32}


def is_same(one: Any, other: Any) -> bool:
    """Return whether two tensors, or two dictionaries with codes, are the same."""
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in other)
    return torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


def fork(work: Callable[[], Any]) -> int:
    """Do `work` in a child, which exits with 1 if it raises; returns its number."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def run_and_kill(directory: Path, losses: Path, after: int, delay_s: float, **options: Any) -> bool:
    """Fork a run and kill it after this number of its ticks. Returns True if it was killed, False if it came to its end before."""
    reader, writer = os.pipe()
    child = fork(lambda: (os.close(reader), run(directory, losses, lambda what: os.write(writer, what), **options)))
    os.close(writer)
    while after > 0 and (seen := os.read(reader, after)):
        after -= len(seen)
    if not after:
        time.sleep(delay_s)  # chance, not synchronisation
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reader)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) != 0:
        raise SystemExit("a run failed")
    return os.WIFSIGNALED(status)


def find_kinds(directory: Path, codec: str = "exact") -> list[dict[str, Any]]:
    """Return options of `run` for all placements and update times that there are, with the smallest budget of each."""
    kinds = []
    names = ("params", "optimizer_state", "gradients", "update")
    for values in product(("nvme", "host"), ("nvme", "host"), ("nvme", "host"), ("step", "deferred", "backward")):
        kind = {**dict(zip(names, values, strict=True)), **codec_options(codec)}
        place = directory / "-".join(values)
        place.mkdir()
        model, optimizer, _ = make(0.1, torch.bfloat16 if "master_weights" in kind else torch.float32)
        try:
            budget = smallest_budget(place, model, optimizer, **kind)
        except (swapper.ConfigError, swapper.UnsupportedError):
            continue  # of which there is none: gradients on NVMe of parameters in memory
        finally:
            shutil.rmtree(place)
        # Where something is in memory a commit takes writes of its own, so that none is made unless it is asked for.
        commit = {"commit_every": 1} if "host" in values[:2] else {}
        kinds.append({**kind, "host_memory": budget, **commit})
    return kinds


def harm_snapshot(directory: Path, chance: random.Random) -> bool:
    """Cut off one of the snapshots, or overwrite a part of it, and take its name away; returns False if there is none to harm."""
    paths = sorted(directory.glob("step-*.pt"))
    if not paths or not os.access(paths[0], os.W_OK):  # root may, whatever the mode says
        return False
    path = chance.choice(paths)
    with path.open("r+b") as file:
        if chance.randrange(2):
            file.truncate(chance.randrange(path.stat().st_size))
        else:
            file.seek(chance.randrange(path.stat().st_size))
            file.write(os.urandom(100_000))
    if chance.randrange(2):
        path.unlink()
    else:
        path.rename(path.with_suffix(".harmed"))
    return True


def main(directory: Path, seed: int, kills: int, second: Path | None = None, codec: str = "exact") -> None:
    torch.set_num_threads(1)
    swapper.SwapManager  # noqa: B018  # imported here and not in every child
    expected = Expected() if codec == "exact" else ExpectedOfRun(directory / "expected", codec)
    chance = random.Random(seed)
    kinds = find_kinds(directory, codec)
    chance.shuffle(kinds)
    share = -(-kills // len(kinds))
    killed = runs = harmed = 0
    while killed < kills:
        kind = kinds[runs % len(kinds)]
        most = min(killed + share, kills)  # then the run comes to its end
        place = directory / f"run-{runs}"
        others = [] if second is None else [second / f"run-{runs}"]
        for path in (place, *others):
            path.mkdir()
        while run_and_kill(
            place,
            place / "losses",
            chance.randrange(1, 60) if killed < most else 1 << 30,
            LONGEST_DELAY_S * chance.random(),
            workers=2 * chance.randrange(2),
            others=others,
            **kind,
        ):
            killed += 1
            harmed += chance.randrange(4) == 0 and harm_snapshot(place, chance)
        expected.check(place, place / "losses")
        for path in (place, *others):
            shutil.rmtree(path)
        runs += 1
        print(f"{killed} kills, the last of {kind}", file=sys.stderr, flush=True)
    print(f"{killed} kills, {harmed} snapshots harmed, {runs} runs of {len(kinds)} kinds, all exact")


if __name__ == "__main__":
    more = sys.argv[4:]
    choice = {"codec" if word in PRESETS else "second": word if word in PRESETS else Path(word) for word in more}
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), **choice)

"""Trains a byte-level GPT that FSDP2 has sharded, plain or swapped, as one of several ranks; and starts these ranks.

As a script it is one rank, with torchrun's variables in its environment:

    RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 python -m swapper.bench.sharded '{"meeting": ..., "steps": 20, ...}'

It prints a line of JSON after each step, and one at the end: digests of its shards and their optimizer state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

import swapper
from swapper.bench.measure import PeakMemory
from swapper.bench.plain import Corpus, Gpt, GptConfig, make_gpt, make_optimizer
from swapper.errors import StateError


class StartedRanks:
    """The processes of the ranks of one job, which end with the context at the latest.

    Args:
        ranks: how many.
        order: of the script; `meeting` is added, a new file in `directory`.
        directory: exists.
    """

    def __init__(self, ranks: int, order: dict[str, object], directory: Path) -> None:
        self._ranks, self._order, self._directory = ranks, order, directory
        self._processes: list[subprocess.Popen[str]] = []
        self._errors: list[IO[str]] = []

    def __enter__(self) -> StartedRanks:
        try:
            meeting = tempfile.mktemp(prefix="meeting-", dir=self._directory)
            order = json.dumps({**self._order, "meeting": meeting})
            threads = str(max((os.cpu_count() or 1) // self._ranks, 1))
            for rank in range(self._ranks):
                variables = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(self._ranks),
                    "LOCAL_WORLD_SIZE": str(self._ranks),
                    "OMP_NUM_THREADS": threads,
                }
                self._errors.append(tempfile.TemporaryFile("w+"))
                process = subprocess.Popen(
                    [sys.executable, "-m", "swapper.bench.sharded", order],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=self._errors[-1],
                    text=True,
                    env={**os.environ, **variables},
                    start_new_session=True,  # Ctrl-C comes to the one that started them, which ends them
                )
                self._processes.append(process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def lines(self, rank: int) -> Iterator[dict[str, Any]]:
        """Yield what a rank prints, until it ends."""
        output = self._processes[rank].stdout
        assert output is not None
        for line in output:
            yield json.loads(line)

    def kill(self) -> None:
        """Kill all ranks, wherever they are."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def check(self) -> None:
        """Wait for the end of all ranks. Raises StateError: one has failed; has what it said."""
        for rank, process in enumerate(self._processes):
            if process.wait() != 0:
                self._errors[rank].seek(0)
                said = [line for line in self._errors[rank].read().splitlines() if line.strip()] or ["it said nothing"]
                raise StateError(f"rank {rank} of {self._ranks} ended with {process.returncode}: {said[-1]}")

    def __exit__(self, *_: object) -> None:
        self.kill()
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.close()
        for file in self._errors:
            file.close()


def shard(model: Gpt, masters: bool) -> Gpt:
    """Shard `model`, in fp32, by FSDP2 over all ranks. `masters`: it computes in bf16, so that the shards are the fp32 masters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if masters else MixedPrecisionPolicy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def train(order: dict[str, Any], rank: int, ranks: int) -> None:
    """Train from wherever the run was committed, to the end.

    Args:
        order: "config", "masters", "steps", "batch", "learning_rate"; and "directory" and "host_memory" if it is swapped. With
            "snapshots", a directory, a snapshot is taken there before every second step, and one at the end.
    """
    config, corpus = GptConfig(**order["config"]), Corpus(order["config"]["vocabulary"])
    torch.manual_seed(0)
    model: Any = shard(make_gpt(config, torch.float32), order["masters"])
    optimizer: Any = make_optimizer(model.parameters(), order["learning_rate"])
    with contextlib.ExitStack() as stack:
        manager, begin = None, 0
        if "directory" in order:
            manager = stack.enter_context(
                swapper.SwapManager(order["directory"], host_memory=order["host_memory"], resume="auto")
            )
            model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
            begin = manager.step
        memory = stack.enter_context(PeakMemory())
        say({"begun": begin}) if rank == 0 else None
        for number in range(begin, order["steps"]):
            before = (0, 0) if manager is None else (manager.counters.bytes_read, manager.counters.bytes_written)
            ticket, called_s = None, time.perf_counter()
            if manager is not None and "snapshots" in order and number % 2:
                ticket = manager.snapshot(Path(order["snapshots"], f"step-{number}"))
            began_s = time.perf_counter()
            loss = model(*corpus.batch(number * ranks + rank, order["batch"], config.context))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            row = {"step": number, "loss": loss.item(), "seconds": time.perf_counter() - began_s}
            if manager is not None:
                counters = manager.counters
                row |= {"read": counters.bytes_read - before[0], "written": counters.bytes_written - before[1]}
            if ticket is not None:
                row |= {"call": began_s - called_s, "is_done": ticket.done}
                ticket.wait()
            say(row) if rank == 0 else None
        if manager is not None and "snapshots" in order:
            manager.snapshot(Path(order["snapshots"], "last")).result()
        growth_bytes = memory.growth_bytes
        found = digests(model, optimizer)
    total_bytes = 0 if manager is None else manager.counters.bytes_written  # closed: all is written
    say({"digests": found, "growth": growth_bytes, "total_written": total_bytes})


def digests(model: Any, optimizer: Any) -> dict[str, str]:
    """Return a digest of each of this rank's shards, and of what the optimizer keeps for it."""
    found = {}
    for name, parameter in model.named_parameters():
        values = {"": parameter, **optimizer.state[parameter]}
        for key, value in values.items():
            local = value.to_local() if hasattr(value, "to_local") else value
            found[f"{name} {key}"] = hashlib.sha256(local.detach().contiguous().numpy().tobytes()).hexdigest()
    return found


def say(row: dict[str, object]) -> None:
    print(json.dumps(row), flush=True)


def main(order: dict[str, object]) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{order['meeting']}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    train(order, rank, ranks)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

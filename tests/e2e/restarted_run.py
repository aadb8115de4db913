"""A rank of a job that torchrun starts again when one dies: examples/fsdp.py in small. The last rank kills itself once.

Usage: restarted_run.py DIRECTORY STEPS KILLED_AT [RESUME]        prints each step's loss by rank; 0: nobody dies
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import swapper
from e2e.fsdp_run import make, train


def main(directory: Path, steps: int, killed_at: int, resume: str = "auto") -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dies = killed_at and rank == dist.get_world_size() - 1 and not restarts
    model, optimizer = make({})
    try:
        manager = swapper.SwapManager(directory, host_memory="8MiB", resume=resume)
    except swapper.DirectoryError as error:
        os.write(1, f"rank {rank}, refused: {error}\n".encode())
        raise
    with manager:
        _, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        if restarts or resume == "reshard":
            os.write(1, f"rank {rank}, restart {restarts}: {manager.step}\n".encode())
        for step in range(manager.step, steps):
            if dies and step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = train(model, optimizer, {}, None, step).item()
            os.write(1, f"rank {rank}, step {step}: {loss!r}\n".encode())  # at once: both ranks write there
        total = sum(parameter.full_tensor().double().sum().item() for parameter in model.parameters())
        os.write(1, f"rank {rank}, end: {total!r}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]), *sys.argv[4:])

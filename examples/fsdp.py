"""Trains a byte-level GPT that FSDP2 shards over several processes. Each has its shards on a drive, in an ordinary loop.

    torchrun --nproc-per-node 2 examples/fsdp.py --directory /nvme/run

Run it again with `--resume`, also after a kill: it resumes from the newest step that all processes have committed. So does
`torchrun --max-restarts 3`, which starts all processes again when one dies. At the end they write one snapshot, in place of that
of an earlier run: a directory that plain torch.distributed.checkpoint reads.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import swapper
from swapper.bench.plain import Corpus, Gpt, GptConfig


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="for the swap files; on an NVMe drive")
    parser.add_argument(
        "--budget", default="96MB", help="host memory for swapper, of each process (default: %(default)s)"
    )
    parser.add_argument("--parameters", type=int, default=30_000_000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=2, help="of each process")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--resume", action="store_true", help="continue the run in the directory")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    corpus = Corpus()
    model = Gpt(GptConfig.for_parameters(options.parameters, vocabulary=256, context=options.context))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # of torchrun, after a process died
    resume = "auto" if options.resume or is_restart else "discard"
    with swapper.SwapManager(options.directory, host_memory=options.budget, resume=resume) as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        for number in range(manager.step, options.steps):
            tokens, targets = corpus.batch(number * ranks + rank, options.batch, options.context)
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"step {number + 1:3}  loss {loss.item():.3f}  {manager.stats().brief}")
        snapshot = options.directory / "snapshot"
        if rank == 0:
            shutil.rmtree(snapshot, ignore_errors=True)  # of an earlier run; a snapshot never replaces anything
        dist.barrier()
        manager.snapshot(snapshot)
        if rank == 0:
            print(manager.stats())
            print(f"written: {snapshot}, which torch.distributed.checkpoint.load reads on any number of processes")
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Interrupted: the same command with --resume continues after the last step.") from None

"""Trains a byte-level GPT whose parameters and optimizer state live on a drive, in an ordinary loop.

    python examples/train.py --directory /nvme/run

The model lives in the directory's swap files; within `--budget` host memory holds its gradients and the pages in use. Stop it
with Ctrl-C, or kill it: the same command continues after its last step. At the end it writes a snapshot, in place of that of an
earlier run, and plain torch opens it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import swapper
from swapper.bench.plain import Corpus, Gpt, GptConfig


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="for the swap files; on an NVMe drive")
    parser.add_argument("--budget", default="128MB", help="host memory for swapper (default: %(default)s)")
    parser.add_argument("--parameters", type=int, default=30_000_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    corpus = Corpus()
    config = GptConfig.for_parameters(options.parameters, vocabulary=256, context=options.context)
    torch.manual_seed(0)
    model = Gpt(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    with swapper.SwapManager(options.directory, host_memory=options.budget, resume="auto") as manager:
        model, optimizer = manager.offload(
            model, optimizer, params="nvme", optimizer_state="nvme", master_weights=torch.float32
        )
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
        manager.register(scheduler=scheduler)
        if manager.step:
            print(f"continues after step {manager.step}; with another --directory a new run begins")
        for number in range(manager.step, options.steps):
            tokens, targets = corpus.batch(number, options.batch, options.context)
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"step {number + 1:3}  loss {loss.item():.3f}  {manager.stats().brief}")

        with torch.no_grad():
            loss = model(*corpus.batch(0, options.batch, options.context, validation=True))
            print(f"held out  loss {loss.item():.3f}")
        snapshot = options.directory / "snapshot.pt"
        snapshot.unlink(missing_ok=True)  # a snapshot never replaces a file
        manager.snapshot(snapshot)
        print(manager.stats())
        moved = manager.counters
        print(f"moved: {moved.bytes_read / 1e9:.1f} GB read, {moved.bytes_written / 1e9:.1f} GB written")

    state = torch.load(snapshot, mmap=True)  # plain torch; no converter
    model = Gpt(config).to(torch.bfloat16)
    model.load_state_dict(state["model"])
    with torch.no_grad():
        loss = model(*corpus.batch(0, options.batch, options.context, validation=True))
    print(f"held out  loss {loss.item():.3f} in plain torch, which opened {snapshot} as it is")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(
            "Interrupted: the same command continues after the last step; to remove the run, delete its directory"
        ) from None

"""A small ZeRO training, by DeepSpeed alone: nothing in here knows swapper.

zero_training.py CONFIGURATION [RENAMES]      a part of DeepSpeed's configuration, as JSON; files go to the present directory

Several ranks by torchrun. It prints each rank's loss of each step. A checkpoint is saved after two steps and loaded after four,
and two steps are taken "again"; then it prints a digest of all parameters. With RENAMES the checkpoint's files lose what
DeepSpeed's fast writer appends to their names, with which its own loader does not find them.
"""

import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

ALONE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
LAUNCHER = {"CROSS_SIZE": "1", "CROSS_RANK": "0"}
"""What DeepSpeed's own launcher sets beyond torchrun, and its fast writer asks for."""
PLACE = "checkpoints"
WIDTH = int(os.environ.get("ZERO_TRAINING_WIDTH", "512"))


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(one[key], other[key]) for key in one.keys() & other.keys() if isinstance(other[key], dict)}
    return {**one, **other, **both}


def digest(engine: Any) -> str:
    """Return one of this rank's parameters, whole, and of its optimizer's state in memory."""
    import deepspeed

    found = hashlib.sha256()
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main(configuration: dict[str, Any], renames: bool) -> None:
    os.environ.update({**ALONE, **LAUNCHER, **os.environ})
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo's sums are as good, and need no compiler
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = {
        "train_batch_size": 4 * ranks,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"sub_group_size": 300_000},
        "zero_force_ds_cpu_optimizer": False,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True},
    }
    torch.manual_seed(0)
    layers = (layer for _ in range(8) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()))
    model = torch.nn.Sequential(*layers)
    config = merged(config, configuration)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def say(text: str) -> None:
        os.write(1, f"{text}\n".encode())  # at once: all ranks write there

    def train(first: int, last: int, word: str) -> None:
        for step in range(first, last):
            torch.manual_seed(100 * step + rank)
            inputs = torch.randn(4, WIDTH, dtype=torch.bfloat16)
            loss = (engine(inputs).float() - inputs.float().flip(1)).pow(2).mean()
            engine.backward(loss)
            engine.step()
            say(f"{word} {rank} {step} {loss.item()!r}")

    train(0, 2, "loss")
    engine.save_checkpoint(PLACE, tag="two")
    train(2, 4, "loss")  # which finishes a checkpoint that a process of its own writes
    torch.distributed.barrier()
    for path in Path(PLACE).rglob("*.pt-*") if renames and rank == 0 else ():
        path.rename(path.with_name(re.sub(r"-\d+\.\d+$", "", path.name)))
    torch.distributed.barrier()
    say(f"loaded {rank} {engine.load_checkpoint(PLACE, tag='two')[0]}")
    train(2, 4, "again")
    say(f"digest {rank} {digest(engine)}")
    engine.destroy()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(
        0
    )  # threads of torch's other groups abort a process that ends on a busy machine ("terminate called without ...")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:] == ["RENAMES"])

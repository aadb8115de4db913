"""A small ZeRO-3 training with its optimizer state on NVMe, by DeepSpeed alone: nothing in here knows swapper.

python zero3_training.py DIRECTORY none|plain|pipelined       prints each rank's loss of each step; "none" keeps the state in memory

Several ranks by torchrun. A checkpoint is taken after two steps and loaded after four, and two steps are taken "again".
"""

import os
import sys

import torch

alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ.update({**alone, **os.environ})
import deepspeed  # noqa: E402

directory, kind = sys.argv[1:]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
config = {
    "train_batch_size": 4 * ranks,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 3, "sub_group_size": 300_000, "offload_optimizer": {"device": "none"}},
    "aio": {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True},
}
if kind != "none":
    pipelined = kind == "pipelined"
    config["zero_optimization"]["offload_optimizer"] = {
        "device": "nvme", "nvme_path": directory, "buffer_count": 12 if pipelined else 4,
        "pipeline_read": pipelined, "pipeline_write": pipelined,
    }  # fmt: skip
else:
    config["zero_force_ds_cpu_optimizer"] = False
torch.manual_seed(0)
model = torch.nn.Sequential(*[layer for _ in range(8) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())])
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)


def train(first: int, last: int, word: str = "loss") -> None:
    for step in range(first, last):
        torch.manual_seed(100 * step + rank)
        inputs = torch.randn(4, 512, dtype=torch.bfloat16)
        loss = (engine(inputs).float() - inputs.float().flip(1)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        os.write(1, f"{word} {rank} {step} {loss.item()!r}\n".encode())  # at once: all ranks write there


train(0, 2)
engine.save_checkpoint(directory + "/checkpoints", tag="two")
train(2, 4)
engine.load_checkpoint(directory + "/checkpoints", tag="two")
train(2, 4, "again")

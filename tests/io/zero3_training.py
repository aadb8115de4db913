"""A small ZeRO-3 training with its optimizer state on NVMe, by DeepSpeed alone: nothing in here knows swapper.

python zero3_training.py DIRECTORY none|plain|pipelined       prints one loss a line; "none" keeps the state in memory
"""

import os
import sys

import torch

os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
os.environ.setdefault("MASTER_PORT", "29511")
import deepspeed

directory, kind = sys.argv[1:]
offload = {"device": "none"}
if kind != "none":
    pipelined = kind == "pipelined"
    offload = {
        "device": "nvme", "nvme_path": directory, "buffer_count": 12 if pipelined else 4,
        "pipeline_read": pipelined, "pipeline_write": pipelined,
    }  # fmt: skip
config = {
    "train_batch_size": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 3, "sub_group_size": 200_000, "offload_optimizer": offload},
    "aio": {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True},
}
if kind == "none":
    config["zero_force_ds_cpu_optimizer"] = False
torch.manual_seed(0)
model = torch.nn.Sequential(*[layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())])
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(4):
    torch.manual_seed(step)
    inputs = torch.randn(4, 256, dtype=torch.bfloat16)
    loss = (engine(inputs).float() - inputs.float().flip(1)).pow(2).mean()
    engine.backward(loss)
    engine.step()
    print("loss", loss.item(), flush=True)
swapped = sum(len(files) for _, _, files in os.walk(directory))
print("swapped files:", swapped)

"""Runs the training of tools/bench_train in DeepSpeed: ZeRO-3, optimizer state on NVMe, pipelined.

    python train_deepspeed.py SETTINGS.json FIGURES.json

bench_train --deepspeed runs it in an environment that has DeepSpeed and its aio operator. From swapper it uses the
model, the text and the memory gauge, which do not use its engine. Settings that work on one CPU process: buffer_count
12 pipelined.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DS_ACCELERATOR="cpu")
os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import deepspeed  # type: ignore[import-not-found]
import torch

from swapper.bench.measure import PeakMemory
from swapper.bench.plain import Corpus, GptConfig, make_gpt

SUB_GROUP_PARAMETERS = 30_000_000


def main(settings_path: Path, figures_path: Path) -> None:
    settings = json.loads(settings_path.read_text())
    torch.set_num_threads(settings["threads"])
    gpt = GptConfig(**settings["gpt"])
    batch, corpus = settings["batch"], Corpus(gpt.vocabulary)
    config = {
        "train_batch_size": batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": settings["learning_rate"], "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": SUB_GROUP_PARAMETERS,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": settings["directory"],
                "buffer_count": 12,
                "pipeline_read": True,
                "pipeline_write": True,
            },
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True},
    }
    losses, times_s = [], []
    with PeakMemory() as memory:
        torch.manual_seed(0)
        model = make_gpt(gpt, torch.bfloat16)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        for number in range(settings["steps"]):
            tokens, targets = corpus.batch(number, batch, gpt.context)
            began_s = time.perf_counter()
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            times_s.append(time.perf_counter() - began_s)
            losses.append(loss.item())
    figures = {
        "losses": losses,
        "times_s": times_s,
        "growth_bytes": memory.growth_bytes,
        "version": deepspeed.__version__,
    }
    figures_path.write_text(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Runs the forward of tools/bench_infer in DeepSpeed: ZeRO-Inference, stage 3 with parameters on NVMe.

    python infer_deepspeed.py SETTINGS.json FIGURES.json

bench_infer --deepspeed runs it in an environment that has DeepSpeed and its aio operator. From swapper it uses the
model and the memory gauge. DeepSpeed keeps its own copy of the weights in `directory`, written before the first pass.
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
from swapper.bench.plain import Gpt, GptConfig


def load_file(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, in memory, without the safetensors library."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[begin:]
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        low, high = entry["data_offsets"]
        tensors[name] = data[low:high].clone().view(torch.bfloat16).view(entry["shape"])
    return tensors


def main(settings_path: Path, figures_path: Path) -> None:
    settings = json.loads(settings_path.read_text())
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 100_000_000,
            "stage3_max_reuse_distance": 0,
            "offload_param": {
                "device": "nvme",
                "nvme_path": settings["directory"],
                "pin_memory": False,
                "buffer_count": 6,
                "buffer_size": settings["largest_parameter"],
            },
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True},
    }
    tokens = torch.tensor(settings["tokens"])
    with PeakMemory() as memory, torch.no_grad():
        with torch.device("meta"):
            model = Gpt(GptConfig(**settings["gpt"])).to(torch.bfloat16).eval()
        model.load_state_dict(load_file(Path(settings["weights"])), assign=True)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        engine.eval()
        passes = []
        for _ in range(settings["passes"] + 1):
            began_s, cpu_s = time.perf_counter(), time.process_time()
            output = engine(tokens)
            passes.append((time.perf_counter() - began_s, time.process_time() - cpu_s))
    torch.save(output.clone(), figures_path.with_suffix(".logits"))
    figures = {
        "passes_s": [seconds for seconds, _ in passes[1:]],
        "pass_s": sorted(seconds for seconds, _ in passes[1:])[len(passes[1:]) // 2],
        "pass_cpu_s": sorted(cpu_s for _, cpu_s in passes[1:])[len(passes[1:]) // 2],
        "growth_bytes": memory.growth_bytes,
        "version": deepspeed.__version__,
        "output": str(figures_path.with_suffix(".logits")),
    }
    figures_path.write_text(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

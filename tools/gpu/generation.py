"""Measures generation by a model of 6.7 billion parameters in a small part of the device's memory, against link and drive.

One sequence, no batch: each token is a pass over all weights, in bf16 or in fewer bits. accelerate's `device_map="auto"` generates
with the same budgets.
"""

from __future__ import annotations

import gc
import importlib.util
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import swapper
from gpu.bench import Bench, Row, check_equal, each
from gpu.copies import link_rates
from gpu.inference import drive_rate

GB = 10**9


@dataclass(frozen=True)
class Way:
    """Where weights are.

    Attributes:
        title: in the table.
        bar: of the bytes a second of the link, or of the slower of drive and link.
        host_bytes: of the budget; None: all weights are in host memory.
        bits: how weights are quantized; None: they are not.
        tokens: to generate.
    """

    title: str
    bar: float
    host_bytes: int | None = None
    bits: str | None = None
    tokens: int = 12


WAYS = {
    "host": Way("from host memory", 0.97),
    "nvme": Way("from the drive, 4 GB of host memory", 0.97, 4 * GB, tokens=3),
    "int8": Way("from host memory, int8", 0.97, bits="int8"),
    "int4": Way("from host memory, int4", 0.97, bits="int4"),
}
DEVICE_BYTES = 2 * GB


def figures_of(name: str) -> tuple[str, ...]:
    ours = f"7 B, tokens {WAYS[name].title}"
    return (ours,) if WAYS[name].bits else (ours, f"{ours}: accelerate's")


def generation(name: str, bench: Bench) -> Iterator[Row]:
    lacking = [module for module in ("transformers", "accelerate") if importlib.util.find_spec(module) is None]
    if lacking:
        yield from (Row(figure, reason=f"{lacking[0]} is not installed", is_open=True) for figure in figures_of(name))
        return
    way, (ours, *theirs) = WAYS[name], figures_of(name)
    with tempfile.TemporaryDirectory(dir=bench.directory, prefix="swapper-gpu-check-") as place, torch.no_grad():
        path = Path(place) / "model"
        expected = write_model(bench, path, way)
        if way.bits:
            swapper.checkpoint.export(path, Path(place) / way.bits, "huggingface", quantize=way.bits)
            (path / "config.json").rename(Path(place) / way.bits / "config.json")
            path = Path(place) / way.bits
        yield from each(
            ((ours,), lambda: [by_swapper(bench, way, path, expected, ours)]),
            *(((figure,), lambda: [by_accelerate(bench, way, path, expected, theirs[0])]) for figure in theirs),
        )


def write_model(bench: Bench, path: Path, way: Way) -> torch.Tensor:
    """Write a model with its weights, and return what it generates on the device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config_of(bench), dtype=torch.bfloat16).eval()
    model.save_pretrained(path)
    expected = generate(bench, model, bench.size(way.tokens, 2))[0]
    del model
    gc.collect()
    return expected


def config_of(bench: Bench) -> Any:
    from transformers import LlamaConfig

    layers, width, hidden, heads, vocabulary = (
        (3, 128, 256, 2, 512) if bench.is_rehearsal else (bench.size(32, 0), 4096, 11008, 32, 32000)
    )
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=hidden,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def generate(bench: Bench, model: Any, count: int) -> tuple[torch.Tensor, float]:
    """Return `count` tokens after a short prompt, int64 of shape (count,), and the seconds that each has taken."""
    prompt = torch.arange(1, 9, device=bench.device)[None]
    bench.synchronize()
    begin = time.perf_counter()
    text = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    bench.synchronize()
    return text[0, prompt.shape[1] :], (time.perf_counter() - begin) / count


def by_swapper(bench: Bench, way: Way, path: Path, expected: torch.Tensor, figure: str) -> Row:
    from transformers import LlamaForCausalLM

    from swapper.integrations.transformers import from_pretrained

    nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    host_bytes = way.host_bytes or 2 * nbytes + GB // 4
    options: dict[str, Any] = {} if bench.on_cpu else {"device": "cuda", "device_memory": DEVICE_BYTES}
    model = from_pretrained(LlamaForCausalLM, path, host_memory=host_bytes, dtype=torch.bfloat16, **options)
    loaded = swapper.loaded(model)
    generate(bench, model, 2)  # the first pass reads everything, the second knows the order
    before = loaded.counters.uploaded_bytes
    count = bench.size(way.tokens, 1)
    tokens, token_s = generate(bench, model, count)
    copied = (loaded.counters.uploaded_bytes - before) / count
    read = loaded.read_bytes_a_pass
    loaded.unload()
    if not way.bits:
        check_equal(tokens, expected[:count], figure)
    link = link_rates(bench)[0]
    limit_s = max(copied / link, read / drive_rate(bench, next(path.glob("*.safetensors"))))
    found = limit_s / token_s
    number = (
        f"{found:.3f} ({1 / token_s:.2f} tokens/s; {copied / GB:.2f} GB copied and {read / GB:.2f} GB read for each)"
    )
    return Row(figure, f"{way.bar} of the slower of link and drive", number, found >= way.bar)


def by_accelerate(bench: Bench, way: Way, path: Path, expected: torch.Tensor, figure: str) -> Row:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import LlamaForCausalLM

    with init_empty_weights():
        model = LlamaForCausalLM(config_of(bench)).eval()
    memory: dict[int | str, int | str] = {"cpu": way.host_bytes or 1000 * GB}
    if not bench.on_cpu:
        memory[0] = DEVICE_BYTES
    model = load_checkpoint_and_dispatch(
        model,
        path,
        device_map="auto",
        max_memory=memory,
        no_split_module_classes=["LlamaDecoderLayer"],
        offload_folder=path / "offload",
        dtype=torch.bfloat16,
    )
    generate(bench, model, 1)
    tokens, token_s = generate(bench, model, bench.size(min(way.tokens, 3), 2))
    is_equal = torch.equal(tokens.cpu(), expected[: len(tokens)].cpu())
    return Row(figure, "", f"{1 / token_s:.2f} tokens/s{'' if is_equal else ', other tokens'}")

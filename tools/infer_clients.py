"""Measures clients that generate with one model whose weights are on NVMe: together, and one after the other.

A part of tools/bench_infer (`--clients`). Each client is a thread that calls transformers' `generate` with a prompt of its own;
together they share passes (swapper/infer/callers.py), so each layer is read once for all of them. The model is a Llama of random
weights. Outputs must be equal.
"""

from __future__ import annotations

import argparse
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MB = 10**6
PROMPT_TOKENS = 8


def model_folder(options: argparse.Namespace) -> Path:
    folder: Path = options.directory / f"bench-infer-llama-{options.layers}x{options.width}-{options.vocabulary}"
    return folder


def random_state(model: Any) -> dict[str, Any]:
    """Return values for a model on the meta device: cheap random ones, and ones in norms."""
    import torch

    torch.manual_seed(0)
    noise = (0.02 * torch.randn(1 << 24)).to(torch.bfloat16)
    state = {}
    for name, meta in model.state_dict().items():
        if meta.ndim == 1:
            state[name] = torch.ones_like(meta, device="cpu") if "norm" in name else noise[: meta.numel()].clone()
            continue
        begin = torch.randint(0, 1 << 20, ()).item()
        repeats = -(-(meta.numel() + begin) // noise.numel())
        state[name] = noise.repeat(repeats)[begin : begin + meta.numel()].reshape(meta.shape).clone()
    return state


def make_model(options: argparse.Namespace) -> None:
    """Write a model of random weights under a temporary name and rename its folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers = options.width, options.layers
    config = LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=width, intermediate_size=width * 8 // 3 // 64 * 64, num_hidden_layers=layers,
        num_attention_heads=max(1, width // 128), bos_token_id=None, eos_token_id=None, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    temporary = model_folder(options).with_suffix(".tmp")
    temporary.mkdir(exist_ok=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(temporary)
    save_file(random_state(model), temporary / "model.safetensors", metadata={"format": "pt"})
    temporary.rename(model_folder(options))


def remove_model(options: argparse.Namespace) -> None:
    shutil.rmtree(model_folder(options), ignore_errors=True)


def run_clients(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all clients, together and one after the other, after one that fills the resident set."""
    import torch
    from transformers import LlamaForCausalLM

    import swapper
    from swapper.bench.hardware import measure_read
    from swapper.integrations.transformers import from_pretrained
    from swapper.runtime.sizes import parse_bytes

    torch.set_num_threads(options.threads or torch.get_num_threads())
    path = model_folder(options) / "model.safetensors"
    speeds = [measure_read(path)]
    model = from_pretrained(LlamaForCausalLM, model_folder(options), host_memory=options.host_memory)
    loaded = swapper.loaded(model)
    prompts = [
        (torch.arange(PROMPT_TOKENS) * (2 * n + 1) + n).view(1, -1) % options.vocabulary for n in range(options.clients)
    ]

    def generate(prompt: torch.Tensor, tokens: int = options.new_tokens) -> torch.Tensor:
        found: torch.Tensor = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens
        )
        return found

    def timed(way: str, run: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], dict[str, Any]]:
        read, began_s, cpu_s = loaded.counters.bytes_read, time.perf_counter(), time.process_time()
        outputs = run()
        seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        return outputs, {
            f"{way}_s": seconds,
            f"{way}_cpu_s": cpu_s,
            f"{way}_bytes": loaded.counters.bytes_read - read,
            f"{way}_tokens_per_s": options.clients * options.new_tokens / seconds,
        }

    def together() -> list[torch.Tensor]:
        outputs: dict[int, torch.Tensor] = {}
        barrier = threading.Barrier(options.clients)

        def work(number: int) -> None:
            barrier.wait()
            outputs[number] = generate(prompts[number])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(options.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [outputs[number] for number in range(options.clients)]

    first = threading.Thread(target=generate, args=(prompts[0], 1))  # a thread that ends, so that no pass awaits it
    first.start()
    first.join()
    shared, shared_figures = timed("together", together)
    alone, alone_figures = timed("alone", lambda: [generate(prompt) for prompt in prompts])
    must_read_bytes = loaded.read_bytes_a_pass
    loaded.unload()
    speeds.append(measure_read(path))
    return {
        "clients": options.clients,
        "new_tokens": options.new_tokens,
        "weights_bytes": path.stat().st_size,
        "budget_bytes": parse_bytes(options.host_memory, "--host-memory"),
        "must_read_bytes": must_read_bytes,
        "read_bytes_per_s": speeds,
        **shared_figures,
        **alone_figures,
        "ratio": alone_figures["alone_s"] / shared_figures["together_s"],
        "limit_s": options.new_tokens * must_read_bytes / max(speeds),
        "equal": all(torch.equal(a, b) for a, b in zip(shared, alone, strict=True)),
    }


def rows_of(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of each row of the table."""
    rates = " and ".join(f"{rate / MB:,.0f}" for rate in figures["read_bytes_per_s"])

    def text(way: str) -> str:
        return (
            f"{figures[f'{way}_tokens_per_s']:.2f} tokens/s; {figures[f'{way}_s']:.1f} s, {figures[f'{way}_cpu_s']:.1f} CPU s; "
            f"read {figures[f'{way}_bytes'] / MB:,.0f} MB"
        )

    return [
        ("Weights", f"{figures['weights_bytes'] / MB:,.0f} MB; budget {figures['budget_bytes'] / MB:,.0f} MB"),
        ("Drive", f"read {rates} MB/s (before, after)"),
        ("Clients", f"{figures['clients']}, {figures['new_tokens']} tokens each after a prompt of {PROMPT_TOKENS}"),
        ("Together", text("together")),
        ("One by one", text("alone")),
        (
            "Ratio",
            f"{figures['ratio']:.2f} times as many tokens a second together, which takes "
            f"{figures['together_s'] / figures['limit_s']:.3f} times what reading takes for one client",
        ),
        ("Outputs", "equal" if figures["equal"] else "NOT EQUAL"),
    ]

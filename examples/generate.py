"""Generates text with a model whose weights stay on the drive.

    pip install torch-swapper transformers
    python examples/generate.py path/to/model "Once upon a time" --host-memory 4GiB

`path/to/model` is a directory as on the Hugging Face Hub: config.json, tokenizer, and weights in safetensors or .bin
files, which are read in place as each part of the model runs. Weights stay in memory as far as the budget goes; the
rest is read once for each token, so that a token takes (weights - budget) / (the drive's speed). Without a path it
makes a small model with random weights.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TextStreamer

import swapper
from swapper.integrations.transformers import from_pretrained


def make_random_model(folder: Path) -> None:
    """Make a model of 60 million random parameters, for a run without a model."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


class Numbers:
    """Stands in for a tokenizer: a text is the numbers of its tokens."""

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[int(word) for word in text.split()]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def decode(self, tokens: list[int], **options: object) -> str:
        return "".join(f"{int(token)} " for token in tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a directory with a causal language model")
    parser.add_argument("prompt", nargs="?", default="The quick brown fox")
    parser.add_argument("--host-memory", default="auto", help='memory for the weights: "4GiB"')
    parser.add_argument("--tokens", type=int, default=32, help="how many to generate")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        folder = options.model or Path(scratch)
        if options.model is None:
            make_random_model(folder)
            options.host_memory = "40MiB"
        began_s = time.perf_counter()
        model = from_pretrained(AutoModelForCausalLM, folder, host_memory=options.host_memory)
        if options.model is None:
            tokenizer: Any = Numbers()
            options.prompt = "1 2 3 4"
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        inputs = dict(tokenizer(options.prompt, return_tensors="pt"))
        loaded_s = time.perf_counter()
        shown: Any = TextStreamer(tokenizer, skip_special_tokens=True)  # prints each word when it is there
        output = model.generate(**inputs, max_new_tokens=options.tokens, do_sample=False, streamer=shown)
        done_s = time.perf_counter()
        with swapper.loaded(model) as loaded:
            new = output.shape[1] - inputs["input_ids"].shape[1]
            print(
                f"loaded in {loaded_s - began_s:.2f} s; {new} tokens in {done_s - loaded_s:.2f} s; "
                f"{loaded.counters.bytes_read / 1e6:,.0f} MB read of {loaded.counters.state_bytes / 1e6:,.0f} MB of weights, "
                f"{loaded.read_bytes_a_pass / 1e6:,.0f} MB for each token"
            )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Interrupted. Nothing is left behind.") from None

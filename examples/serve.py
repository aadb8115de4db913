"""Serves a model whose weights stay on the drive, and streams what it generates.

    pip install torch-swapper transformers fastapi uvicorn
    python examples/serve.py path/to/model --host-memory 4GiB
    curl -N "http://127.0.0.1:8000/generate?prompt=Once+upon+a+time&tokens=32"

Each request runs `generate` in a thread. Threads share passes: each part of the model is read once for all requests that
wait, so eight clients cost the drive what one costs, and each gets what it would get alone. A client that disconnects stops
at its next token, and its KV cache is freed. Without a path it makes a small model with random weights, for which a prompt
is the numbers of its tokens: "1 2 3".
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from generate import Numbers, make_random_model
from transformers import AsyncTextIteratorStreamer, AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

import swapper
from swapper.integrations.transformers import from_pretrained

try:
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse
except ImportError as error:
    raise SystemExit(f"{error}: pip install fastapi uvicorn") from None


class Left(StoppingCriteria):
    """Stops a generation whose client has left."""

    def __init__(self, has_left: threading.Event) -> None:
        self.has_left = has_left
        self.tokens = 0

    def __call__(self, input_ids: torch.Tensor, scores: object, **options: object) -> Any:
        self.tokens += 1
        return torch.full((input_ids.shape[0],), self.has_left.is_set(), device=input_ids.device)


def make_app(model: Any, tokenizer: Any, clients: int) -> FastAPI:
    """Return the server. Further requests than `clients` wait until one ends."""
    app = FastAPI()
    pool = ThreadPoolExecutor(clients)

    @app.get("/generate")
    async def generate(prompt: str, tokens: int = 32) -> StreamingResponse:
        return StreamingResponse(stream(prompt, tokens), media_type="text/plain")

    async def stream(prompt: str, tokens: int) -> AsyncIterator[str]:
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        left = Left(threading.Event())
        inputs = tokenizer(prompt, return_tensors="pt")
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(pool, run, inputs, tokens, streamer, left)
        try:
            async for text in streamer:
                yield text
            await done
        finally:  # also if the client has left
            left.has_left.set()

    def run(inputs: dict[str, Any], tokens: int, streamer: AsyncTextIteratorStreamer, left: Left) -> None:
        try:
            options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False}
            model.generate(**inputs, **options, streamer=streamer, stopping_criteria=[left])
        finally:
            streamer.end()
            print(f"{left.tokens} of {tokens} tokens", flush=True)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a directory with a causal language model")
    parser.add_argument("--host-memory", default="auto", help='memory for the weights: "4GiB"')
    parser.add_argument("--clients", type=int, default=8, help="requests that generate at once; others wait")
    parser.add_argument("--port", type=int, default=8000, help="0: any")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        folder = options.model or Path(scratch)
        if options.model is None:
            make_random_model(folder)
            options.host_memory = "40MiB"
        model = from_pretrained(AutoModelForCausalLM, folder, host_memory=options.host_memory)
        tokenizer = Numbers() if options.model is None else AutoTokenizer.from_pretrained(folder, local_files_only=True)
        with swapper.loaded(model) as loaded:
            uvicorn.run(make_app(model, tokenizer, options.clients), port=options.port)
            print(f"{loaded.counters.bytes_read / 1e6:,.0f} MB read; {loaded.read_bytes_a_pass / 1e6:,.0f} MB a pass")


if __name__ == "__main__":
    main()

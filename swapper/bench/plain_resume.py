"""Continues from a snapshot with plain torch; runs as a script, in a process that never imports swapper.

    python plain_resume.py '{"snapshot": ..., "config": {...}, "dtype": "bfloat16", ...}'

Prints JSON: the losses of the next `steps` steps, and the seconds of each.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

# Run by path, so this folder is on the path and these are the files in it, without the package.
from corpus import Corpus
from gpt import Gpt, GptConfig
from plain import PlainTraining


def main(task: dict[str, Any]) -> dict[str, list[float]]:
    torch.set_num_threads(task["threads"])
    config = GptConfig(**task["config"])
    dtype = getattr(torch, task["dtype"])
    with torch.device("meta"):
        model = Gpt(config)
    model = model.to(dtype).to_empty(device="cpu")
    saved = torch.load(task["snapshot"], mmap=True)
    training = PlainTraining(model, task["learning_rate"], masters=task["masters"], saved=saved)
    corpus = Corpus(config.vocabulary)
    losses, times_s = [], []
    for number in range(task["first_batch"], task["first_batch"] + task["steps"]):
        tokens, targets = corpus.batch(number, task["batch"], config.context)
        began_s = time.perf_counter()
        losses.append(training.step(tokens, targets))
        times_s.append(time.perf_counter() - began_s)
    if "swapper" in sys.modules:
        raise RuntimeError("this process must not use swapper")
    return {"losses": losses, "times_s": times_s}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))

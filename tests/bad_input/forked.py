"""The process that test_fork.py starts: forks a child for each way to touch the manager, and goes on training itself.

Says one JSON object for each child: the way, what it raised there, and how the child ended.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import Twins

WAYS: dict[str, Callable[[Twins, torch.Tensor], Any]] = {
    "forward": lambda pair, loss: loss_of(pair.swapped, tokens()),
    "forward without gradients": lambda pair, loss: torch.no_grad()(pair.swapped)(tokens()),
    "a child's forward": lambda pair, loss: pair.swapped.blocks[1](torch.ones(1, 128)),
    "backward of a parent's graph": lambda pair, loss: loss.backward(),
    "a parameter": lambda pair, loss: pair.swapped.head.weight.sum(),
    "a small parameter": lambda pair, loss: pair.swapped.norm.bias.tolist(),
    "a gradient": lambda pair, loss: pair.swapped.head.weight.grad.sum(),
    "state_dict": lambda pair, loss: pair.swapped.state_dict(),
    "load_state_dict": lambda pair, loss: pair.swapped.load_state_dict(pair.plain.state_dict()),
    "step": lambda pair, loss: pair.optimizer.step(),
    "the optimizer's state_dict": lambda pair, loss: pair.optimizer.state_dict(),
    "gather": lambda pair, loss: pair.manager.gather(pair.swapped.head).__enter__(),
    "clip_grad_norm_": lambda pair, loss: pair.manager.clip_grad_norm_(1.0),
    "snapshot": lambda pair, loss: pair.manager.snapshot(pair.directory / "child.pt"),
    "offload": lambda pair, loss: pair.manager.offload(pair.plain, pair.original),
    "close": lambda pair, loss: pair.manager.close(),
    "nothing": lambda pair, loss: None,
    "collecting everything": lambda pair, loss: (vars(pair).clear(), gc.collect()),
}


THOROUGH = {"forward", "nothing", "collecting everything"}


def run(directory: Path, place: str) -> None:
    torch.manual_seed(0)
    pair = Twins(directory, Net(), params=place, optimizer_state=place)
    pair.train(train_step, steps=2)
    for name, way in WAYS.items():
        pair.both(lambda model, _: loss_of(model, tokens()).backward())
        random_state = torch.get_rng_state()
        loss = loss_of(pair.swapped, tokens())  # its graph is the child's too
        torch.set_rng_state(random_state)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            outcome = {"type": None, "message": ""}
            try:
                way(pair, loss)
            except BaseException as error:
                outcome = {"type": type(error).__name__, "message": str(error)}
            os.write(write, json.dumps(outcome).encode())
            if name in THOROUGH:
                sys.exit(0)  # with all that Python does at its end, which takes a while
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        say = {"way": name, "status": os.waitstatus_to_exitcode(status), **(json.loads(answer) if answer else {})}
        print(json.dumps(say), flush=True)
        del loss
        pair.both(lambda _, optimizer: (optimizer.step(), optimizer.zero_grad())[1])
    pair.train(train_step, steps=1)
    pair.finish(paged=place == "nvme")
    print(json.dumps({"finished": True}), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])

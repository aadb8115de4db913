"""A process that has imported what tests' processes begin with, and forks each: most of them would import longer than they run.

What it is told comes by a socket, whose number is its argument: the arguments of Python, variables for its environment, and open
files for input, output and errors. It answers with the number of the forked process, and with its exit code and the processor's
seconds when it has ended. The forked one runs the program as its `__main__` and ends as any other: by the end of its interpreter.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import swapper
from e2e import twins

__all__ = ["swapper", "torch", "twins"]


def serve() -> list[str]:
    """Return, in a forked process, what it is to run; ends this one when nothing more comes."""
    gc.freeze()  # what is there now is neither looked through nor copied by the forked ones
    importlib.import_module("torch._dynamo")  # every optimizer does; and Triton tells of what a frozen one would leave
    channel = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, files, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not message:
            raise SystemExit
        child = os.fork()
        if child == 0:
            channel.close()
            return become(json.loads(message), files)
        for file in files:
            os.close(file)
        channel.send(b"%d" % child)
        _, status, used = os.wait4(child, 0)
        channel.send(b"%d %f" % (os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime))


def become(order: dict[str, Any], files: list[int]) -> list[str]:
    """Be the process that was ordered: with its input, output, errors and environment. Returns what it is to run."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.update(order["variables"])
    arguments: list[str] = order["arguments"]
    return arguments


def execute(arguments: list[str]) -> None:
    """Do what `python ARGUMENTS` does, of -c, -m and a file."""
    first, *rest = arguments
    main = ModuleType("__main__")
    if first == "-c":
        name, code = "<string>", rest.pop(0)
    else:
        spec = importlib.util.find_spec(rest.pop(0)) if first == "-m" else None
        name = str(first if spec is None else spec.origin)
        main.__file__, code = name, Path(name).read_text()
    sys.argv, sys.modules["__main__"] = [name, *rest], main
    exec(compile(code, name, "exec"), vars(main))


if __name__ == "__main__":
    execute(serve())

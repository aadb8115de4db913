"""Free memory goes back to the system: by glibc itself, or by the checks of a run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from swapper.runtime.free_memory import HEAP_SETTINGS

FREE = """
import torch
from swapper.runtime import free_memory as heap

NBYTES, COUNT = 8 << 20, 16
if not hasattr(heap._libc, "mallopt"):
    print("no mallopt")
    raise SystemExit

before = heap.anonymous_bytes()

def share_left():
    return (heap.anonymous_bytes() - before) / (COUNT * NBYTES)

def come_and_go():
    tensors = [torch.ones(NBYTES, dtype=torch.uint8) for _ in range(COUNT)]
    while tensors:
        tensors.pop()  # the last one first: what is free is always at the end
    return share_left()

watches = [heap.watch_free_memory(1 << 30), heap.watch_free_memory(1 << 30)]
shares = [come_and_go()]
watches.pop().end()
shares.append(come_and_go())
last = watches.pop()
last.end()
shares.append(share_left())
last.end()
forgotten = heap.watch_free_memory(1 << 30)  # of a run whose model and manager are gone without close()
come_and_go()
del forgotten
shares.append(share_left())
print(*shares)
"""


SET_UP = """
from swapper.runtime import free_memory as heap

called = []
heap._libc.mallopt = lambda *arguments: called.append(arguments)
heap.watch_free_memory(1 << 30).end()
print(len(called))
"""


def run(program: str, *arguments: str, **set_up: str) -> str:
    """Run it in a process whose heap is set up by `set_up` and nothing else; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in HEAP_SETTINGS}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, **set_up}, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_while_there_is_a_run_what_is_free_stays_until_a_look() -> None:
    printed = run(FREE)
    if "no mallopt" in printed:
        pytest.skip("this C library has no mallopt")
    during, after_one, after_all, after_forgotten = map(float, printed.split())
    assert during > 0.9  # of what was freed is there still
    assert after_one > 0.9
    assert after_all < 0.1 and after_forgotten < 0.1


@pytest.mark.parametrize("name", HEAP_SETTINGS)
def test_a_heap_that_the_user_has_set_up_stays_as_it_is(name: str) -> None:
    assert int(run(SET_UP)) > 0
    assert int(run(SET_UP, **{name: "" if name == "GLIBC_TUNABLES" else "131072"})) == 0


WHOLE = """
import ctypes, resource, sys
from contextlib import nullcontext
from statistics import median
from swapper.runtime import free_memory as heap

NBYTES, UPDATES = 30 << 20, 9
if not hasattr(heap._libc, "mallopt"):
    print("no mallopt")
    raise SystemExit

malloc, free = heap._libc.malloc, heap._libc.free  # torch's own allocations are aligned, and may not fit where one was
malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

watch = heap.watch_free_memory(256 << 20)  # a check each 16 MiB, which lets 8 MiB of holes be
took = []
for _ in range(UPDATES):
    before = faults()
    with heap.note_temporaries() if sys.argv[1] == "noted" else nullcontext():
        memory = malloc(NBYTES)
        ctypes.memset(memory, 1, NBYTES)
        free(memory)
    heap.note_freed(NBYTES)
    took.append(faults() - before)
print(median(took) * resource.getpagesize() / NBYTES)
"""


@pytest.mark.parametrize("how, least, most", [("noted", 0, 0.05), ("not noted", 0.9, 2)])
def test_what_an_update_takes_each_time_stays_once_it_is_noted(how: str, least: float, most: float) -> None:
    printed = run(WHOLE, how)
    if "no mallopt" in printed:
        pytest.skip("this C library has no mallopt")
    assert least <= float(printed) <= most, "page faults of an update, by the pages that it takes"


BEGINS = """
import sys
import torch
from swapper.runtime import free_memory as heap

if not hasattr(heap._libc, "mallopt"):
    print("no mallopt")
    raise SystemExit

watch = heap.watch_free_memory(256 << 20)
before = heap.anonymous_bytes()
tensors = [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(16)]
if sys.argv[1] == "in use":
    heap.note_used()
tensors.clear()
heap.note_used()
print((heap.anonymous_bytes() - before) / (128 << 20))
"""


@pytest.mark.parametrize("before, least, most", [("in use", 0.9, 1.2), ("in passing", -0.1, 0.1)])
def test_when_a_backward_begins_only_what_was_in_use_when_one_began_stays(
    before: str, least: float, most: float
) -> None:
    printed = run(BEGINS, before)
    if "no mallopt" in printed:
        pytest.skip("this C library has no mallopt")
    assert least <= float(printed) <= most

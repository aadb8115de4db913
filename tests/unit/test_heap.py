"""Who gives free memory back to the system: glibc by itself, or the looks of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

FREE = """
    import torch
    from swapper.core import heap

    NBYTES, COUNT = 8 << 20, 16
    if not hasattr(heap._libc, "mallopt"):
        print("no mallopt")
        raise SystemExit

    before = heap._anonymous_bytes()

    def share_left():
        return (heap._anonymous_bytes() - before) / (COUNT * NBYTES)

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
    print(*shares)
"""


def test_while_there_is_a_run_what_is_free_stays_until_a_look(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_python(FREE)
    assert done.returncode == 0, done.stderr
    if "no mallopt" in done.stdout:
        pytest.skip("this C library has no mallopt")
    during, after_one, after_all = map(float, done.stdout.split())
    assert during > 0.9  # of what was freed is there still
    assert after_one > 0.9
    assert after_all < 0.1


def test_a_heap_that_the_user_has_set_up_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    program = "from swapper.core import heap; heap._libc.mallopt = None; heap.watch_free_memory(1 << 30).end()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr  # it would have called None

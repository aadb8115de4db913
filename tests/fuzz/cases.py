"""Runs cases drawn from a seed, each in a process of its own, and makes those that fail smaller.

A crash, a hang, and whatever a case says of itself is a failure: it is made smaller, and printed as JSON that `--program` repeats.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import gc
import json
import logging
import os
import select
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from e2e.killed_run import fork
from torch import nn
from torch.distributed.tensor import DTensor

import swapper

Program = dict[str, Any]
MAX_CASE_S = 60.0
REDUCING_S = 90.0
REFUSED = "refused: "


@dataclass(frozen=True)
class Kind:
    """What is drawn.

    Attributes:
        name: of its command.
        description: of its command.
        draw: returns the program of a seed.
        run_case: returns what went wrong with a program in a directory, None if nothing did; REFUSED and why, if it was not taken.
        smaller: yields programs with a part less.
    """

    name: str
    description: str
    draw: Callable[[str], Program]
    run_case: Callable[[Program, Path], str | None]
    smaller: Callable[[Program], Iterator[Program]]


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and bits, of shards on this rank; NaNs are alike."""
    one, other = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (one, other))
    both = [torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()) for tensor in (one, other)]
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(
        *(t.view(-1).view(torch.uint8) for t in both)
    )


def assert_like(found: Any, expected: Any, where: str) -> None:
    """Raises AssertionError that names the place if two values differ, in bits of tensors, and else as they print."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor) and equal(found, expected), f"{where} differs"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{where} has {list(found)}, and plain {list(expected)}"
        for key in expected:
            assert_like(found[key], expected[key], f"{where}: {key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{where} has {len(found)}, and plain {len(expected)}"
        for number, both in enumerate(zip(found, expected, strict=True)):
            assert_like(*both, f"{where}[{number}]")
    else:
        assert str(found) == str(expected), f"{where} is {found!r}, and plain {expected!r}"


class Ended(BaseException):
    """A training that has been interrupted."""


def end_within(
    begin: Callable[[Callable[[], object]], object], how: str, answer: Path, refusals: tuple[type[Exception], ...]
) -> None:
    """Have a training begin, and end where it calls what it is given.

    Args:
        how: "killed", in a process of its own, or "interrupted".
        answer: a file, for what goes wrong in that process.
        refusals: see `outcome`.
    """
    if how == "interrupted":
        with suppress(Ended):
            begin(_interrupt)
        return
    _, status = os.waitpid(fork(partial(_begin_and_answer, begin, answer, refusals)), 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"the process that was to be killed ended with {code}"
    if answer.exists():
        problem = answer.read_text()
        raise (Impossible if problem.startswith(REFUSED) else AssertionError)(f"before its end: {problem}")


def _interrupt() -> None:
    raise Ended


def _begin_and_answer(
    begin: Callable[[Callable[[], object]], object], answer: Path, refusals: tuple[type[Exception], ...]
) -> None:
    problem = outcome(partial(begin, partial(os.kill, os.getpid(), signal.SIGKILL)), refusals)
    if problem is not None:
        answer.write_text(problem)


def enable_faulthandler() -> None:
    """Have faulthandler write where this process, a child, crashes or hangs. Faults that swapper serves come to swapper first.

    Where a test's process has faulthandler enabled, and swapper's handler installed over that, both stay: to enable it again only
    tells it where to write. Where Lightning has reset all signals, faulthandler is installed again, and swapper does so by itself.
    """
    caught = int(Path("/proc/self/status").read_text().partition("SigCgt:")[2].split()[0], 16)
    is_reset = faulthandler.is_enabled() and not caught >> (signal.SIGABRT - 1) & 1
    if is_reset:
        faulthandler.disable()
    faulthandler.enable(2)  # sys.stderr may be a test's
    for number in (signal.SIGSEGV, signal.SIGBUS) if is_reset else ():
        signal.signal(number, signal.SIG_DFL)


def watched(kind: Kind, program: Program) -> str | None:
    """Run a case in a child. Returns as its `run_case`."""
    scratch = Path(tempfile.mkdtemp(prefix="swapper-fuzz-"))
    answer, stacks = scratch / "answer", scratch / "stacks"
    child = os.fork()
    if child == 0:
        has_run = False
        try:
            os.dup2(os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            enable_faulthandler()
            torch.set_num_threads(1)  # threads that begin at once after a fork would race in making torch's pool
            problem = kind.run_case(program, scratch)
            if problem is not None:
                answer.write_text(problem)
            has_run = True
        finally:
            if not has_run:
                os.write(2, traceback.format_exc().encode())
            os._exit(int(not has_run))
    try:
        has_ended = _wait_for(child)
        if not has_ended:
            os.kill(child, signal.SIGABRT)  # faulthandler writes where it is
        _, status = os.waitpid(child, 0)
        if not has_ended:
            return f"it did not end in {MAX_CASE_S:.0f} s: {stacks.read_text()}"
        if os.WIFSIGNALED(status):
            return f"ended by {signal.Signals(os.WTERMSIG(status)).name}: {stacks.read_text()}"
        if status:
            return f"the fuzzer itself failed: {stacks.read_text()}"
        return answer.read_text() if answer.exists() else None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _wait_for(child: int) -> bool:
    """Wait for MAX_CASE_S at most until a process has ended, and return whether it has."""
    descriptor = os.pidfd_open(child)
    try:
        return bool(select.select([descriptor], [], [], MAX_CASE_S)[0])
    finally:
        os.close(descriptor)


class Impossible(Exception):
    """What swapper is compared with cannot do it either."""


def outcome(act: Callable[[], object], refusals: tuple[type[Exception], ...]) -> str | None:
    """Return what `run_case` of a Kind does, of a case that `act` runs.

    Args:
        refusals: errors of swapper with which it may refuse a program.
    """
    try:
        act()
    except Impossible as error:
        return f"{REFUSED}impossible: {error}"
    except refusals as error:
        return f"{REFUSED}{type(error).__name__}: {error}"
    except BaseException:
        return traceback.format_exc(limit=-6)
    return None


def kind_of(problem: str) -> str:
    return problem.strip().splitlines()[-1].partition("]")[2][:25] or problem.strip().splitlines()[-1][:25]


def reduced(kind: Kind, program: Program, problem: str) -> tuple[Program, str]:
    """Return the smallest program that fails in the same way, of those tried, and its failure."""
    until = time.monotonic() + REDUCING_S
    found = True
    while found and time.monotonic() < until:
        found = False
        for candidate in kind.smaller(copy.deepcopy(program)):
            what = watched(kind, candidate)
            if what is not None and not what.startswith(REFUSED) and kind_of(what) == kind_of(problem):
                program, problem, found = candidate, what, True
                break
            if time.monotonic() > until:
                break
    return program, problem


def prepare() -> None:
    """Prepare this process for all that are forked from it: what takes seconds to import is there."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    assert swapper.SwapManager and swapper.load and torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    gc.freeze()


def run(kind: Kind, arguments: Sequence[str]) -> int:
    """Run what the arguments of a command line say. Returns its exit status."""
    parser = argparse.ArgumentParser(prog=f"tools/fuzz {kind.name}", description=kind.description.partition("Usage")[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="how long; default 1")
    parser.add_argument("--cases", type=int, default=1 << 62, help="at most this many")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--program", type=json.loads, help="only this one, as a failure prints it")
    parser.add_argument("--all", action="store_true", help="go on after a failure")
    parser.add_argument("--refusals", action="store_true", help="print what was refused")
    options = parser.parse_args(arguments)
    prepare()
    if options.program is not None:
        problem = watched(kind, options.program)
        gc.unfreeze()
        print(problem or "clean")
        return int(problem is not None and not problem.startswith(REFUSED))
    until = time.monotonic() + 60 * options.minutes
    counts: Counter[str] = Counter()
    number = 0
    while number < options.cases and time.monotonic() < until:
        program = kind.draw(f"{options.seed} {number}")
        problem = watched(kind, program)
        result = "clean" if problem is None else "refused" if problem.startswith(REFUSED) else "failed"
        counts[result] += 1
        if result == "refused" and problem is not None and options.refusals:
            print(number, problem.removeprefix(REFUSED)[:300], flush=True)
        if result == "failed" and problem is not None:
            print(f"FAILED: seed {options.seed}, case {number}: {problem}", flush=True)
            program, problem = reduced(kind, program, problem)
            print(f"smallest: {problem}\n--program '{json.dumps(program)}'", flush=True)
            if not options.all:
                break
        number += 1
    seconds = time.monotonic() - until + 60 * options.minutes
    print(f"seed {options.seed}: {number} programs in {seconds:.0f} s, {dict(counts)}")
    gc.unfreeze()  # else Triton tells of all that it leaves behind
    return int(counts["failed"] > 0)

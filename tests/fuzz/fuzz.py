"""Damages files of every kind that swapper reads, and has them read: a result or an error of swapper's, in bounded time and memory.

Usage: tools/fuzz [--minutes N] [--cases N] [--seed N] [--reader NAME]... [--without NAME]... [--json] [--found DIRECTORY]

Each case is made from the seed, its reader's name and its number, so a seed gives the same cases everywhere. Cases run in a
process of their own, which is watched: a crash, a hang, time beyond MAX_CPU_S, memory beyond MAX_GROWTH_BYTES, an error that is
not one of swapper's, a file that is written outside of the case's directory, or an input that is changed is a failure. Then the
smallest reproducer that was found is written, with its reader, to the directory of --found, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fuzz.mutating import mutate_bytes, ways_for
from fuzz.originals import MAKERS
from fuzz.readers import AGREES, ALLOWED, OUTPUT, READERS
from swapper.runtime.free_memory import peak_resident_bytes

MAX_CASE_S = 60.0
"""For a machine that is busy with other work. A case takes a few milliseconds."""
MAX_CPU_S = 20.0
"""Of the case's process: how busy the machine is does not matter."""
MAX_GROWTH_BYTES = 256 << 20
MAX_MESSAGE_CHARACTERS = 10_000
MAX_ADDRESSES_BYTES = 8 << 30
MAX_CHANGES = 4
REDUCING_S = 30.0
CORPUS = Path(__file__).parent / "corpus"
_SLOT = struct.Struct("<qd")  # number of the case, when it began
_RUNS_CODE = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "socket.connect",
    "os.fork",
    "ctypes.dlopen",
)
_CHANGES_FILES = tuple(
    f"os.{what}" for what in ["remove", "rename", "mkdir", "rmdir", "truncate", "link", "symlink", "chmod"]
)


@dataclass(frozen=True)
class Failure:
    """What went wrong, and with what: `files` are the ones that were damaged, by name."""

    reader: str
    seed: int
    number: int
    what: str
    files: dict[str, bytes]


class Guard:
    """Sees by Python's audit events what a reader does that it must not."""

    def __init__(self) -> None:
        self.allowed: str | None = None  # the directory of the case, while one runs
        self.seen: list[str] = []
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event in _RUNS_CODE:
            self.seen.append(f"{event}{arguments!r}"[:300])
        elif (
            event == "open"
            and isinstance(arguments[0], str | bytes)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ) or (event in _CHANGES_FILES and isinstance(arguments[0], str | bytes)):
            self._check(event, arguments[0])

    def _check(self, event: str, name: str | bytes) -> None:
        path = str(Path.cwd() / os.fsdecode(name))
        if not path.startswith((str(self.allowed), "/dev/", "/proc/self/")) or ".." in path:
            self.seen.append(f"{event} {path}")


def changed_files(reader: str, original: Path, chance: random.Random) -> dict[str, bytes]:
    """Return the files of `original` that the next case damages, by name below it."""
    names = sorted(str(path.relative_to(original)) for path in original.rglob("*") if path.is_file())
    name = chance.choice(names)
    data = (original / name).read_bytes()
    ways = [mutate_bytes] if reader.endswith(AGREES) else ways_for(name, data)
    for _ in range(chance.randint(1, MAX_CHANGES)):
        data = chance.choice(ways)(data, chance)
    return {name: data}


def run_case(
    read: Callable[[Path], Any], original: Path, files: dict[str, bytes], place: Path, guard: Guard
) -> str | None:
    """Return what is wrong; None if nothing is."""
    shutil.copytree(original, place)
    for name, data in files.items():
        (place / name).write_bytes(data)
    (place / OUTPUT).mkdir()
    inputs = {path: path.stat() for path in place.rglob("*") if path.is_file()}
    before = peak_resident_bytes(reset=True)
    assert before is not None, "this system does not let a process reset its peak of resident memory"
    guard.seen[:] = []
    problem, there = None, Path.cwd()
    os.chdir(place)  # events do not tell the directory of names that are found beneath a descriptor
    guard.allowed = str(place)
    began = time.process_time()
    try:
        read(place)
    except ALLOWED as error:
        if _is_memory(error):
            problem = f"it asked for memory that there is not: {error!r}"[:500]
        elif len(str(error)) > MAX_MESSAGE_CHARACTERS:
            problem = f"its message has {len(str(error))} characters: {error}"[:500]
    except BaseException as error:
        problem = (
            f"{type(error).__name__}: {str(error)[:300]}\n{''.join(traceback.format_tb(error.__traceback__)[-4:])}"
        )
    guard.allowed = None
    os.chdir(there)
    took = time.process_time() - began
    if problem is None and took > MAX_CPU_S:
        problem = f"it took {took:.0f} s of a processor"
    growth = (peak_resident_bytes() or 0) - before
    if problem is None and growth > MAX_GROWTH_BYTES:
        problem = f"it took {growth >> 20} MiB"
    if problem is None and guard.seen:
        problem = f"it did what it must not: {guard.seen[:3]}"
    if problem is None and any(
        not path.exists() or (path.stat().st_size, path.stat().st_mtime_ns) != (was.st_size, was.st_mtime_ns)
        for path, was in inputs.items()
    ):
        problem = "it changed what it was to read"
    shutil.rmtree(place, ignore_errors=True)
    return problem


def _is_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) and not isinstance(error, ALLOWED):
            return True
        if "can't allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


class Fuzzer:
    """Runs cases in a forked process, and watches it."""

    def __init__(self, scratch: Path, seed: int, readers: Sequence[str]) -> None:
        self._scratch = scratch
        self._stacks = scratch / "stacks"  # of a child that hangs or crashes
        self._seed = seed
        self._readers = readers
        self._slot = mmap.mmap(-1, _SLOT.size)
        self.counts: Counter[str] = Counter()
        self.originals: dict[str, Path] = {}
        for name in sorted({READERS[reader][0] for reader in readers}):
            self.originals[name] = scratch / "originals" / name
            self.originals[name].mkdir(parents=True)
            MAKERS[name](self.originals[name])

    def reader_of(self, number: int) -> str:
        return self._readers[number % len(self._readers)]

    def files_of(self, number: int) -> dict[str, bytes]:
        reader = self.reader_of(number)
        chance = random.Random(f"{self._seed} {reader} {number}")
        return changed_files(reader, self.originals[READERS[reader][0]], chance)

    def run(self, until: float, cases: int) -> Failure | None:
        """Run cases until then, at most so many; returns the first failure."""
        number = 0
        while number < cases and time.monotonic() < until:
            done, what = self._watched(lambda first=number: self._work(first, until, cases))  # type: ignore[misc]
            for each in range(number, done + 1):
                self.counts[self.reader_of(each)] += 1
            number = done + 1
            if what is not None:
                return Failure(self.reader_of(done), self._seed, done, what, self.files_of(done))
        return None

    def try_files(self, reader: str, files: dict[str, bytes]) -> str | None:
        """Run one case with these files; returns what is wrong."""
        return self._watched(lambda: self._one(0, reader, files, Guard()))[1]

    def _work(self, number: int, until: float, cases: int) -> str | None:
        guard = Guard()
        last = min(cases, number + 2000)  # then from a fresh process: what one leaves behind is not the next one's
        while number < last and time.monotonic() < until:
            problem = self._one(number, self.reader_of(number), self.files_of(number), guard)
            if problem is not None:
                return problem
            number += 1
        return None

    def _one(self, number: int, reader: str, files: dict[str, bytes], guard: Guard) -> str | None:
        self._slot[:] = _SLOT.pack(number, time.monotonic())
        original, read = READERS[reader]
        return run_case(read, self.originals[original], files, self._scratch / f"case-{number}", guard)

    def _watched(self, work: Callable[[], str | None]) -> tuple[int, str | None]:
        """Do `work` in a child. Returns the number of its last case, and what was wrong with that."""
        self._slot[:] = _SLOT.pack(-1, time.monotonic())
        answer = self._scratch / "answer"
        answer.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            self._be_child(work, answer)
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            number, began = _SLOT.unpack(self._slot[:])
            if pid:
                break
            if time.monotonic() - began > MAX_CASE_S:
                return number, f"it did not end in {MAX_CASE_S:.0f} s: {self._kill(child)}"
            time.sleep(0.02)
        if os.WIFSIGNALED(status):
            return number, f"the process was ended by {signal.Signals(os.WTERMSIG(status)).name}"
        return number, answer.read_text() if answer.exists() else None

    def _kill(self, child: int) -> str:
        """End a child that hangs. Returns the stacks of its threads."""
        os.kill(child, signal.SIGABRT)
        os.waitpid(child, 0)
        return self._stacks.read_text()

    def _be_child(self, work: Callable[[], str | None], answer: Path) -> None:
        try:
            sys.dont_write_bytecode = True  # of a module that a reader imports first
            faulthandler.disable()  # Lightning resets signal handlers, and enable() alone would not install it again
            faulthandler.enable(self._stacks.open("w"))
            addresses = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (addresses + MAX_ADDRESSES_BYTES, resource.RLIM_INFINITY))
            problem = work()
            if problem is not None:
                answer.write_text(problem)
        except BaseException:
            answer.write_text(traceback.format_exc())
        finally:
            os._exit(0)

    def reduced(self, failure: Failure) -> Failure:
        """Return the smallest files that fail in the same way, of those tried: parts are put back, or left out."""
        until = time.monotonic() + REDUCING_S
        (name, data), *_ = failure.files.items()
        kind = failure.what.split(":")[0]

        def fails(candidate: bytes) -> bool:
            what = self.try_files(failure.reader, {name: candidate})
            return what is not None and what.split(":")[0] == kind

        step = max(len(data) // 2, 1)
        while step and time.monotonic() < until:
            at = 0
            while at < len(data) and time.monotonic() < until:
                candidate = data[:at] + data[at + step :]
                if candidate and fails(candidate):
                    data = candidate
                else:
                    at += step
            step //= 2
        return Failure(failure.reader, failure.seed, failure.number, failure.what, {name: data})


def write_reproducer(failure: Failure, directory: Path) -> Path:
    """Write the damaged files to a directory of the corpus' form: READER-SEED-NUMBER with the files in it."""
    place = directory / f"{failure.reader}--{failure.seed}-{failure.number}"
    for name, data in failure.files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    return place


def corpus() -> list[tuple[str, dict[str, bytes]]]:
    """Return (reader, damaged files) of what failed once."""
    found = []
    for place in sorted(path for path in CORPUS.iterdir() if path.is_dir()):
        files = {str(file.relative_to(place)): file.read_bytes() for file in place.rglob("*") if file.is_file()}
        found.append((place.name.partition("--")[0], files))
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/fuzz", description=(__doc__ or "").partition("Usage")[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="how long; default 1")
    parser.add_argument("--cases", type=int, default=1 << 62, help="at most so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reader", action="append", choices=READERS, help="only this one; may be given several times")
    parser.add_argument("--without", action="append", default=[], choices=READERS, help="not this one")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--found", type=Path, default=Path("fuzz-found"), help="where a reproducer is written")
    options = parser.parse_args(arguments)
    readers = [name for name in options.reader or READERS if name not in options.without]
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="swapper-fuzz-") as scratch:
        fuzzer = Fuzzer(Path(scratch), options.seed, readers)
        failure = fuzzer.run(time.monotonic() + 60 * options.minutes, options.cases)
        seconds = time.monotonic() - began
        place = None
        if failure is not None:
            failure = fuzzer.reduced(failure)
            place = write_reproducer(failure, options.found)
    cases = sum(fuzzer.counts.values())
    shown = None if failure is None else {**asdict(failure), "files": str(place)}
    result = {
        "seed": options.seed,
        "cases": cases,
        "seconds": round(seconds, 1),
        "cases_a_second": round(cases / seconds, 1),
        "by_reader": dict(fuzzer.counts),
        "failure": shown,
    }
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(
            f"seed {options.seed}: {cases} cases in {seconds:.0f} s ({cases / seconds:.0f} a second) over {len(readers)} readers"
        )
        if failure is not None:
            print(f"FAILED: reader {failure.reader}, case {failure.number}: {failure.what}\nReproducer: {place}")
        else:
            print("clean")
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The fuzzer in a short form, and what failed once. The long form: tools/fuzz."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.processes import run_python

from fuzz import fuzz, readers
from swapper.errors import SwapperError

MAIN = Path(fuzz.__file__)


def test_some_cases_of_every_reader_are_clean(tmp_path: Path) -> None:
    done = run_python(MAIN, "--cases", 40, "--minutes", 1, "--seed", 7, "--found", tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["cases"], result["failure"]) == (40, None)
    assert result["by_reader"].keys() == readers.READERS.keys()


def test_what_failed_once_does_not_again(tmp_path: Path) -> None:
    found = fuzz.corpus()
    assert found
    fuzzer = fuzz.Fuzzer(tmp_path, 1, sorted({reader for reader, _ in found}))
    problems = {}
    for number, (reader, files) in enumerate(found):
        problems[number, reader] = fuzzer.try_files(reader, files)
    assert not any(problems.values()), problems


BAD: dict[str, tuple[str, Callable[[Path], object]]] = {
    "an error of Python's": ("KeyError", lambda directory: {}["key"]),
    "memory": ("took", lambda directory: bytearray(b"x") * (600 << 20)),
    "time": ("of a processor", lambda directory: sum(range(10_000_000))),
    "a file elsewhere": ("must not", lambda directory: (directory.parent / "elsewhere").write_text("x")),
    "a program": ("must not", lambda directory: subprocess.run(["true"], check=True)),
    "an input that is changed": ("changed", lambda directory: (directory / "drives.json").write_text("x")),
    "a hang": ("in _hang", lambda directory: _hang()),
    "a crash": ("SIGABRT", lambda directory: __import__("os").abort()),
}


def _hang() -> None:
    threading.Event().wait()


@pytest.mark.parametrize("kind", BAD)
def test_the_fuzzer_notices(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, read = BAD[kind]
    if kind == "a hang":
        monkeypatch.setattr(fuzz, "MAX_CASE_S", 0.5)
    if kind == "time":
        monkeypatch.setattr(fuzz, "MAX_CPU_S", 0.05)
    monkeypatch.setitem(readers.READERS, "drives", ("drives", read))
    fuzzer = fuzz.Fuzzer(tmp_path / "scratch", 1, ["drives"])
    failure = fuzzer.run(float("inf"), 3)
    assert failure is not None and said in failure.what, failure
    assert failure.number == 0
    place = fuzz.write_reproducer(failure, tmp_path)
    assert [file.read_bytes() for file in place.iterdir()] == list(failure.files.values())


def test_a_reproducer_is_made_small_and_a_seed_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(directory: Path) -> None:
        if b'"index"' in (directory / "drives.json").read_bytes():
            raise ValueError("there it is")
        raise SwapperError("fine")

    monkeypatch.setitem(readers.READERS, "drives", ("drives", read))
    fuzzer = fuzz.Fuzzer(tmp_path / "scratch", 1, ["drives"])
    failure = fuzzer.run(float("inf"), 1000)
    assert failure is not None
    assert fuzzer.files_of(failure.number) == failure.files
    assert fuzzer.reduced(failure).files == {"drives.json": b'"index"'}

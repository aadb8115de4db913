"""Changes of the process are those that docs/reference/environment.md lists; SWAPPER_OFF leaves each out, at the cost it says."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e.processes import LONG_S, environment

from swapper.runtime.process import CHANGES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "environment.md"
PROBES = Path(__file__).with_name("process_probes.py")

WAYS = {
    r"sigaction\(|SignalSlot|(?<!_)signal\.signal\(|unnamed\.signal\b": {
        "csrc/memory/fault.cpp": "sigsegv",
        "csrc/memory/truncation.cpp": "sigbus",
        "csrc/memory/signal_slot.cpp": "sigsegv` | ",  # and sigbus: of the two files before
        "csrc/memory/signal_slot.h": "sigsegv` | ",
        "swapper/runtime/interrupts.py": "signals",
        "swapper/runtime/notices.py": "sigusr1",
    },
    r"\"mallopt\", None": {"swapper/runtime/free_memory.py": "mallopt"},
    r"::mlock2?\(|mlockall": {"csrc/memory/arena.cpp": "mlock"},
    r"register_at_fork\(|pthread_atfork\(": {
        "swapper/runtime/process.py": "fork",
        "csrc/memory/owned.cpp": "fork",
        "csrc/memory/truncation.cpp": "fork",
    },
    r"setattr\(owner, last": {"swapper/checkpoint/mapped_files.py": "save"},
    r"atexit\.register\(|\"atexit\"\)\.attr|std::atexit": {
        "swapper/manager.py": "atexit",
        "swapper/integrations/trainer.py": "atexit",
        "csrc/bindings/engine.cpp": "atexit",
    },
    r"register_optimizer_step_\w+_hook\(|register_module_\w+_hook\(": {"swapper/train/state/optim.py": "optimizers"},
    r"replace_sync_of_ddp\((?!function)|torch_ddp\._\w+ = ": {"swapper/train/passes/given_model.py": "ddp"},
    r"Watchdog\(": {"swapper/train/session/training_session.py": "watchdog"},
    r"environ\.setdefault\(|environ\[.*\] = |putenv\(|(?<!fe)setenv\(": {
        "swapper/io/handle/cufile.py": "CUFILE_ALLOW_COMPAT_MODE"
    },
    r"sys\.meta_path\.insert": {"swapper/integrations/autostart/sitecustomize.py": "SWAPPER_DEEPSPEED"},
    r"setrlimit\(|set_num_threads\(|sys\.excepthook|set_default_d\w+\(|faulthandler\.": {
        "swapper/train/optimizer/optimizer_probe.py": "set_default_dtype"
    },
}
"""Ways to change a process, as source text has them; and which files use them, under which word of the page."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the probes have found whose word is in the name of a test that is run."""
    place = tmp_path_factory.mktemp("probes")
    names = [item.name for item in request.session.items if item.path == Path(__file__)]
    words = [word for word in (*EXPECTED, "mallopt", "mlock") if any(word in name for name in names)]
    variables = {name: value for name, value in environment().items() if name != "PYTHONFAULTHANDLER"}
    done = subprocess.run(
        [sys.executable, str(PROBES), str(place), *words], env=variables, timeout=LONG_S, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, dict[str, Any]] = json.loads((place / "results.json").read_text())
    return found


ENDED = {"code": 0}
EXPECTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigsegv": (
        {"before": False, "handler": True, "step": 1, "same": True, **ENDED},
        {"before": False, "handler": False, "step": 1, "code": -signal.SIGSEGV},
    ),
    "sigbus": (
        {"before": False, "handler": True, "zeros": True, **ENDED},
        {"before": False, "handler": False, "code": -signal.SIGBUS},
    ),
    "save": ({"same": True, **ENDED}, {"same": False, "error": "CheckpointError", **ENDED}),
    "signals": ({"deferred": True, **ENDED}, {"deferred": False, **ENDED}),
    "sigusr1": (
        {"handler": True, "dump": True, "went_on": True, **ENDED},
        {"handler": False, "dump": True, "code": -signal.SIGUSR1},
    ),
    "watchdog": ({"thread": True, "handler": True, **ENDED}, {"thread": False, "handler": False, **ENDED}),
    "fork": (
        {"error": "StateError", "child": 0, "in_use": False, **ENDED},
        {"child": -signal.SIGSEGV, "in_use": True, **ENDED},
    ),
    "atexit": ({"files": ["snapshot.pt"], **ENDED}, {"files": [], **ENDED}),
    "optimizers": (
        {"hooks": 1, "refused": True, "changed": False, **ENDED},
        {"hooks": 0, "refused": False, "changed": True, **ENDED},
    ),
    "ddp": ({"replaced": True, **ENDED}, {"replaced": False, **ENDED}),
    "everything": ({"same": True, "step": 6, **ENDED}, {"same": True, "step": 6, **ENDED}),
}
"""By word, what its probe finds with the change and without it."""


@pytest.mark.parametrize("word", EXPECTED)
@pytest.mark.parametrize("number, which", [(0, "on"), (1, "off")])
def test_what_is_off_is_not_changed_and_what_is_lost_is_what_the_page_says(
    results: dict[str, dict[str, Any]], word: str, number: int, which: str
) -> None:
    found, expected = results[f"{word}-{which}"], EXPECTED[word][number]
    assert {name: found.get(name) for name in expected} == expected, found["output"]
    assert expected.keys() >= found.keys() - {"output", "files", "callbacks"}, found


def test_without_atexit_nothing_of_ours_is_called_at_the_end(results: dict[str, dict[str, Any]]) -> None:
    """Others' is: torch has its own."""
    assert (
        results["atexit-on"]["callbacks"] == results["atexit-off"]["callbacks"] + 2
    )  # the engines', and the snapshot's


def test_without_mallopt_glibc_gives_back_by_itself(results: dict[str, dict[str, Any]]) -> None:
    if sys.platform != "linux" or "stays" not in results["mallopt-on"]:
        pytest.skip("this C library has no mallopt")
    assert results["mallopt-on"]["stays"] > 0.9 > 0.5 > results["mallopt-off"]["stays"]


def test_without_mlock_nothing_is_locked(results: dict[str, dict[str, Any]]) -> None:
    on, off = results["mlock-on"], results["mlock-off"]
    assert not off["locked"] and "SWAPPER_OFF=mlock" in off["refused"]
    if on["refused"]:
        pytest.skip("the system locks no memory here: " + on["refused"])
    assert on["locked"]


@pytest.mark.whole
@pytest.mark.parametrize("said, unknown", [("sigsev", "sigsev"), ("fork, maloc,signals", "maloc"), ("ALL", "ALL")])
def test_a_word_that_is_not_known_is_refused_at_import(said: str, unknown: str) -> None:
    variables = {**environment(), "SWAPPER_OFF": said}
    done = subprocess.run([sys.executable, "-c", "import swapper"], env=variables, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"SWAPPER_OFF='{said}': {unknown} is not known: use any of atexit, ddp" in done.stderr


def test_words_may_have_spaces_between_them() -> None:
    program = "import swapper.runtime.process as p; print(sorted(p._off))"
    variables = {**environment(), "SWAPPER_OFF": " fork, signals,,"}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert done.stdout == "['fork', 'signals']\n"


def test_the_page_has_every_word_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(CHANGES) == sorted(["mallopt", "mlock", *EXPECTED.keys() - {"everything"}])


def test_the_page_has_every_variable_that_is_read() -> None:
    read = set()
    for path in ROOT.glob("swapper/**/*.py"):
        text = path.read_text()
        read |= set(re.findall(r"environ(?:\.get\(|\[)\"(\w+)\"", text))
        read |= set(re.findall(r"\"(SWAPPER_[A-Z_]+)\"", text))
    assert read >= {"SWAPPER_OFF", "SWAPPER_TRACE", "SWAPPER_DEEPSPEED", "SWAPPER_IO_DEBUG", "RANK"}
    assert {name for name in read if f"`{name}`" not in PAGE.read_text()} == set()


@pytest.mark.whole
@pytest.mark.parametrize("way", WAYS)
def test_nothing_else_changes_the_process(way: str) -> None:
    """A new way, or a new place of an old one, is to be entered here, on the page, and in CHANGES."""
    sources = [*ROOT.glob("swapper/**/*.py"), *ROOT.glob("csrc/**/*.cpp"), *ROOT.glob("csrc/**/*.h")]
    names = {str(path.relative_to(ROOT)) for path in sources if re.search(way, path.read_text())}
    programs = ("swapper/cli/", "swapper/forecast/model_source.py", "swapper/bench/", "csrc/tests/")
    of_programs = {name for name in names if name.startswith(programs)}
    assert names - of_programs == WAYS[way].keys()
    for name, word in WAYS[way].items():
        assert word in CHANGES or f"`{word}" in PAGE.read_text()
        assert word not in CHANGES or f'is_off("{word}")' in (ROOT / name).read_text()


def test_importing_swapper_changes_no_signal() -> None:
    program = """
import signal
before = [signal.getsignal(number) for number in signal.valid_signals()]
caught = open("/proc/self/status").read().split("SigCgt:")[1].split()[0]
import swapper, swapper.manager, swapper.checkpoint
assert before == [signal.getsignal(number) for number in signal.valid_signals()]
assert caught == open("/proc/self/status").read().split("SigCgt:")[1].split()[0]
"""
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

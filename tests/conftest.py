"""For all tests: processes of their own, a small drive, and one thread for torch, here and in the processes that tests start.

The models are tiny, the machines of CI are small, and threads that wait for each other by spinning make everything slow.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from durations import Durations, costs_s
from sampling import Case, choose, choose_tests, examples, runs_a_sample, seed_of_commit

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["XDG_CONFIG_HOME"] = "/nonexistent"  # what somebody tuned on this machine is not under test
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False  # each of many processes would compile all of swapper, and the tests
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell that starts this in the background sets it
    signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example of a property takes says nothing on a shared machine.
hypothesis.settings.register_profile("swapper", deadline=None, max_examples=examples(100))
hypothesis.settings.load_profile("swapper")

LEFT_OUT: list[str] = []
"""Of a sample: how many cases, and how many tests."""
ROOM_BYTES = 6 << 30
"""Bytes of the files of a whole run at any moment, and half of it more (4.0 GiB with three processes, 2026-11-22)."""


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # what is imported and collected stays: looking through it again and again finds nothing
    os.environ.setdefault("SWAPPER_TEST_SEED", seed_of_commit())  # and so for xdist's processes too
    config.pluginmanager.register(Durations())
    if "SWAPPER_TEST_DEVICE" in os.environ:
        from devices import check_named

        check_named()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say what is run, and end here where there is no room for its files."""
    config = session.config
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    cases = "a sample of each test's cases" if runs_a_sample() else "all cases of what is named"
    config.get_terminal_writer().line(f"{cases}, SWAPPER_TEST_SEED={os.environ['SWAPPER_TEST_SEED']}")
    directory = config.option.basetemp or tempfile.gettempdir()
    free = shutil.disk_usage(directory).free if Path(directory).is_dir() else ROOM_BYTES
    if free < ROOM_BYTES and not config.option.file_or_dir:
        raise pytest.UsageError(
            f"the tests' files take up to {ROOM_BYTES >> 30} GiB, and {directory} has {free / 2**30:.1f} GiB "
            "free: delete what is old there, or set TMPDIR to a directory on another drive"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a sample, if that is asked for: of the tests those that `choose_tests` names, and of a test's n cases n to the power of
    0.33; and always those that are marked `whole`. A case that is named by an address has another name in each process."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: give its parameters ids that are the same in each process")
    if not runs_a_sample():
        return
    seed, costs = os.environ["SWAPPER_TEST_SEED"], costs_s()
    tests: dict[str, dict[str, Case]] = {}
    kept = {item.nodeid for item in items if item.get_closest_marker("whole") is not None}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], {})[item.nodeid] = case_of(item)
    counts = {test: round(len(cases) ** 0.33) for test, cases in tests.items() if not kept.issuperset(cases)}
    for test in choose_tests({test: costs.get(test, 0) for test in counts}, counts, seed):
        kept |= choose(tests[test], counts[test], seed)
    ran = {name.partition("[")[0] for name in kept}
    LEFT_OUT[:] = [f"{len(items) - len(kept)} of {len(items)} cases", f"{len(tests) - len(ran)} of {len(tests)} tests"]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # nor need each test's own gc.collect() look through it


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Save what coverage has measured, if it does: xdist kills a process that is not at its end ten seconds after this. Send
    what this process has left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = LEFT_OUT
    if hasattr(session.config, "workerinput") and "COVERAGE_RUN" in os.environ:
        import coverage

        if (measured := coverage.Coverage.current()) is not None:
            measured.save()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a process of xdist left out: all leave out the same."""
    LEFT_OUT[:] = node.workeroutput.get("left_out", LEFT_OUT) if hasattr(node, "workeroutput") else LEFT_OUT


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what a sample left out, and how it is repeated."""
    if LEFT_OUT:
        left_out = ", with ".join(LEFT_OUT)
        terminalreporter.write_line(f"left out of this sample: {left_out} that take long; tools/test --all runs them")
        terminalreporter.write_line(f"SWAPPER_TEST_SEED={os.environ['SWAPPER_TEST_SEED']} tools/test repeats it")


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else Triton tells of all that it leaves behind


def case_of(item: pytest.Item) -> Case:
    """Return what a case has: of each parameter its value, or what is in it, or its number where it has no short name."""
    found: list[tuple[str, object]] = []
    for name, value in item.callspec.params.items() if hasattr(item, "callspec") else ():
        named = value if isinstance(value, dict) else {name: value}
        for part, one in named.items():
            is_short = isinstance(one, str | int | float | None)
            found.append((part, one if is_short else f"number {item.callspec.indices[name]}"))
    return frozenset(found)


@functools.cache
def why_refused(backend: object) -> str:
    """Return why the kernel refuses a backend of the engine, "" if it does not. The kernel says so itself, not swapper."""
    calls = {"uring": 425, "aio": 0 if platform.machine() == "aarch64" else 206}  # io_uring_setup, io_setup
    if backend not in calls:
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(calls[backend], 0, None)  # fails in any case: nothing is made
    number = ctypes.get_errno()
    return os.strerror(number) if number in (errno.ENOSYS, errno.EPERM) else ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    for _, value in case_of(item):
        if reason := why_refused(value):
            pytest.skip(f"needs the backend {value}, which the kernel refuses: {reason}")
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        built = (
            "this build of torch is without CUDA" if torch.version.cuda is None else "torch finds no device or driver"
        )
        pytest.skip(f"needs a CUDA device: {built}")


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in a process of its own: for what a test must not do to pytest's."""

    def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    return run


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts something at a new directory; skips where that is not permitted."""
    mounted: list[Path] = []

    def do(*options: str) -> Path:
        point = tmp_path / f"mounted-{len(mounted)}"
        point.mkdir()
        try:
            done = subprocess.run(["mount", *options, str(point)], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command here")
        if done.returncode != 0:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        mounted.append(point)
        return point

    yield do
    for point in reversed(mounted):
        subprocess.run(["umount", "--lazy", str(point)], check=True)  # lazily: a failed test keeps files open


@pytest.fixture
def mount_fuse(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Runs a script that mounts what it implements at its last argument; skips where that is not possible."""
    with contextlib.ExitStack() as stack:

        def do(script: str, *arguments: object) -> Path:
            try:
                import mfusepy  # noqa: F401
            except (ImportError, OSError) as error:
                pytest.skip(f"FUSE cannot be used here: {error} (Debian: apt install fuse3)")
            if not os.access("/dev/fuse", os.R_OK | os.W_OK):
                pytest.skip("/dev/fuse cannot be used here")
            point = tmp_path / "fuse"
            point.mkdir()
            command = [sys.executable, "-c", script, *map(str, arguments), str(point)]
            process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE))
            stack.callback(process.terminate)
            for _ in range(1200):  # a minute: it ends, or is there
                if os.path.ismount(point) or process.poll() is not None:
                    break
                time.sleep(0.05)
            if not os.path.ismount(point):
                process.kill()
                pytest.skip(f"FUSE cannot be mounted here: {process.stderr.read().decode()[-200:]}")  # type: ignore[union-attr]
            stack.callback(subprocess.run, ["umount", "--lazy", str(point)], check=False)
            return point

        yield do


@pytest.fixture
def small_tmpfs(mount: Callable[..., Path]) -> Path:
    """A filesystem of 4 MiB; skips where mounting is not permitted."""
    return mount("-t", "tmpfs", "-o", "size=4m", "swapper-test")

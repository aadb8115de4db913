"""DeepSpeed's builders load swapper's operators, here of a package with DeepSpeed's names. With DeepSpeed: test_deepspeed.py."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.processes import run_python

import swapper
from swapper.integrations import deepspeed as ours
from swapper.io.handle.cufile import open_cufile

BUILDERS = """
class AsyncIOBuilder:
    NAME = "async_io"
    def load(self, verbose=True):
        raise RuntimeError("it would compile")
    def is_compatible(self, verbose=False):
        return False

class NotImplementedBuilder(AsyncIOBuilder):
    NAME = "deepspeed_not_implemented"

GDSBuilder = PinMemoryBuilder = NotImplementedBuilder
"""
"""As for an accelerator without GPUDirect Storage."""


@pytest.fixture
def install_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Returns a function that makes deepspeed a package with these builders, and returns the module of these."""

    def make(builders: str) -> Any:
        package = {
            "__init__.py": "__version__ = '0.0'\nfrom deepspeed import ops",
            "ops/__init__.py": "__compatible_ops__ = {'async_io': False}",
            "ops/op_builder/__init__.py": builders,
            "ops/op_builder/all_ops.py": "from deepspeed.ops.op_builder import *\n"
            "ALL_OPS = {builder.NAME: builder() for builder in NotImplementedBuilder.mro()[1:-1]}",
        }
        for name, text in package.items():
            path = tmp_path / "packages" / "deepspeed" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(tmp_path / "packages")
        return importlib.import_module("deepspeed.ops.op_builder")

    yield make
    ours.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


@pytest.fixture
def builders(install_package: Callable[[str], Any]) -> Any:
    return install_package(BUILDERS)


def has_cufile() -> bool:
    try:
        open_cufile()
    except swapper.UnsupportedError:
        return False
    return True


def test_builders_load_swappers_operators_until_that_is_undone(builders: Any) -> None:
    async_io, missing = builders.AsyncIOBuilder, builders.GDSBuilder
    ours.install()
    ours.install()
    assert async_io().is_compatible() and async_io().load().aio_handle is swapper.AioHandle
    assert builders.GDSBuilder().load().gds_handle is swapper.GdsHandle
    assert builders.GDSBuilder().is_compatible() == has_cufile()
    assert sys.modules["deepspeed"].ops.__compatible_ops__ == {
        "async_io": True, "gds": has_cufile(), "pin_memory": True, "utils": True,
    }  # fmt: skip
    all_ops = sys.modules["deepspeed.ops.op_builder.all_ops"].ALL_OPS
    assert all_ops["pin_memory"].load().pin_handle is builders.PinMemoryBuilder().load().pin_handle
    ours.uninstall()
    assert builders.GDSBuilder is missing and list(all_ops) == ["async_io"]
    assert sys.modules["deepspeed"].ops.__compatible_ops__ == {"async_io": False}
    with pytest.raises(RuntimeError, match="it would compile"):
        async_io().load()


def test_an_operator_moves_bytes_and_locks_memory(builders: Any, tmp_path: Path) -> None:
    ours.install()
    operator, how = builders.AsyncIOBuilder().load(), (4096, 8, False, True, True)
    tensor, back = torch.randn(1003), torch.zeros(1003)
    assert operator.aio_write(tensor, str(tmp_path / "x"), *how) == 0
    assert operator.aio_read(back, str(tmp_path / "x"), *how) == 0 and torch.equal(tensor, back)
    assert operator.deepspeed_memcpy(back, tensor + 1) == 0 and torch.equal(back, tensor + 1)
    pin = builders.PinMemoryBuilder().load().pin_handle()
    one, other = (pin.new_cpu_locked_tensor(1003, torch.empty(0, dtype=torch.bfloat16)) for _ in range(2))
    assert one.shape == (1003,) and one.dtype == torch.bfloat16
    assert pin.is_pinned(one) and pin.is_pinned(other[5:]) and not pin.is_pinned(tensor)
    assert pin.free_cpu_locked_tensor(one) and pin.free_cpu_locked_tensor_by_ptr(other.data_ptr())
    assert not pin.is_pinned(one) and not pin.is_pinned(other) and not pin.free_cpu_locked_tensor(one)


def test_a_deepspeed_without_these_builders_and_none_are_refused(
    install_package: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_package(BUILDERS.replace("AsyncIOBuilder", "OtherBuilder"))
    with pytest.raises(swapper.UnsupportedError, match=r"DeepSpeed 0\.0 has no AsyncIOBuilder"):
        ours.install()
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(swapper.UnsupportedError, match="DeepSpeed cannot be imported"):
        ours.install()


def test_the_launcher_starts_python_with_swapper_behind_deepspeed(capsys: pytest.CaptureFixture[str]) -> None:
    script = "import os, sys; print(sys.argv[1:], os.environ['SWAPPER_DEEPSPEED'], type(sys.meta_path[0]).__name__)"
    done = run_python("-m", "swapper.integrations.deepspeed", "--", "-c", script, "--deepspeed", "x.json")
    assert done.stdout.splitlines() == ["['--deepspeed', 'x.json'] 1 _AfterDeepSpeed"], done.stderr
    for arguments, code in (([], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as ended:
            ours.main(arguments)
        assert (
            ended.value.code == code
            and "usage: python -m swapper.integrations.deepspeed SCRIPT" in capsys.readouterr().err
        )

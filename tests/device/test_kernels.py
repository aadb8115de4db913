"""Triton kernels equal the plain torch of the same module: by Triton's interpreter here, by the device where there is one,
and what the compiler makes of them for GPUs that are not here.

The interpreter and the compiler exclude each other within a process, so the first and the last have one of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kernel_cases
import pytest

HERE = Path(__file__).parent


def findings_of(program: str, *arguments: str, interpreted: bool) -> dict[str, Any]:
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'torch-swapper[triton]'")
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(HERE.parent)}
    environment.pop("TRITON_INTERPRET", None)
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, HERE / program, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_by_the_interpreter() -> None:
    """All in one process and in every run of the tests: else nothing would run the kernels where there is no GPU."""
    found = findings_of("kernel_cases.py", "cpu", interpreted=True)
    assert found == dict.fromkeys(kernel_cases.NAMES, ""), "\n".join(found.values())


@pytest.mark.gpu
@pytest.mark.parametrize("name", kernel_cases.NAMES)
def test_on_the_device(name: str) -> None:
    kernel_cases.CHECKS[kernel_cases.NAMES.index(name)]("cuda")


def test_every_kernel_compiles_for_a_gpu_into_correctly_rounded_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the promise of equal bits rests on: no contraction, and no approximate division or root."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = findings_of("compiled_kernels.py", "90", interpreted=False)
    assert {name: kernel["error"] for name, kernel in found.items() if kernel["error"]} == {}
    assert {name: kernel for name, kernel in found.items() if kernel["fused"] or kernel["approximate"]} == {}
    narrow = {name for name, kernel in found.items() if kernel["widest"] < 2}
    assert narrow == set(), "these load less than 8 bytes a thread"

"""Objects that live until Python ends say nothing then, though the globals of their modules are gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MAKE = {
    "SpillFile": "from swapper.io.extents import SpillFile; kept = SpillFile(at.parent)",
    "AioHandle": "import swapper; kept = swapper.AioHandle(); kept.sync_pwrite(torch.zeros(4096), str(at))",
    "GdsFile": "import os, swapper; kept = swapper.GdsFile(str(at), os.O_RDWR | os.O_CREAT)",
}


@pytest.mark.parametrize("kind", MAKE)
def test_an_object_that_outlives_its_module_is_silent(kind: str, tmp_path: Path) -> None:
    keep = (
        "torch.kept = kept, sys.modules[type(kept).__module__]"  # Python clears torch after the modules imported later
    )
    code = f"import pathlib, sys, torch; at = pathlib.Path({str(tmp_path / 'x')!r}); {MAKE[kind]}; {keep}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ignored" not in done.stderr

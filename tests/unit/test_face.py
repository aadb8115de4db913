"""The public face: what a user can import, and how it is called.

A change of it is a decision, which `public_face.txt` shows in review: `python tests/unit/test_face.py` writes it again.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import swapper

FACE = Path(__file__).with_name("public_face.txt")


def lines_of(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, type) and issubclass(value, Exception):
        yield f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
    elif isinstance(value, type):
        yield f"class {name}{signature(value)}"
        for member, found in sorted(vars(value).items()):
            if member.startswith("_"):
                continue
            if isinstance(found, property):
                yield f"  {member}: {inspect.signature(found.fget).return_annotation}"  # type: ignore[arg-type]
            elif callable(found) or isinstance(found, staticmethod | classmethod):
                yield f"  {member}{signature(getattr(value, member))}"
    elif callable(value):
        yield f"{name}{signature(value)}"


def signature(value: Any) -> str:
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return "(...)"


def face() -> str:
    found = []
    for module in (swapper, swapper.checkpoint, swapper.checkpoint.dcp):
        for name in sorted(module.__all__):
            found += lines_of(f"{module.__name__}.{name}", getattr(module, name))
    return "\n".join(found) + "\n"


def test_the_public_face_is_the_one_that_was_decided() -> None:
    assert face().splitlines() == FACE.read_text().splitlines()


def test_all_that_is_promised_can_be_imported_and_is_typed() -> None:
    for module in (swapper, swapper.checkpoint):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
        assert set(module.__all__) <= set(dir(module))
    assert (Path(swapper.__file__).parent / "py.typed").exists()
    assert swapper.__version__ == version("swapper")


def test_importing_swapper_imports_no_torch() -> None:
    loaded = "import sys, swapper, swapper.checkpoint; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout == "False\n"


if __name__ == "__main__":
    FACE.write_text(face())

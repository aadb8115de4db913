"""The public face: what a user can import, and how it is called.

A change of it is a decision, which `public_face.txt` shows in review: `python tests/unit/test_face.py` writes it again.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import swapper
from swapper.modules.guarded import FaultHandler

FACE = Path(__file__).with_name("public_face.txt")


def lines_of(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, type) and issubclass(value, Exception):
        yield f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
    elif isinstance(value, type):
        yield f"class {name}{signature(value)}"
        bases = [base for base in reversed(value.__mro__) if base.__module__.startswith("swapper.")]
        for member, found in sorted({name: one for base in bases for name, one in vars(base).items()}.items()):
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
        for name in sorted({*module.__all__, *(["KVCache"] if module is swapper else [])}):
            found += lines_of(f"{module.__name__}.{name}", getattr(module, name))
    return "\n".join(found) + "\n"


def test_the_public_face_is_the_one_that_was_decided() -> None:
    assert face().splitlines() == FACE.read_text().splitlines()


def documented(value: Any, name: str) -> Iterator[tuple[str, Any, str]]:
    """Yield name, callable and documentation of a public function, or of a class and its methods."""
    if not isinstance(value, type):
        yield name, value, inspect.getdoc(value) or ""
        return
    yield name, value, "\n\n".join(inspect.cleandoc(of.__doc__ or "") for of in (value, value.__init__))
    bases = [base for base in value.__mro__ if base.__module__.startswith("swapper.")]
    for member in dict.fromkeys(member for base in bases for member in vars(base)):
        found = getattr(value, member)
        if not member.startswith("_") and callable(found) and not hasattr(FaultHandler, member):
            yield f"{name}.{member}", found, inspect.getdoc(found) or ""


def lacking(value: Any, doc: str) -> list[str]:
    """Return what the documentation of a function, or of a class, does not say and should."""
    parameters = [name for name in inspect.signature(value).parameters if name != "self"]
    if not doc.strip() or len(parameters) < 3:
        return [] if doc.strip() else ["what it does"]
    sections = dict(re.findall(r"^(Args|Attributes|Raises):(.*?)(?=^\w+:|\Z)", doc, re.DOTALL | re.MULTILINE))
    is_record = dataclasses.is_dataclass(value) and not hasattr(value, "__post_init__")
    if "Made by" in doc:  # not by the user
        return []
    told = sections.get("Args", "") + (sections.get("Attributes", "") if is_record else "")
    missing = (
        []
        if re.match(r" as of `\w+`", told)
        else [name for name in parameters if not re.search(rf"^ *(\w+, )*{name}(, \w+)*:", told, re.MULTILINE)]
    )
    return missing + ([] if is_record or "Raises" in sections else ["Raises:"])


def public() -> Iterator[tuple[str, Any]]:
    """Yield what users can call, and its name: exported, or in a module of integrations."""
    for module in (swapper, swapper.checkpoint, swapper.checkpoint.dcp):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not (isinstance(value, type) and issubclass(value, Exception)):
                yield name, value
    for path in (Path(swapper.__file__).parent / "integrations").glob("[!_]*.py"):
        try:
            module = import_module(f"swapper.integrations.{path.stem}")
        except ImportError:  # its library is not installed
            continue
        for name, value in vars(module).items():
            if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__:
                yield f"{path.stem}.{name}", value


def test_public_docstrings_say_what_is_given_and_what_is_raised() -> None:
    """Of everything with three or more parameters; of less, what it does."""
    found = {at: lacks for n, of in public() for at, one, doc in documented(of, n) if (lacks := lacking(one, doc))}
    assert found == {}


def test_names_that_could_be_confused_say_so() -> None:
    assert "swapper.checkpoint.load" in str(swapper.load.__doc__)
    assert "swapper.load" in str(swapper.checkpoint.load.__doc__)


def test_all_that_is_promised_can_be_imported_and_is_typed() -> None:
    for module in (swapper, swapper.checkpoint):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
        assert set(module.__all__) <= set(dir(module))
    assert (Path(swapper.__file__).parent / "py.typed").exists()
    assert swapper.__version__ == version("torch-swapper")


def test_importing_swapper_imports_no_torch() -> None:
    loaded = "import sys, swapper, swapper.checkpoint; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout == "False\n"


if __name__ == "__main__":
    FACE.write_text(face())

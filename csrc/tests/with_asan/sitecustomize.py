"""First on the path of what csrc/tests/python_sanitized starts: the data plane is then the one that was built with ASan."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ExtensionFileLoader, ModuleSpec

NAME = "swapper._C"


class Sanitized:
    """Finds the data plane where the environment says, before anything finds the installed one."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != NAME:
            return None
        place = os.environ["SWAPPER_SANITIZED"]
        return importlib.util.spec_from_file_location(NAME, place, loader=ExtensionFileLoader(NAME, place))


sys.meta_path.insert(0, Sanitized)  # type: ignore[arg-type]

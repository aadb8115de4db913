"""First on the path of what csrc/tests/python_sanitized starts: the data plane is then the one that was built with ASan."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from types import ModuleType

NAME = "swapper._C"


class Sanitized(MetaPathFinder):
    """Finds the data plane where the environment says, before anything finds the installed one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != NAME:
            return None
        place = os.environ["SWAPPER_SANITIZED"]
        return importlib.util.spec_from_file_location(NAME, place, loader=ExtensionFileLoader(NAME, place))


sys.meta_path.insert(0, Sanitized())
